"""Invalid responses of workers, and arbitrary bytes, give errors."""

import json
from typing import Any

import pytest
from hypothesis import given as forall
from hypothesis import strategies as st

from protocols.core.errors import (
    GatewayError,
    Overloaded,
    ResponseAborted,
    StreamBroken,
    WorkerFailed,
)
from protocols.core.events import ChoiceEnd, Event, StreamEnd, TextDelta
from protocols.core.request import GenerationRequest, LogprobsOptions
from protocols.core.sse import MAX_EVENT_BYTES
from protocols.triton.endpoints import Triton

STREAM = GenerationRequest(model="m", kind="completion", prompts=("hi",), stream=True)
UNARY = GenerationRequest(model="m", kind="completion", prompts=("hi",))
NAMED = {"model_name": "m", "model_version": "1"}


def make_sse(*events: Any) -> str:
    """Format events like the real server."""
    return "".join(
        f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in events
    )


def make_response(text: Any, **outputs: Any) -> dict[str, Any]:
    return {**outputs, **NAMED, "text_output": text}


def make_vllm_response(text: Any, reason: str = "None") -> dict[str, Any]:
    """Build a response of the vLLM backend with finish reasons."""
    return make_response(text, finish_reason=reason, num_output_tokens=1)


def decode(
    wire: str | bytes,
    request: GenerationRequest = STREAM,
    profile: str = "vllm",
    size: int = 1 << 26,
) -> list[Event]:
    """Decode a body in pieces of ``size`` bytes."""
    data = wire if isinstance(wire, bytes) else wire.encode()
    decoder = Triton(profile).create_decoder(request)
    events: list[Event] = []
    for start in range(0, len(data), size):
        events += decoder.feed(data[start : start + size])
    return [*events, *decoder.close()]


def copy_request(request: GenerationRequest, **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        **{**{name: getattr(request, name) for name in request.__struct_fields__}, **fields}
    )


@pytest.mark.parametrize(
    ("profile", "wire", "error"),
    [
        ("vllm", "", StreamBroken),
        ("vllm", make_sse(NAMED), StreamBroken),
        ("plain", b"\xef\xbb", StreamBroken),
        ("plain", json.dumps(NAMED), WorkerFailed),
        ("vllm", make_sse(make_vllm_response("a")), StreamBroken),
        ("plain", make_sse(make_response("a"))[:-5], StreamBroken),
        ("plain", make_sse(make_response("a")) + "data: {", StreamBroken),
        ("plain", make_sse(make_response("a")) + "<html>", StreamBroken),
        ("plain", "<html>\n", StreamBroken),
        ("plain", make_sse("x"), WorkerFailed),
        ("plain", make_sse("[]"), WorkerFailed),
        ("plain", make_sse({"other": "a"}), WorkerFailed),
        ("plain", make_sse(make_response(7)), WorkerFailed),
        ("plain", make_sse(make_response(None)), WorkerFailed),
        ("plain", "{", WorkerFailed),
        ("plain", json.dumps({"other": "a"}), WorkerFailed),
        ("plain", make_sse("[" * 9000), WorkerFailed),
        ("vllm", make_sse(make_vllm_response("a", "stop"), make_vllm_response("b")), StreamBroken),
        ("vllm", make_sse(make_vllm_response("a", "abort")), ResponseAborted),
        ("vllm", make_sse(make_vllm_response("a", "abort"))[:-2], ResponseAborted),
        ("plain", make_sse({"error": "engine exploded"}), WorkerFailed),
        ("plain", make_sse({"error": "x"})[:-1], WorkerFailed),
        ("plain", json.dumps({"error": "engine exploded"}), WorkerFailed),
        ("plain", make_sse(make_response("a")) + '{"error":"exploded"}', WorkerFailed),
        ("plain", make_sse(make_response("a")) + '{"error":"exploded"}\n', WorkerFailed),
        ("plain", make_sse(make_response("a", error={"message": "x"})), WorkerFailed),
        ("plain", make_sse(make_response("a", error=7)), WorkerFailed),
        ("plain", make_sse({"detail": "x"}), WorkerFailed),
        ("plain", make_sse({"error": "Exceeds maximum queue size"}), Overloaded),
    ],
)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_malformed_response_raises_its_error(
    profile: str, wire: str | bytes, error: type[GatewayError], size: int
) -> None:
    with pytest.raises(error) as excinfo:
        decode(wire, STREAM, profile, size)
    assert type(excinfo.value) is error


def test_status_200_error_of_a_decoupled_model_raises_worker_failed() -> None:
    text = (
        "generate expects model to produce exactly 1 response, use generate stream for model that"
        " generates various number of responses"
    )

    with pytest.raises(WorkerFailed) as excinfo:
        decode(json.dumps({"error": text}), UNARY)
    assert excinfo.value.worker_text == text


def test_empty_unary_response_raises_stream_broken() -> None:
    for profile in Triton.profiles:
        for wire in ("", "\n"):
            with pytest.raises(StreamBroken):
                decode(wire, UNARY, profile)


def test_missing_choices_raise_worker_failed() -> None:
    with pytest.raises(WorkerFailed, match="lacks choice 1; it was asked for 2"):
        decode(json.dumps(make_vllm_response("a", "stop")), copy_request(UNARY, n=2))


def test_events_before_an_error_are_emitted() -> None:
    for last in ({"error": "engine exploded"}, "x"):
        decoder = Triton().create_decoder(STREAM)
        events = decoder.feed(make_sse(make_vllm_response("a"), last).encode())
        assert events[-1] == TextDelta("a")
        with pytest.raises(WorkerFailed):
            decoder.feed(make_sse(make_vllm_response("b")).encode())
        with pytest.raises(WorkerFailed):
            decoder.close()


def test_error_after_the_last_newline_is_raised() -> None:
    decoder = Triton().create_decoder(STREAM)
    decoder.feed(make_sse(make_vllm_response("a")).encode() + b'data: {"error":')

    decoder.feed(b'"engine exploded"}')

    with pytest.raises(WorkerFailed, match="answered with an error"):
        decoder.close()


def test_oversized_response_raises_worker_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.core.sse.MAX_UNARY_BYTES", 100)
    with pytest.raises(WorkerFailed, match="larger than"):
        decode(json.dumps(make_response("x" * 100)), UNARY)
    with pytest.raises(WorkerFailed, match="more than"):
        decode(make_sse(make_response("x" * (MAX_EVENT_BYTES + (2 << 20)))), STREAM, size=1 << 20)


def test_megabyte_response_is_decoded_and_validated() -> None:
    wire = json.dumps(make_vllm_response("x" * (1 << 20), "stop"))

    assert decode(wire, UNARY)[2:] == [ChoiceEnd("eos"), StreamEnd()]
    with pytest.raises(WorkerFailed):
        decode(wire[:-1] + ',"y":NaN}', UNARY)


@forall(
    st.lists(st.binary(max_size=60), max_size=4), st.booleans(), st.sampled_from(["", "data: "])
)
def test_arbitrary_bytes_give_events_or_a_gateway_error(
    pieces: list[bytes], stream: bool, start: str
) -> None:
    decoder = Triton().create_decoder(
        copy_request(STREAM if stream else UNARY, logprobs=LogprobsOptions(1))
    )
    try:
        for piece in pieces:
            decoder.feed(start.encode() + piece)
        decoder.close()
    except GatewayError:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
OUTPUTS = st.dictionaries(
    st.sampled_from(
        ["text_output", "finish_reason", "stop_reason", "num_input_tokens", "num_output_tokens",
         "logprobs", "output_log_probs", "model_name", "error"]
    ),
    JSON | st.text(max_size=3) | JSON.map(json.dumps),
)  # fmt: skip


@forall(st.lists(OUTPUTS, max_size=4), st.booleans())
def test_arbitrary_outputs_give_events_or_a_gateway_error(objects: list[Any], framed: bool) -> None:
    wire = make_sse(*objects) if framed else "".join(map(json.dumps, objects[:1]))
    try:
        events = decode(wire, copy_request(STREAM, logprobs=LogprobsOptions(1), n=2))
    except GatewayError:
        return
    assert isinstance(events[-1], StreamEnd)
