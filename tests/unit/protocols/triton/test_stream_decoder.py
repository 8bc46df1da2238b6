"""A worker's stream is decoded the same, however it is split."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocols.core.errors import GatewayError
from protocols.core.events import Event, ResponseMetadata, StreamEnd, StreamStart, TextDelta, Usage
from protocols.core.request import GenerationRequest, ResponseOptions
from protocols.triton.decoder import GenerateDecoder
from protocols.triton.endpoints import Triton

STREAMED = GenerationRequest(model="m", kind="completion", prompts=("hi",), stream=True)
EXTRA_OUTPUTS = {"finish_reason": "None", "num_input_tokens": 2, "num_output_tokens": 2}


def format_stream_event(text: Any, **outputs: Any) -> bytes:
    named = {**outputs, "model_name": "m", "model_version": "1", "text_output": text}
    return b"data: %b\n\n" % json.dumps(named, ensure_ascii=False).encode()


def create_decoder(request: GenerationRequest = STREAMED) -> GenerateDecoder:
    decoder = Triton("vllm").create_decoder(request)
    assert isinstance(decoder, GenerateDecoder)
    return decoder


def decode_or_return_error(decoder: GenerateDecoder, parts: Sequence[bytes]) -> Any:
    """Return the events of these bytes, and the error that ends them."""
    events: list[Event] = []
    try:
        for part in parts:
            events += decoder.feed(part)
        events += decoder.close()
    except GatewayError as error:
        return events, type(error), error.message
    return events


TEXTS = st.one_of(
    st.sampled_from(["a", " token", "", "m", "hi", "\n", '"', "\\", "é", "text_output", "None"]),
    st.text(max_size=6),
)
EVENTS = st.one_of(
    *[TEXTS.map(format_stream_event)] * 3,
    TEXTS.map(lambda text: format_stream_event(text, **EXTRA_OUTPUTS)),
    TEXTS.map(lambda text: format_stream_event(text, **EXTRA_OUTPUTS)),
    TEXTS.map(lambda text: format_stream_event(text, **EXTRA_OUTPUTS | {"num_output_tokens": 1})),
    TEXTS.map(lambda text: format_stream_event(text, **EXTRA_OUTPUTS | {"num_input_tokens": 3})),
    TEXTS.map(lambda text: format_stream_event(text, finish_reason="stop")),
    TEXTS.map(lambda text: format_stream_event([text, "b"])),
    TEXTS.map(lambda text: format_stream_event(text, logprobs=[])),
    st.sampled_from(
        [
            b'data: {"error": "no"}\n\n',
            format_stream_event("x").replace(b'"x"', b'"\xff"'),
            format_stream_event("x").replace(b"\n\n", b"\r\n\r\n"),
            format_stream_event("x").replace(b"}\n\n", b', "text_output": "y"}\n\n'),
            b": still here\n\n",
            b"data: \n\n",
            b'{"error": "a bare line"}\n',
        ]
    ),
)


@given(
    st.lists(EVENTS, max_size=14),
    st.lists(st.integers(0, 900), max_size=5),
    st.sampled_from(
        [
            STREAMED,
            replace(STREAMED, n=2),
            replace(STREAMED, response_options=ResponseOptions(usage="each")),
        ]
    ),
)
def test_stream_decodes_to_the_same_events_in_any_packet_size(
    events: list[bytes], cuts: list[int], request: GenerationRequest
) -> None:
    data = b"".join(events)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})

    parts = [data[a:b] for a, b in pairwise(ends)]

    assert decode_or_return_error(create_decoder(request), parts) == decode_or_return_error(
        create_decoder(request), events
    )


@pytest.mark.parametrize(
    ("outputs", "tokens"), [({}, 1), (EXTRA_OUTPUTS, 2)], ids=["without-outputs", "with-outputs"]
)
def test_events_in_one_packet_are_decoded_one_by_one(outputs: dict[str, Any], tokens: int) -> None:
    decoder, data = (
        create_decoder(),
        b"".join(format_stream_event(text, **outputs) for text in ("b", "", "c")),
    )
    first = decoder.feed(format_stream_event("a", **outputs))

    assert [one for one in first if not isinstance(one, ResponseMetadata | StreamStart)] == [
        TextDelta("a", 0, tokens)
    ]
    assert decoder.feed(data) == [TextDelta("b", 0, tokens), TextDelta("c", 0, tokens)]
    assert decoder.feed(format_stream_event("d", **outputs)) == [TextDelta("d", 0, tokens)]


def test_event_without_text_counts_its_tokens() -> None:
    decoder = create_decoder()
    decoder.feed(format_stream_event("a", **EXTRA_OUTPUTS))
    decoder.feed(
        format_stream_event("", **EXTRA_OUTPUTS) + format_stream_event("", **EXTRA_OUTPUTS)
    )

    decoder.feed(format_stream_event("", **EXTRA_OUTPUTS | {"finish_reason": "stop"}))

    assert decoder.close() == [Usage(2, 8), StreamEnd()]


def test_event_with_crlf_line_ends_is_decoded() -> None:
    events = create_decoder().feed(
        format_stream_event("a")
        + format_stream_event("b").replace(b"\n\n", b"\r\n\r\n")
        + format_stream_event("c")
    )

    assert "".join(one.text for one in events if isinstance(one, TextDelta)) == "abc"
