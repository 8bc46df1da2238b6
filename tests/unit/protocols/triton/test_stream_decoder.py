"""A worker's stream is read the same however it is cut."""

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
TOLD = {"finish_reason": "None", "num_input_tokens": 2, "num_output_tokens": 2}


def said(text: Any, **outputs: Any) -> bytes:
    named = {**outputs, "model_name": "m", "model_version": "1", "text_output": text}
    return b"data: %b\n\n" % json.dumps(named, ensure_ascii=False).encode()


def decoder(request: GenerationRequest = STREAMED) -> GenerateDecoder:
    made = Triton("vllm").create_decoder(request)
    assert isinstance(made, GenerateDecoder)
    return made


def heard(made: GenerateDecoder, parts: Sequence[bytes]) -> Any:
    """All that comes of these bytes, to the error that ends it."""
    found: list[Event] = []
    try:
        for part in parts:
            found += made.feed(part)
        found += made.close()
    except GatewayError as error:
        return found, type(error), error.message
    return found


TEXTS = st.one_of(
    st.sampled_from(["a", " token", "", "m", "hi", "\n", '"', "\\", "é", "text_output", "None"]),
    st.text(max_size=6),
)
EVENTS = st.one_of(
    *[TEXTS.map(said)] * 3,
    TEXTS.map(lambda text: said(text, **TOLD)),
    TEXTS.map(lambda text: said(text, **TOLD)),
    TEXTS.map(lambda text: said(text, **TOLD | {"num_output_tokens": 1})),
    TEXTS.map(lambda text: said(text, **TOLD | {"num_input_tokens": 3})),
    TEXTS.map(lambda text: said(text, finish_reason="stop")),
    TEXTS.map(lambda text: said([text, "b"])),
    TEXTS.map(lambda text: said(text, logprobs=[])),
    st.sampled_from(
        [
            b'data: {"error": "no"}\n\n',
            said("x").replace(b'"x"', b'"\xff"'),
            said("x").replace(b"\n\n", b"\r\n\r\n"),
            said("x").replace(b"}\n\n", b', "text_output": "y"}\n\n'),
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
def test_a_stream_means_the_same_however_it_is_cut(
    events: list[bytes], cuts: list[int], request: GenerationRequest
) -> None:
    data = b"".join(events)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    parts = [data[a:b] for a, b in pairwise(ends)]
    assert heard(decoder(request), parts) == heard(decoder(request), events)


@pytest.mark.parametrize(("outputs", "tokens"), [({}, 1), (TOLD, 2)], ids=["untold", "told"])
def test_texts_that_come_together_are_an_event_each(outputs: dict[str, Any], tokens: int) -> None:
    made, data = decoder(), b"".join(said(text, **outputs) for text in ("b", "", "c"))
    first = made.feed(said("a", **outputs))

    assert [one for one in first if not isinstance(one, ResponseMetadata | StreamStart)] == [
        TextDelta("a", 0, tokens)
    ]
    assert made.feed(data) == [TextDelta("b", 0, tokens), TextDelta("c", 0, tokens)]
    assert made.feed(said("d", **outputs)) == [TextDelta("d", 0, tokens)]


def test_an_event_without_a_text_counts() -> None:
    made = decoder()
    made.feed(said("a", **TOLD))
    made.feed(said("", **TOLD) + said("", **TOLD))
    made.feed(said("", **TOLD | {"finish_reason": "stop"}))

    assert made.close() == [Usage(2, 8), StreamEnd()]


def test_an_event_whose_lines_end_otherwise_is_read_among_others() -> None:
    events = decoder().feed(said("a") + said("b").replace(b"\n\n", b"\r\n\r\n") + said("c"))

    assert "".join(one.text for one in events if isinstance(one, TextDelta)) == "abc"
