"""A unary response is read and passed through the same, however it is split."""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.chat.decoder import GenerationDecoder
from protocols.chat.wire_responses import read_text_response
from protocols.core.events import ChoiceEnd, Event, StreamEnd, TextDelta
from protocols.core.interfaces import ResponseDecoder
from protocols.core.request import GenerationRequest
from protocols.core.token_counts import UsageReader
from protocols.passthrough_readers import NameReplacer, UnaryPassthroughReader
from tests.unit.protocols.chat.streams import (
    build_chunk,
    flatten,
    format_event,
    format_text_event,
    run_steps,
)

CHOICE: dict[str, Any] = {
    "index": 0,
    "message": {"role": "assistant", "content": "Hello", "tool_calls": []},
    "finish_reason": "stop",
}
ANSWER: dict[str, Any] = {
    "id": "c-1",
    "model": "worker's",
    "created": 7,
    "system_fingerprint": "fp",
    "choices": [CHOICE],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
REQUEST = GenerationRequest(model="worker's", kind="chat")


def list_responses() -> Iterator[dict[str, Any]]:
    """Return a response, and variants with one difference each."""
    yield ANSWER
    for name in ANSWER:
        yield {key: value for key, value in ANSWER.items() if key != name}
        yield ANSWER | {name: None}
        yield ANSWER | {name: 7.5}
    yield {key: value for key, value in ANSWER.items() if key not in ("id", "model")}
    yield ANSWER | {"error": {"message": "no"}}
    yield ANSWER | {"usage": {"prompt_tokens": 3}}
    yield ANSWER | {"usage": {"prompt_tokens": 3, "completion_tokens": 0}}
    yield ANSWER | {"choices": [CHOICE, CHOICE]}
    for fields in (
        {"finish_reason": "length"},
        {"finish_reason": "tool_calls"},
        {"finish_reason": None},
        {"index": None},
        {"index": 1},
        {"stop_reason": "END"},
        {"matched_stop": 2},
        {"token_ids": [1, 2, 3]},
        {"logprobs": {"content": [{"token": "Hello", "logprob": -0.5}]}},
        {"text": "Hello"},
        {"delta": {"content": "other"}},
    ):
        yield ANSWER | {"choices": [CHOICE | fields]}
    for message in (
        {"content": ""},
        {"content": None},
        {"content": [{"type": "text", "text": "Hello"}]},
        {"content": "Hello", "reasoning_content": "Hm"},
        {"content": "Hello", "refusal": "no"},
        {"content": "Hello", "tool_calls": [{"id": "x", "function": {"name": "f"}}]},
        {"content": "Hello", "function_call": {"name": "f"}},
    ):
        yield ANSWER | {"choices": [CHOICE | {"message": message}]}
    yield ANSWER | {"choices": [{"index": 0, "text": "Hello", "finish_reason": "stop"}]}


def decode_parts(decoder: ResponseDecoder, parts: Sequence[bytes]) -> Any:
    """Return what is decoded from these parts, and the error that ends it."""
    outputs = run_steps(decoder.feed, decoder.close, parts)
    return (flatten(outputs[0]), *outputs[1:]) if isinstance(outputs, tuple) else flatten(outputs)


class PatientDecoder(GenerationDecoder):
    """A decoder without the early exit for a response that is one text."""

    def _read_text_response(self, body: bytearray) -> list[Event]:
        del body
        return []


MORE_FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"odd": 1},
    {"usage": {"prompt_tokens": 3, "completion_tokens": 1 << 40}},
)


@pytest.mark.parametrize("response", [*list_responses()])
def test_early_exit_for_one_text_changes_no_event(response: dict[str, Any]) -> None:
    for fields in MORE_FIELDS:
        body = [msgspec.json.encode(response | fields)]
        decoders = (kind(REQUEST, source="openai") for kind in (GenerationDecoder, PatientDecoder))
        first, second = (decode_parts(decoder, body) for decoder in decoders)
        assert first == second


@pytest.mark.parametrize("response", [*list_responses()])
def test_text_response_of_passthrough_has_the_events_of_the_skimming_decoder(
    response: dict[str, Any],
) -> None:
    for fields in MORE_FIELDS:
        body = msgspec.json.encode(response | fields)
        text = read_text_response(body, UsageReader(REQUEST), "openai")
        if text is not None:
            decoder = GenerationDecoder(REQUEST, skips_logprobs=True, source="openai")
            assert flatten([text[1]]) == decode_parts(decoder, [body])


def test_text_response_is_read_whatever_its_unknown_keys_and_logprobs() -> None:
    logprobs = {"content": [{"token": "Hello", "logprob": -0.5}]}
    for response in (
        ANSWER,
        ANSWER | {"odd": 1},
        ANSWER | {"choices": [CHOICE | {"logprobs": logprobs}]},
        ANSWER | {"choices": [{"index": 0, "text": "\N{ROCKET}", "finish_reason": "length"}]},
    ):
        for ascii_only in (False, True):
            body = json.dumps(response, ensure_ascii=ascii_only).encode()
            assert read_text_response(body, UsageReader(REQUEST)) is not None


BODIES = st.one_of(
    st.sampled_from([*list_responses()]).map(msgspec.json.encode),
    st.just(
        format_text_event("a") + format_event(build_chunk(finish="stop")) + b"data: [DONE]\n\n"
    ),
    st.sampled_from([b"", b"{", b"{}", b"[]", b'{"error": "no"}']),
)


@given(
    body=st.tuples(
        st.sampled_from([b"", b"", b" ", b"\xef\xbb\xbf"]),
        BODIES,
        st.sampled_from([b"", b"\n", b"x"]),
    ).map(b"".join),
    cuts=st.lists(st.integers(0, 400), max_size=3).map(sorted),
    kind=st.sampled_from(["chat", "completion"]),
)
def test_unary_response_decodes_the_same_in_any_packets(
    body: bytes, cuts: list[int], kind: Any
) -> None:
    parts = [body[start:end] for start, end in pairwise([0, *cuts, len(body)])]
    request = msgspec.structs.replace(REQUEST, kind=kind)
    assert decode_parts(GenerationDecoder(request), parts) == decode_parts(
        GenerationDecoder(request), [body]
    )


@pytest.mark.parametrize("around", [b"", b" "])
def test_unary_response_is_passed_through_with_its_public_name(around: bytes) -> None:
    passage = UnaryPassthroughReader(GenerationDecoder(REQUEST), NameReplacer({"model": "public"}))
    body = around + msgspec.json.encode(ANSWER) + b"\n"

    for part in (body[:40], body[40:]):
        raw, events = passage.feed([part])
        assert raw == b""
        assert not events
    raw, events = passage.close()

    assert json.loads(raw or b"") == ANSWER | {"model": "public"}
    assert ChoiceEnd("eos") in events
    assert isinstance(events[-1], StreamEnd)


def test_response_without_usage_is_decoded_at_its_end() -> None:
    passage = UnaryPassthroughReader(GenerationDecoder(REQUEST), NameReplacer({"model": "public"}))
    body = msgspec.json.encode(ANSWER | {"usage": None})

    assert passage.feed([body[:30]]) == (b"", [])

    passage.feed([body[30:]])
    raw, events = passage.close()

    assert json.loads(raw or b"") == ANSWER | {"usage": None, "model": "public"}
    assert TextDelta("Hello") in events


def test_stream_response_to_a_unary_request_is_decoded_at_once() -> None:
    passage = UnaryPassthroughReader(GenerationDecoder(REQUEST), NameReplacer({"model": "public"}))
    first: tuple[bytes | None, Sequence[Event]] = passage.feed([format_text_event("a")])

    assert TextDelta("a") in first[1]

    passage.feed([format_event(build_chunk(finish="stop")) + b"data: [DONE]\n\n"])
    assert passage.close()[0] is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_id_of_an_answer_is_replaced_but_not_those_of_its_calls(*, stream: bool) -> None:
    calls = b'[{"id":"c1","function":{"arguments":"{\\"id\\": 1}"}},{"id":"c2","x":{"id":"y"}}]'
    answer = b'{"choices":[{"message":{"tool_calls":%b}}],"id":"w","x":"]"}' % calls
    data = b"data: %b\n\ndata: %b\n\n" % (answer, answer) if stream else answer

    replaced = NameReplacer({"id": "own"}).replace(data)

    assert replaced == data.replace(b'"id":"w"', b'"id":"own"')
