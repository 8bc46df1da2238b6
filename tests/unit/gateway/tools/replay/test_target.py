"""The gateway that a replay starts, and how recorded requests are sent to it."""

import json
from typing import Any

import pytest

from backends.interfaces import WorkerFailure
from gateway.config.loader import load_text
from gateway.config.schema import Config
from gateway.observability.record import RequestRecord
from gateway.observability.recording import RecordedRequest
from gateway.tools.replay.target import (
    ReplayRequest,
    ReplayTarget,
    TargetError,
    WorkerOptions,
    build_config_target,
    build_worker_target,
)

CONFIG = """
listeners:
  - {address: "0.0.0.0:8080", protocols: [openai, triton]}
  - {address: "0.0.0.0:1025", protocols: [{name: mindie, prefix: /mindie}]}
admin: {address: "127.0.0.1:9901"}
observe: {usage: usage.sqlite, feedback: {}}
backends: {a: {kind: echo}, b: {kind: echo}}
models:
  chat:
    aliases: [gpt]
    versions: {"1": {backend: a}, "2": {backend: b, model: served}}
    split: {weights: {"1": 90, "2": 10}}
    fallback: ["2"]
    shadow: {to: "2", share: 10%}
    rollout: {to: "2", steps: [10, 100]}
    judge: {model: other, rubric: Is it true?}
    record: {to: elsewhere}
  other: {backend: a}
routes: [{name: r, when: {model: chat, key: web}, to: {version: "2"}}]
keys:
  - name: web
    sha256: 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b
    models: [other, chat]
    limits: {requests: 1/s}
"""


def load(text: str = CONFIG) -> Config:
    return load_text(text, "gateway.yaml", env={}, insecure=True)


def build(to: str | None = "chat@2", models: tuple[str, ...] = ("chat", "gone")) -> ReplayTarget:
    return build_config_target(load(), "gateway.yaml", to, models, "/out/incoming")


def record(path: str, body: Any, **fields: Any) -> RecordedRequest:
    values: dict[str, Any] = {"protocol": "openai", "model": "chat", "key": "web"}
    return RecordedRequest(
        id="r1", at=1.0, method="POST", path=path, request=body, **(values | fields)
    )


def build_request(target: ReplayTarget, recorded: RecordedRequest) -> ReplayRequest:
    request = target.build_request(recorded)
    assert request is not None
    return request


def test_every_recorded_model_is_the_target_alone() -> None:
    config = build().config
    assert set(config.models) == {"chat", "gone"}

    for model in config.models.values():
        [(version, target)] = model.resolve_targets().items()
        assert (version, target.backend, target.model) == ("2", "b", "served")
        assert (model.split, model.fallback) == (None, None)
    assert set(config.backends) == {"b"}
    assert config.routes == ()


@pytest.mark.parametrize(
    ("to", "name", "backend"),
    [("chat@2", "chat@2", "b"), ("gpt", "chat@1", "a"), ("other", "other@1", "a")],
)
def test_target_is_a_model_an_alias_or_a_version(to: str, name: str, backend: str) -> None:
    target = build(to)
    assert target.name == name
    assert set(target.config.backends) == {backend}


def test_target_keeps_the_workers_name_of_the_model() -> None:
    [model] = build("other", ("chat",)).config.models.values()
    assert model.resolve_targets()["1"].model == "other"


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("none", "there is no model 'none'; the configuration has chat, other"),
        ("chat@9", "the model 'chat' has no version '9'; it has 1, 2"),
    ],
)
def test_unknown_target_names_those_there_are(to: str, message: str) -> None:
    with pytest.raises(TargetError) as excinfo:
        build(to)
    assert str(excinfo.value) == message


def test_gateway_of_a_replay_can_be_reached_on_loopback_only_and_records_everything() -> None:
    for to in (None, "chat@2"):
        config = build(to).config
        assert {listener.address for listener in config.listeners} == {"127.0.0.1:0"}
        assert (config.admin, config.state, config.identity) == (None, None, None)
        assert config.observe.usage is None
        record_config = config.defaults.record
        assert record_config is not None
        assert (record_config.to, record_config.share) == ("/out/incoming", 1.0)
        assert record_config.bodies == "full"
        assert all(key.limits is None for key in config.keys)
        assert all(
            (model.rollout, model.shadow, model.judge, model.record) == (None,) * 4
            for model in config.models.values()
        )


def test_configuration_without_a_default_target_routes_by_its_models() -> None:
    target = build(None)
    assert target.name == "gateway.yaml"
    assert [route.name for route in target.config.routes] == ["r"]
    assert target.config.models["chat"].split is not None
    assert target.config.models["chat"].fallback == ("2",)

    web = next(key for key in target.config.keys if key.name == "web")
    assert web.models == ("other", "chat")


def test_request_has_the_secret_of_its_own_key() -> None:
    target = build()
    digests = {key.name: key.sha256 for key in target.config.keys}
    assert set(digests) == {"web", "replay"}
    assert digests["web"] != load().keys[0].sha256

    sent = [
        build_request(target, record("/v1/chat/completions", {}, key=key)).headers["authorization"]
        for key in ("web", "gone", "")
    ]
    assert sent[0] == f"Bearer {target.key_secrets['web']}"
    assert sent[1] == sent[2] == f"Bearer {target.key_secrets['replay']}"


def test_gateway_without_keys_needs_none() -> None:
    text = CONFIG[: CONFIG.index("routes:")]
    target = build_config_target(load(text), "f", None, (), "/out/incoming")
    request = build_request(target, record("/v1/chat/completions", {}))

    assert target.config.keys == ()
    assert "authorization" not in request.headers


@pytest.mark.parametrize("name", ["gpt", "chat@1", "chat"])
def test_alias_and_pinned_version_become_the_models_own_name(name: str) -> None:
    request = build_request(build(), record("/v1/chat/completions", {"model": name, "n": 1}))
    assert json.loads(request.body) == {"model": "chat", "n": 1}
    assert request.headers["x-request-id"] == "r1"


@pytest.mark.parametrize(
    ("protocol", "path", "expected"),
    [
        ("triton", "/v2/models/gpt/generate", (0, "/v2/models/chat/generate")),
        ("triton", "/v2/models/chat/versions/1/generate", (0, "/v2/models/chat/generate")),
        ("mindie", "/mindie/v2/models/chat/generate", (1, "/mindie/v2/models/chat/generate")),
        ("mindie", "/v2/models/chat/generate", (1, "/mindie/v2/models/chat/generate")),
        ("openai", "/openai/v1/completions", (0, "/openai/v1/completions")),
    ],
)
def test_path_fits_the_listener_and_the_target(
    protocol: str, path: str, expected: tuple[int, str]
) -> None:
    request = build_request(build(), record(path, {}, protocol=protocol))
    assert (request.listener, request.path) == expected
    assert request.headers["x-interlingua-protocol"] == protocol


def test_azure_request_has_its_api_version() -> None:
    path = "/openai/deployments/gpt/chat/completions"
    target = build_config_target(
        load('listeners: [{address: "127.0.0.1:1", protocols: [{name: openai, profile: azure}]}]\n'
             "backends: {a: {kind: echo}}\nmodels: {chat: {backend: a}}\n"),
        "f", "chat", ("chat",), "/out",
    )  # fmt: skip
    request = build_request(target, record(path, {}, query="api-version=2024-10-21"))

    assert request.path == "/openai/deployments/chat/chat/completions?api-version=2024-10-21"


def test_request_of_a_protocol_without_listener_is_not_sent() -> None:
    assert build().build_request(record("/v1/messages", {}, protocol="anthropic")) is None


@pytest.mark.parametrize(
    ("protocol", "path"), [("openai", "@evil.example/x"), ("mindie", "/mindie@evil.example/x")]
)
def test_path_of_a_recording_cannot_name_another_host(protocol: str, path: str) -> None:
    """It is appended to the address of the gateway, and a key is sent along."""
    text = CONFIG.replace("{name: mindie, prefix: /mindie}", "mindie")
    target = build_config_target(load(text), "f", "chat@2", ("chat",), "/out/incoming")
    assert target.build_request(record(path, {}, protocol=protocol)) is None


def test_only_headers_that_are_recorded_and_can_be_sent_are_sent() -> None:
    headers = {"user-agent": "a", "accept": "b\u202e", "host": "c", "content-length": "1"}
    sent = build_request(build(), record("/v1/chat/completions", {}, headers=headers)).headers

    assert set(sent) == {"user-agent", "x-request-id", "x-interlingua-protocol", "authorization"}


def test_body_that_is_no_json_is_sent_as_it_is() -> None:
    recorded = record("/v1/chat/completions", None, request_text="{broken")
    assert build_request(build(), recorded).body == b"{broken"


def test_worker_gets_requests_of_all_protocols_and_models_by_its_own_name() -> None:
    target = build_worker_target(
        WorkerOptions("http://127.0.0.1:1", "triton", "llama"), ("chat", "b"), "/out"
    )
    assert {
        name: model.resolve_targets()["1"].model for name, model in target.config.models.items()
    } == {"chat": "llama", "b": "llama"}

    for protocol, path in (("anthropic", "/v1/messages"), ("mindie", "/v2/models/chat/generate")):
        request = build_request(target, record(path, {}, protocol=protocol))
        assert request.path.endswith(path)


UNREACHABLE = WorkerFailure("http://w", "WorkerUnreachable")
FAILED = WorkerFailure("http://w", "WorkerFailed")


@pytest.mark.parametrize(
    ("fields", "has_sent"),
    [
        ({"status": 503, "error": "Overloaded"}, False),
        ({"status": 503, "error": "Overloaded", "backend": "worker"}, False),
        ({"status": 504, "error": "DeadlineExceeded", "backend": "worker"}, False),
        ({"status": 502, "worker": "http://w", "worker_failures": (UNREACHABLE,)}, False),
        ({"status": 502, "worker": "http://w", "worker_failures": (UNREACHABLE, FAILED)}, True),
        ({"status": 504, "error": "DeadlineExceeded", "worker": "http://w"}, True),
        ({"status": 501, "error": "UnsupportedEndpoint", "backend": "worker"}, True),
        ({"status": 200, "worker": "http://w", "worker_failures": (UNREACHABLE,)}, True),
    ],
)
def test_request_that_waited_in_vain_was_not_sent(
    fields: dict[str, Any], *, has_sent: bool
) -> None:
    target = build_worker_target(WorkerOptions("http://127.0.0.1:1", "openai"), ("chat",), "/out")
    assert target.has_sent(RequestRecord("r1", **fields)) == has_sent


def test_failure_of_a_backend_without_workers_is_its_own() -> None:
    target = build()
    [backend] = target.config.backends
    record_of_echo = RequestRecord("r1", status=503, error="Overloaded", backend=backend)
    assert target.has_sent(record_of_echo)
