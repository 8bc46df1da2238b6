"""Workers' answers that are broken, and whatever bytes there may be."""

import json
from typing import Any

import pytest
from hypothesis import given as forall
from hypothesis import strategies as st

from protocols.core.errors import GatewayError, Overloaded, StreamBroken, WorkerFailed
from protocols.core.events import ChoiceEnd, Event, StreamEnd, TextDelta
from protocols.core.request import GenerationRequest, LogprobsOptions
from protocols.triton.endpoints import Triton

STREAM = GenerationRequest(model="m", kind="completion", prompts=("hi",), stream=True)
WHOLE = GenerationRequest(model="m", kind="completion", prompts=("hi",))
NAMED = {"model_name": "m", "model_version": "1"}


def sse(*events: Any) -> str:
    """As the real server frames them."""
    return "".join(
        f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in events
    )


def said(text: Any, **outputs: Any) -> dict[str, Any]:
    return {**outputs, **NAMED, "text_output": text}


def told(text: Any, reason: str = "None") -> dict[str, Any]:
    """As a worker of vLLM's family, which tells ends."""
    return said(text, finish_reason=reason, num_output_tokens=1)


def read(
    wire: str | bytes,
    request: GenerationRequest = STREAM,
    profile: str = "vllm",
    size: int = 1 << 26,
) -> list[Event]:
    """The events of a body that comes in pieces of ``size`` bytes."""
    data = wire if isinstance(wire, bytes) else wire.encode()
    decoder = Triton(profile).create_decoder(request)
    events: list[Event] = []
    for start in range(0, len(data), size):
        events += decoder.feed(data[start : start + size])
    return [*events, *decoder.close()]


def asked(request: GenerationRequest, **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        **{**{name: getattr(request, name) for name in request.__struct_fields__}, **fields}
    )


@pytest.mark.parametrize(
    ("profile", "wire", "error"),
    [
        ("vllm", "", StreamBroken),
        ("vllm", sse(NAMED), StreamBroken),
        ("plain", b"\xef\xbb", StreamBroken),
        ("plain", json.dumps(NAMED), WorkerFailed),
        ("vllm", sse(told("a")), StreamBroken),
        ("plain", sse(said("a"))[:-5], StreamBroken),
        ("plain", sse(said("a")) + "data: {", StreamBroken),
        ("plain", sse(said("a")) + "<html>", StreamBroken),
        ("plain", "<html>\n", StreamBroken),
        ("plain", sse("x"), WorkerFailed),
        ("plain", sse("[]"), WorkerFailed),
        ("plain", sse({"other": "a"}), WorkerFailed),
        ("plain", sse(said(7)), WorkerFailed),
        ("plain", sse(said(None)), WorkerFailed),
        ("plain", "{", WorkerFailed),
        ("plain", json.dumps({"other": "a"}), WorkerFailed),
        ("plain", sse("[" * 9000), WorkerFailed),
        ("vllm", sse(told("a", "stop"), told("b")), StreamBroken),
        ("vllm", sse(told("a", "abort")), WorkerFailed),
        ("vllm", sse(told("a", "abort"))[:-2], WorkerFailed),
        ("plain", sse({"error": "engine exploded"}), WorkerFailed),
        ("plain", sse({"error": "x"})[:-1], WorkerFailed),
        ("plain", json.dumps({"error": "engine exploded"}), WorkerFailed),
        ("plain", sse(said("a")) + '{"error":"exploded"}', WorkerFailed),
        ("plain", sse(said("a")) + '{"error":"exploded"}\n', WorkerFailed),
        ("plain", sse(said("a", error={"message": "x"})), WorkerFailed),
        ("plain", sse(said("a", error=7)), WorkerFailed),
        ("plain", sse({"detail": "x"}), WorkerFailed),
        ("plain", sse({"error": "Exceeds maximum queue size"}), Overloaded),
    ],
)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_broken_answers(
    profile: str, wire: str | bytes, error: type[GatewayError], size: int
) -> None:
    with pytest.raises(error) as caught:
        read(wire, STREAM, profile, size)
    assert type(caught.value) is error


def test_an_error_with_status_200_where_a_model_answers_several_times() -> None:
    text = (
        "generate expects model to produce exactly 1 response, use generate stream for model that"
        " generates various number of responses"
    )
    with pytest.raises(WorkerFailed) as caught:
        read(json.dumps({"error": text}), WHOLE)
    assert caught.value.__notes__ == [f"the worker said: {text}"]


def test_a_whole_answer_is_never_empty() -> None:
    for profile in Triton.profiles:
        for wire in ("", "\n"):
            with pytest.raises(StreamBroken):
                read(wire, WHOLE, profile)


def test_fewer_choices_than_asked() -> None:
    with pytest.raises(WorkerFailed, match="another number of choices"):
        read(json.dumps(told("a", "stop")), asked(WHOLE, n=2))


def test_what_came_before_an_error_is_passed_on() -> None:
    for last in ({"error": "engine exploded"}, "x"):
        decoder = Triton().create_decoder(STREAM)
        events = decoder.feed(sse(told("a"), last).encode())
        assert events[-1] == TextDelta("a")
        with pytest.raises(WorkerFailed):
            decoder.feed(sse(told("b")).encode())
        with pytest.raises(WorkerFailed):
            decoder.close()


def test_an_error_behind_the_last_newline_is_told() -> None:
    decoder = Triton().create_decoder(STREAM)
    decoder.feed(sse(told("a")).encode() + b'data: {"error":')
    decoder.feed(b'"engine exploded"}')

    with pytest.raises(WorkerFailed, match="answered with an error"):
        decoder.close()


def test_answers_have_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.core.sse.MAX_UNARY_BYTES", 100)
    with pytest.raises(WorkerFailed, match="larger than"):
        read(json.dumps(said("x" * 100)), WHOLE)
    with pytest.raises(WorkerFailed, match="more than"):
        read(sse(said("x" * (18 << 20))), STREAM, size=1 << 20)


def test_a_long_answer_is_not_read_twice() -> None:
    wire = json.dumps(told("x" * (1 << 20), "stop"))

    assert read(wire, WHOLE)[2:] == [ChoiceEnd("eos"), StreamEnd()]
    with pytest.raises(WorkerFailed):
        read(wire[:-1] + ',"y":NaN}', WHOLE)


@forall(
    st.lists(st.binary(max_size=60), max_size=4), st.booleans(), st.sampled_from(["", "data: "])
)
def test_any_bytes_end_in_events_or_an_error(pieces: list[bytes], stream: bool, start: str) -> None:
    decoder = Triton().create_decoder(
        asked(STREAM if stream else WHOLE, logprobs=LogprobsOptions(1))
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
def test_any_outputs_end_in_events_or_an_error(objects: list[Any], framed: bool) -> None:
    wire = sse(*objects) if framed else "".join(map(json.dumps, objects[:1]))
    try:
        events = read(wire, asked(STREAM, logprobs=LogprobsOptions(1), n=2))
    except GatewayError:
        return
    assert isinstance(events[-1], StreamEnd)
