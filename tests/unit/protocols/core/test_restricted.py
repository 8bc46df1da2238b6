"""An adapter that does not send what a pool's workers do not support."""

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

Asked = dict[str, Any]

SAID = (Message("user", (TextPart("hi"),)),)
EVERYTHING = GenerationRequest(
    model="m",
    kind="chat",
    messages=SAID,
    n=2,
    sampling=SamplingParams(temperature=0.5, top_k=5),
    stopping=StopConditions(max_tokens=3, stop=("x",)),
    logprobs=LogprobsOptions(top=3),
    tools=(Tool("t"),),
    tool_choice="required",
)


def adapter(name: str, profile: str | None = None) -> UpstreamAdapter:
    return cast("UpstreamAdapter", ProtocolRegistry(PROTOCOLS).create_adapter(name, profile, {}))


def restricted(*parameters: str, profile: str | None = "vllm") -> RestrictedAdapter:
    return RestrictedAdapter(adapter("openai", profile), parameters)


NOT_SENT: list[tuple[str, Asked, str]] = [
    ("sampling.top_k", {}, "top_k"),
    ("stopping.stop", {}, "stop"),
    ("n", {}, "n"),
    ("logprobs", {}, "logprobs"),
    ("logprobs.top", {"logprobs": True}, "top_logprobs"),
    ("tools", {}, "tools"),
]


@pytest.mark.parametrize(("path", "stays", "goes"), NOT_SENT)
def test_a_parameter_is_not_sent_and_lost(path: str, stays: Asked, goes: str) -> None:
    plain = restricted()
    limited = restricted(path)
    before = msgspec.json.decode(plain.encode_request(EVERYTHING).body)
    after = msgspec.json.decode(limited.encode_request(EVERYTHING).body)

    assert goes in before
    assert goes not in after
    assert after.items() >= stays.items()
    lost = [
        one
        for one in limited.unsupported_parameters(EVERYTHING, {path: "told"})
        if one.path == path
    ]
    assert [(one.field, one.reason) for one in lost] == [("told", "dropped")]
    assert path not in {one.path for one in plain.unsupported_parameters(EVERYTHING, {})}


def test_nothing_is_lost_that_was_not_asked() -> None:
    plain = GenerationRequest(model="m", kind="chat", messages=SAID, n=1)
    limited = restricted(*PARAMETERS)

    assert limited.unsupported_parameters(plain, {}) == ()
    assert limited.encode_request(plain) == restricted().encode_request(plain)


def test_all_parameters_can_be_left_out_at_once() -> None:
    told = msgspec.json.decode(restricted(*PARAMETERS).encode_request(EVERYTHING).body)
    assert told == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_several_become_one() -> None:
    prompts = GenerationRequest(model="m", kind="completion", prompts=("a", "b"))
    inputs = EmbeddingRequest(model="m", inputs=("a", "b"), encoding="base64", dimensions=4)
    limited = restricted("prompts", "inputs", "encoding", "dimensions", profile=None)

    assert msgspec.json.decode(limited.encode_request(prompts).body)["prompt"] == "a"
    assert msgspec.json.decode(limited.encode_request(inputs).body) == {"model": "m", "input": "a"}
    assert [one.path for one in limited.unsupported_parameters(prompts, {})] == ["prompts"]
    assert {one.path for one in limited.unsupported_parameters(inputs, {})} == {
        "inputs",
        "dimensions",
    }


def test_an_answer_is_decoded_as_that_of_the_request_that_was_sent() -> None:
    decoded: list[Any] = []
    plain: Any = adapter("openai")
    plain.create_decoder = decoded.append

    RestrictedAdapter(plain, ("n",)).create_decoder(EVERYTHING)

    assert decoded == [remove_parameters(EVERYTHING, ("n",))]
    assert decoded[0].n is None


def test_removing_parameters_leaves_the_rest_alone() -> None:
    assert remove_parameters(EVERYTHING, ()) == EVERYTHING
    assert remove_parameters(EVERYTHING, ["logprobs", "logprobs.top"]).logprobs is None  # type: ignore[union-attr]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_optional_capabilities_of_an_adapter_stay(name: str) -> None:
    plain = adapter(name)
    limited = RestrictedAdapter(plain, ("n",))

    for port in (ModelMetadataReader, SupportsCancel, SupportsPassthrough):
        assert isinstance(limited, port) is isinstance(plain, port), port
    assert (limited.name, limited.health_request) == (plain.name, plain.health_request)


class Client:
    """A client's dialect of which only the reading matters here."""

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
        (GenerationRequest(model="m", kind="chat", messages=SAID), True),
        (EVERYTHING, False),
        (None, False),
    ],
)
def test_bytes_are_passed_on_that_say_nothing_of_it(
    decoded: GenerationRequest | None, passed_on: bool
) -> None:
    relay = object()
    plain: Any = adapter("openai")
    plain.prepare_passthrough = lambda *_: relay
    limited: Any = RestrictedAdapter(plain, ("sampling.top_k",))

    assert (limited.prepare_passthrough(Client(decoded), None, None) is relay) is passed_on
    plain.prepare_passthrough = lambda *_: None
    assert RestrictedAdapter(plain, ()).prepare_passthrough(Client(decoded), None, None) is None  # type: ignore[arg-type]
