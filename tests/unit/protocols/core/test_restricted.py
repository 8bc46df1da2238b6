"""An adapter does not send what its pool's workers do not support."""

from typing import Any, cast

import msgspec
import pytest

from gateway.config.registry import ProtocolRegistry
from protocols import PROTOCOLS
from protocols.core.errors import MalformedRequest
from protocols.core.interfaces import (
    ModelMetadataReader,
    SupportsCancel,
    SupportsPassthrough,
    UpstreamAdapter,
)
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    LogprobsOptions,
    Message,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
)
from protocols.core.restricted import PARAMETERS, RestrictedAdapter, remove_parameters

JsonObject = dict[str, Any]

REGISTRY = ProtocolRegistry(PROTOCOLS)
WORKER_PROTOCOLS = [name for name in PROTOCOLS if REGISTRY.serves_workers(name)]

MESSAGES = (Message("user", (TextPart("hi"),)),)
EVERYTHING = GenerationRequest(
    model="m",
    kind="chat",
    messages=MESSAGES,
    n=2,
    sampling=SamplingParams(temperature=0.5, top_k=5),
    stopping=StopConditions(max_tokens=3, stop=("x",)),
    logprobs=LogprobsOptions(top=3),
    tools=(Tool("t"),),
    tool_choice="required",
)


def create_adapter(name: str, profile: str | None = None) -> UpstreamAdapter:
    return cast("UpstreamAdapter", ProtocolRegistry(PROTOCOLS).create_adapter(name, profile, {}))


def restrict_adapter(*parameters: str, profile: str | None = "vllm") -> RestrictedAdapter:
    return RestrictedAdapter(create_adapter("openai", profile), parameters)


NOT_SENT: list[tuple[str, JsonObject, str]] = [
    ("sampling.top_k", {}, "top_k"),
    ("stopping.stop", {}, "stop"),
    ("n", {}, "n"),
    ("logprobs", {}, "logprobs"),
    ("logprobs.top", {"logprobs": True}, "top_logprobs"),
    ("tools", {}, "tools"),
]


@pytest.mark.parametrize(("path", "stays", "goes"), NOT_SENT)
def test_restricted_parameter_is_not_sent_and_reported_as_lost(
    path: str, stays: JsonObject, goes: str
) -> None:
    plain = restrict_adapter()
    limited = restrict_adapter(path)
    before = msgspec.json.decode(plain.encode_request(EVERYTHING).body)
    after = msgspec.json.decode(limited.encode_request(EVERYTHING).body)

    assert goes in before
    assert goes not in after
    assert after.items() >= stays.items()

    lost = [
        one
        for one in limited.unsupported_parameters(EVERYTHING, {path: "field"})
        if one.path == path
    ]
    assert [(one.field, one.reason) for one in lost] == [("field", "dropped")]
    assert path not in {one.path for one in plain.unsupported_parameters(EVERYTHING, {})}


def test_absent_restricted_parameters_are_not_reported() -> None:
    plain = GenerationRequest(model="m", kind="chat", messages=MESSAGES, n=1)
    limited = restrict_adapter(*PARAMETERS)

    assert limited.unsupported_parameters(plain, {}) == ()
    assert limited.encode_request(plain) == restrict_adapter().encode_request(plain)


def test_all_parameters_can_be_restricted_at_once() -> None:
    body = msgspec.json.decode(restrict_adapter(*PARAMETERS).encode_request(EVERYTHING).body)
    assert body == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_restricted_prompts_and_inputs_keep_only_the_first() -> None:
    prompts = GenerationRequest(model="m", kind="completion", prompts=("a", "b"))
    inputs = EmbeddingRequest(model="m", inputs=("a", "b"), encoding="base64", dimensions=4)

    limited = restrict_adapter("prompts", "inputs", "encoding", "dimensions", profile=None)

    assert msgspec.json.decode(limited.encode_request(prompts).body)["prompt"] == "a"
    assert msgspec.json.decode(limited.encode_request(inputs).body) == {"model": "m", "input": "a"}
    assert [one.path for one in limited.unsupported_parameters(prompts, {})] == ["prompts"]
    assert {one.path for one in limited.unsupported_parameters(inputs, {})} == {
        "inputs",
        "dimensions",
    }


def test_response_is_decoded_for_the_restricted_request() -> None:
    decoded: list[Any] = []
    plain: Any = create_adapter("openai")
    plain.create_decoder = decoded.append

    RestrictedAdapter(plain, ("n",)).create_decoder(EVERYTHING)

    assert decoded == [remove_parameters(EVERYTHING, ("n",))]
    assert decoded[0].n is None


def test_remove_parameters_keeps_the_other_parameters() -> None:
    assert remove_parameters(EVERYTHING, ()) == EVERYTHING
    assert remove_parameters(EVERYTHING, ["logprobs", "logprobs.top"]).logprobs is None  # type: ignore[union-attr]


@pytest.mark.parametrize("name", WORKER_PROTOCOLS)
def test_restricted_adapter_keeps_optional_capabilities(name: str) -> None:
    plain = create_adapter(name)
    limited = RestrictedAdapter(plain, ("n",))

    for port in (ModelMetadataReader, SupportsCancel, SupportsPassthrough):
        assert isinstance(limited, port) is isinstance(plain, port), port
    assert (limited.name, limited.health_request) == (plain.name, plain.health_request)


def test_restricted_adapter_has_no_capability_that_the_adapter_lacks() -> None:
    class Plain:
        name = "plain"
        health_request = None

        def read_error(self) -> None: ...

    restricted = RestrictedAdapter(cast("UpstreamAdapter", Plain()), ["n"])
    assert not isinstance(restricted, SupportsPassthrough | SupportsCancel | ModelMetadataReader)


class ClientStub:
    """A client adapter that only decodes."""

    def __init__(self, decoded: GenerationRequest | None) -> None:
        self._decoded = decoded

    def decode_request(self, call: Any) -> GenerationRequest:
        del call
        if self._decoded is None:
            raise MalformedRequest("no JSON")
        return self._decoded


@pytest.mark.parametrize(
    ("decoded", "passed_on"),
    [
        (GenerationRequest(model="m", kind="chat", messages=MESSAGES), True),
        (EVERYTHING, False),
        (None, False),
    ],
)
def test_requests_without_restricted_parameters_are_passed_through(
    decoded: GenerationRequest | None, passed_on: bool
) -> None:
    relay = object()
    plain: Any = create_adapter("openai")
    plain.prepare_passthrough = lambda *_: relay
    limited: Any = RestrictedAdapter(plain, ("sampling.top_k",))

    assert (limited.prepare_passthrough(ClientStub(decoded), None, None) is relay) is passed_on

    plain.prepare_passthrough = lambda *_: None
    assert RestrictedAdapter(plain, ()).prepare_passthrough(ClientStub(decoded), None, None) is None  # type: ignore[arg-type]
