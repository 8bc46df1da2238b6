"""Valid files are loaded into the expected objects; tests/golden/config has invalid ones."""

import shutil
from pathlib import Path

import msgspec
import pytest

from backends import BACKENDS
from backends.interfaces import Timeouts
from backends.pool.settings import PoolSettings
from gateway.admin.config_view import dump_config
from gateway.config.errors import ConfigError
from gateway.config.loader import load_bytes, load_config, load_text
from gateway.config.registry import ProtocolRegistry
from gateway.config.schema import (
    BackendConfig,
    Config,
    EchoConfig,
    TargetConfig,
)
from gateway.config.yaml_reader import MAX_ALIASED_NODES, MAX_DEPTH, MAX_FILE_SIZE, decode_utf8
from protocols import PROTOCOLS

LISTENERS = 'listeners: [{address: "127.0.0.1:0", protocols: [openai]}]\n'
ECHO = "backends: {a: {kind: echo}}\n"
CHAT = "models: {chat: {backend: a}}\n"


def load_valid_config(*parts: str, insecure: bool = False, **env: str) -> Config:
    return load_text("".join((LISTENERS, *parts)), "g.yaml", env=env, insecure=insecure)


def collect_issues(text: str, *, insecure: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as excinfo:
        load_text(text, "g.yaml", env={}, insecure=insecure)
    return str(excinfo.value).splitlines()


def test_backend_kinds_match_the_registry() -> None:
    kinds = msgspec.inspect.type_info(BackendConfig)
    assert isinstance(kinds, msgspec.inspect.UnionType)

    tags = {one.tag for one in kinds.types if isinstance(one, msgspec.inspect.StructType)}
    assert tags == BACKENDS.keys()


def test_durations_and_sizes_become_seconds_and_bytes() -> None:
    config = load_valid_config(ECHO, CHAT, "limits: {body: 1MiB, drain_timeout: 1m}\n")
    assert (config.limits.body, config.limits.drain_timeout, config.limits.header) == (
        1 << 20,
        60.0,
        16384,
    )


def test_short_forms_are_expanded() -> None:
    config = load_valid_config('backends: {a: {protocol: openai, workers: ["http://w:1"]}}\n', CHAT)
    pool = config.backends["a"]

    assert isinstance(pool, PoolSettings)
    assert (pool.kind, pool.workers[0].url, pool.workers[0].weight) == ("pool", "http://w:1", 1)
    assert config.listeners[0].protocols[0].name == "openai"


def test_omitted_pool_timeouts_have_the_configured_defaults() -> None:
    config = load_valid_config(
        "defaults: {timeouts: {connect: 1s, idle: 9s}}\n",
        "backends:\n",
        '  a: {protocol: openai, workers: ["http://w:1"], timeouts: {idle: 3s}}\n',
        '  b: {protocol: openai, workers: ["http://w:2"]}\n',
        CHAT,
    )
    first, second = config.backends["a"], config.backends["b"]

    assert isinstance(first, PoolSettings)
    assert isinstance(second, PoolSettings)
    assert first.timeouts == Timeouts(connect=1.0, idle=3.0)
    assert second.timeouts == Timeouts(connect=1.0, idle=9.0)


def test_targets_and_weights_are_resolved_for_every_form_of_a_model() -> None:
    config = load_valid_config(
        ECHO,
        "models:\n",
        "  lone: {backend: a, model: m}\n",
        "  one: {versions: {next: {backend: a}}}\n",
        '  two: {versions: {"1": {backend: a}, "2": {backend: a}}, split: {weights: {"2": 7}}}\n',
    )
    lone, one, two = config.models.values()

    assert lone.resolve_targets() == {"1": TargetConfig(backend="a", model="m")}
    assert one.resolve_targets() == {"next": TargetConfig(backend="a")}
    assert [model.resolve_weights() for model in (lone, one, two)] == [
        {"1": 1},
        {"next": 1},
        {"2": 7},
    ]


@pytest.mark.parametrize(
    ("versions", "highest"),
    [(("9", "10"), "10"), (("10", "9"), "10"), (("next", "1"), "1"), (("next", "01", "2"), "2")],
)
def test_highest_version_receives_all_traffic_without_a_split(
    versions: tuple[str, ...], highest: str
) -> None:
    rows = "".join(f'    "{version}": {{backend: a}}\n' for version in versions)
    config = load_valid_config(ECHO, "models:\n  m:\n   versions:\n", rows)

    assert config.models["m"].resolve_weights() == {highest: 1}


def test_routing_rules_and_sticky_sources_are_parsed() -> None:
    config = load_valid_config(
        ECHO,
        'models: {m: {versions: {"1": {backend: a}}, split: {weights: {"1": 1}, ',
        'sticky: ["header:X-User-Id", "body:User Name", key]}}}\n',
        "routes: [{name: r, when: {body: {t: x, n: 5, f: 1.5, b: true}, share: 5%}, ",
        "to: {model: m}}]",
    )

    split, [rule] = config.models["m"].split, config.routes
    assert split is not None
    assert split.sticky == ("header:x-user-id", "body:User Name", "key")
    assert rule.when.body == {"t": "x", "n": 5, "f": 1.5, "b": True}
    assert rule.when.body["b"] is True
    assert (rule.when.share, rule.to.model, rule.to.version) == (0.05, "m", None)


def test_protocol_options_are_read_from_listeners_and_models() -> None:
    config = load_text(
        'listeners: [{address: "127.0.0.1:0", protocols: [{name: databricks, '
        "stream_default: true}]}]\n"
        "backends: {a: {kind: echo}}\n"
        "models: {chat: {backend: a, databricks: {pay_per_token: true}}}\n",
        "g.yaml",
        env={},
    )

    assert config.listeners[0].protocols[0].options == {"stream_default": True}
    assert config.models["chat"].options == {"databricks": {"pay_per_token": True}}


def test_environment_value_is_converted_to_the_type_of_the_field() -> None:
    text = 'backends: {a: {kind: echo, script: ["${N}"], context: "${N}", delay: "${D:-1s}"}}\n'
    echo = load_valid_config(text, CHAT, N="017").backends["a"]
    assert echo == EchoConfig(script=("017",), context=17, delay=1.0)


def test_environment_value_cannot_inject_yaml() -> None:
    echo = load_valid_config(
        'backends: {a: {kind: echo, script: ["${X}"]}}\n', CHAT, X="a]}, b: {kind: x"
    )
    assert echo.backends["a"] == EchoConfig(script=("a]}, b: {kind: x",))


def test_secret_is_read_from_text_environment_or_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    path = tmp_path / "g.yaml"
    path.write_text(
        LISTENERS + "backends:\n  a:\n    protocol: openai\n    workers:\n"
        '      - {url: "http://w:1", auth: {bearer: from-text}}\n'
        '      - {url: "http://w:2", auth: {bearer: {env: TOKEN}}}\n'
        '      - {url: "http://w:3", auth: {bearer: {file: token}}}\n' + CHAT
    )
    config = load_config(str(path), env={"TOKEN": "from-env"})
    pool = config.backends["a"]

    assert isinstance(pool, PoolSettings)

    values = [
        worker.auth.bearer.reveal() for worker in pool.workers if worker.auth and worker.auth.bearer
    ]
    assert values == ["from-text", "from-env", "from-file"]
    assert "from-" not in f"{config!r} {dump_config(config)}"
    assert dump_config(config)["backends"]["a"]["workers"][0]["auth"] == {
        "bearer": "***",
        "header": None,
        "query": None,
        "basic": None,
    }


def test_relative_paths_are_resolved_from_the_configuration_folder(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[3] / "fault/loopback.pem", tmp_path / "ca.pem")
    text = 'backends: {a: {protocol: openai, workers: ["https://w"], tls: {ca: ca.pem}}}\n'
    path = tmp_path / "g.yaml"
    path.write_text(LISTENERS + text + CHAT)

    pool = load_config(str(path), env={}).backends["a"]

    assert isinstance(pool, PoolSettings)
    assert pool.tls is not None
    assert pool.tls.ca == str(tmp_path / "ca.pem")


def test_public_listener_requires_keys_or_the_insecure_flag() -> None:
    text = 'listeners: [{address: "0.0.0.0:8000", protocols: [openai]}]\n' + ECHO + CHAT
    assert "there are no keys" in collect_issues(text)[0]
    assert load_text(text, "g.yaml", env={}, insecure=True).listeners[0].address == "0.0.0.0:8000"

    keyed = text + f"keys: [{{name: k, sha256: {'ab' * 32}}}]\n"
    assert load_text(keyed, "g.yaml", env={}).keys[0].models is None


def test_default_listener_serves_every_protocol_on_loopback() -> None:
    config = load_text(ECHO + CHAT, "g.yaml", env={})
    (listener,) = config.listeners
    assert listener.address == "127.0.0.1:8000"

    spoken = filter(ProtocolRegistry(PROTOCOLS).serves_clients, PROTOCOLS)
    assert {one.name for one in listener.protocols} == set(spoken)

    mounts = [{"name": one.name, "prefix": one.prefix or None} for one in listener.protocols]
    text = msgspec.json.encode(
        [{"address": listener.address, "protocols": [_drop_none_values(mount) for mount in mounts]}]
    ).decode()
    assert load_text(f"listeners: {text}\n" + ECHO + CHAT, "g.yaml", env={}) == config


def _drop_none_values(mount: dict[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in mount.items() if value is not None}


def test_merge_keys_do_not_override_own_or_earlier_keys() -> None:
    config = load_valid_config(
        "x-a: &a {delay: 1s, context: 1}\nx-b: &b {delay: 2s, script: [b]}\n",
        "backends:\n  a: {kind: echo, <<: [*a, *b]}\n  b: {<<: *b, kind: echo, delay: 3s}\n",
        CHAT,
    )

    assert config.backends["a"] == EchoConfig(delay=1.0, context=1, script=("b",))
    assert config.backends["b"] == EchoConfig(delay=3.0, script=("b",))


@pytest.mark.parametrize("beyond", [0, 1])
def test_nesting_depth_limit_is_exact(beyond: int) -> None:
    depth = MAX_DEPTH - 1 + beyond  # the document itself is the first level
    text = f"x-deep: {'[' * depth}{']' * depth}\n{LISTENERS}{ECHO}{CHAT}"
    if beyond:
        assert "nested deeper than 32" in collect_issues(text)[0]
    else:
        assert load_text(text, "g.yaml", env={}).models


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_limit_of_values_that_aliases_repeat_is_exact(beyond: int) -> None:
    repeated = 1 + 9_999  # the list and its values
    lists = f"x-list: &list [{', '.join(['1'] * 9_999)}]\nx-one: &one 1\n"
    aliases = ["*list"] * (MAX_ALIASED_NODES // repeated) + ["*one"] * beyond
    text = f"{lists}x-many: [{', '.join(aliases)}]\n{LISTENERS}{ECHO}{CHAT}"
    if beyond:
        [issue] = collect_issues(text)
        assert "aliases repeat more than 200000 values; use fewer aliases" in issue
    else:
        assert load_text(text, "g.yaml", env={}).models


def test_a_configuration_with_more_than_ten_thousand_values_loads() -> None:
    text = f"x-many: [{', '.join(['1'] * 50_000)}]\n{LISTENERS}{ECHO}{CHAT}"
    assert load_text(text, "g.yaml", env={}).models


def test_a_file_larger_than_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError) as excinfo:
        load_bytes(b"#" * (MAX_FILE_SIZE + 1), "g.yaml", env={})
    assert str(excinfo.value) == "g.yaml:1:1: the file is larger than 64 MiB, the limit; split it"


def test_invalid_utf_8_is_reported_with_its_position() -> None:
    with pytest.raises(ConfigError) as excinfo:
        decode_utf8("a: 1\nbü: ".encode() + b"\xff\n", "g.yaml")
    assert str(excinfo.value) == "g.yaml:2:5: the byte 0xff is not UTF-8; save the file as UTF-8"
    assert decode_utf8(b"\xef\xbb\xbfa: 1", "g.yaml") == "a: 1"


def test_issues_are_in_file_order() -> None:
    with pytest.raises(ConfigError) as excinfo:
        load_text("models: {a: {bakend: x}}\nbackends: {b: {kind: x}}\nfoo: 1\n", "g.yaml", env={})

    places = [(one.line, one.column) for one in excinfo.value.issues]
    assert places == sorted(places)
    assert [one.path for one in excinfo.value.issues] == [
        "models.a",
        "models.a.bakend",
        "backends.b.kind",
        "foo",
    ]


@pytest.mark.parametrize("folder", ["", "conf/", "./conf/", "../conf/"])
def test_relative_model_path_is_never_read_as_a_model_name(folder: str) -> None:
    text = "backends: {a: {kind: torch, path: ./nothing}}\nmodels: {chat: {backend: a}}"
    with pytest.raises(ConfigError, match="is not a file or folder"):
        load_text(text, f"{folder}gateway.yaml", env={})


def test_a_backends_model_name_with_a_dot_segment_is_refused() -> None:
    models = "models: {a: {backend: a, model: ..}, b: {versions: {1: {backend: a, model: x/./y}}}}"
    assert [one.partition(": ")[2] for one in collect_issues(LISTENERS + ECHO + models)] == [
        "'..' holds '.' or '..', which mean folders in a worker's path (at models.a.model)",
        (
            "'x/./y' holds '.' or '..', which mean folders in a worker's path "
            "(at models.b.versions.1.model)"
        ),
    ]
