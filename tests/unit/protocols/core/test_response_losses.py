"""What an encoder does not write of an answer is reported by its path."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec import Raw

from protocols.core.events import (
    ChoiceEnd,
    Event,
    HostedToolCall,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    ResponseMetadata,
    ToolCallStart,
    Usage,
)
from protocols.core.loss import LossReason
from protocols.core.response_losses import (
    ALL_WRITTEN,
    AS_TEXT,
    ONE_TEXT,
    TEXT_AND_REFUSAL,
    USAGE_DETAILS,
    CallLosses,
    LossyEvent,
    find_losses,
    get_single_losses,
)

KEYS = (((("a",), 1)), ((("b",), 2)))
EXTRA = ResponseExtra("openai", "response", KEYS)
CALL = ToolCallStart(1, 2, "id", "f")
MESSAGE = "response.choices[0].message"


class Encoder:
    """Writes what a test says."""

    def __init__(self, content: Mapping[type[Event], LossReason]) -> None:
        self.content_losses = content
        self.written_details: frozenset[str] = frozenset()


def list_losses(event: LossyEvent, encoder: Any) -> list[tuple[str, str]]:
    return [(loss.field, loss.reason) for loss in find_losses(event, encoder)]


USAGE = Usage(9, 5, cached_tokens=3, reasoning_tokens=4, cache_write_tokens=2)
USAGE_PATHS = [
    "response.usage.prompt_tokens_details.cached_tokens",
    "response.usage.prompt_tokens_details.cache_write_tokens",
    "response.usage.completion_tokens_details.reasoning_tokens",
]


def test_details_of_usage_that_an_encoder_does_not_write_are_reported() -> None:
    encoder = Encoder(ALL_WRITTEN)
    assert list_losses(USAGE, encoder) == [(path, "dropped") for path in USAGE_PATHS]

    encoder.written_details = frozenset({"cached_tokens", "reasoning_tokens"})
    assert list_losses(USAGE, encoder) == [(USAGE_PATHS[1], "dropped")]
    assert list_losses(Usage(9, 5, cached_tokens=0), Encoder(ALL_WRITTEN)) == []
    assert list_losses(Usage(9, 5, 3, source="counted"), Encoder(ALL_WRITTEN)) == []


@pytest.mark.parametrize("name", sorted(USAGE_DETAILS))
def test_each_detail_of_usage_is_one_that_may_be_lost(name: str) -> None:
    assert Usage(9, 5, **{name: 1}).has_details  # type: ignore[arg-type]
    assert not Usage(9, 5, **{name: 0}).has_details  # type: ignore[arg-type]


def test_fingerprint_that_an_encoder_does_not_write_is_reported() -> None:
    metadata, encoder = ResponseMetadata(fingerprint="fp", source="openai"), Encoder(ALL_WRITTEN)
    assert list_losses(metadata, encoder) == [("response.system_fingerprint", "dropped")]
    assert list_losses(ResponseMetadata("m", source="openai"), encoder) == []

    encoder.written_details = frozenset({"system_fingerprint"})
    assert list_losses(metadata, encoder) == []


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (ReasoningDelta("hm"), (f"{MESSAGE}.reasoning_content", "dropped")),
        (RefusalDelta("no"), (f"{MESSAGE}.refusal", "dropped")),
        (CALL, ("response.choices[1].message.tool_calls[2]", "dropped")),
        (ChoiceEnd("eos", lost_word="x"), ("response.choices[0].finish_reason", "approximated")),
    ],
)
def test_encoder_that_declares_nothing_loses_all(event: Any, expected: tuple[str, str]) -> None:
    assert list_losses(event, object()) == [expected]


@pytest.mark.parametrize(
    ("content", "reasons"),
    [
        (ALL_WRITTEN, [None, None, None]),
        (AS_TEXT, [None, "approximated", None]),
        (ONE_TEXT, ["approximated", "approximated", "dropped"]),
        (TEXT_AND_REFUSAL, ["dropped", "approximated", "dropped"]),
    ],
)
def test_encoder_declares_what_becomes_of_content(
    content: Mapping[type[Event], LossReason], reasons: list[str | None]
) -> None:
    encoder: Any = Encoder(content)
    events: list[LossyEvent] = [ReasoningDelta("hm"), RefusalDelta("no"), CALL]

    losses = [list_losses(event, encoder) for event in events]

    assert [one[0][1] if one else None for one in losses] == reasons


def test_finish_reason_is_lost_if_the_encoder_hides_it() -> None:
    encoder: Any = Encoder(ALL_WRITTEN)

    assert list_losses(ChoiceEnd("length"), encoder) == []
    encoder.hidden_reasons = ("length",)
    assert list_losses(ChoiceEnd("length"), encoder)


def test_keys_reach_only_encoders_of_their_protocol() -> None:
    encoder: Any = Encoder(ALL_WRITTEN)

    assert [field for field, _ in list_losses(EXTRA, encoder)] == ["response.a", "response.b"]
    encoder.extra_source = "openai"
    assert list_losses(EXTRA, encoder) == []
    encoder.writes_key = lambda _event, path: path == ("a",)
    assert [field for field, _ in list_losses(EXTRA, encoder)] == ["response.b"]


def test_signature_is_lost_unless_the_encoder_writes_it() -> None:
    encoder: Any = Encoder(ALL_WRITTEN)
    signed = ReasoningDelta("", signature="s", at="content[0].signature")

    assert list_losses(signed, encoder) == [("content[0].signature", "dropped")]
    encoder.writes_signature = lambda _event: True
    assert list_losses(signed, encoder) == []


def test_call_of_a_hosted_tool_is_lost_without_an_encoder_for_it() -> None:
    event = HostedToolCall("web_search_call", Raw(b"{}"), place=3)

    assert list_losses(event, None) == [("response.output[3].web_search_call", "dropped")]


def test_calls_and_arguments_that_an_encoder_leaves_out_are_listed() -> None:
    encoder: Any = Encoder(ALL_WRITTEN)
    encoder.losses = CallLosses()

    encoder.losses.add(1)
    encoder.losses.add_arguments(2, ((("x",), 1),))

    assert [loss.field for loss in get_single_losses(encoder)] == [
        f"{MESSAGE}.tool_calls[1]",
        f"{MESSAGE}.tool_calls[2].x",
    ]
    assert get_single_losses(None) == ()
