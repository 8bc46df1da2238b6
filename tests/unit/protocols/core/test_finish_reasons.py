"""Finish reasons: known ones, failures, and unknown ones."""

import importlib
import json
from typing import Any, get_args

import pytest

from protocols.chat.decoder import FINISH_REASONS as CHAT_WORDS
from protocols.core.errors import UnknownFinishReason, WorkerFailed
from protocols.core.events import ChoiceEnd, FinishReason
from protocols.core.finish_reasons import FinishReasonTable, FinishWord
from protocols.core.request import GenerationRequest
from protocols.openai.responses_api.decoder import ResponsesDecoder

TABLE = FinishReasonTable("own", {"stop": "eos", "cancelled": None}, {"pause": "eos"})


@pytest.mark.parametrize("source", ["own", "", "other"])
@pytest.mark.parametrize("word", ["abort", "error", "cancelled"])
def test_failure_is_an_error_for_every_client(word: str, source: str) -> None:
    with pytest.raises(WorkerFailed, match=rf"\({word}\)"):
        TABLE.read_word(word, source)


@pytest.mark.parametrize("source", ["own", "", "other"])
def test_known_word(source: str) -> None:
    assert TABLE.read_word("stop", source) == FinishWord("eos")


@pytest.mark.parametrize("source", ["own", "", "other"])
@pytest.mark.parametrize("word", [None, ""])
def test_missing_word_is_an_error_unless_the_protocol_has_none(
    word: str | None, source: str
) -> None:
    with pytest.raises(WorkerFailed, match="has no finish reason"):
        TABLE.read_word(word, source)
    optional = FinishReasonTable("own", TABLE.words, is_optional=True)
    assert optional.read_word(word, source) == FinishWord("unknown")


@pytest.mark.parametrize(("word", "shown"), [("new", "new"), ("STOP", "STOP"), (5, "5")])
def test_unknown_word_reaches_only_clients_of_the_same_protocol(word: Any, shown: str) -> None:
    assert TABLE.read_word(word, "own") == FinishWord("unknown", shown)
    assert TABLE.read_word(word, "") == FinishWord("unknown", shown)
    with pytest.raises(UnknownFinishReason, match=shown):
        TABLE.read_word(word, "other")


def test_word_with_an_approximate_reason_reaches_clients_of_the_same_protocol() -> None:
    assert TABLE.read_word("pause", "own") == FinishWord("eos", "pause")
    assert TABLE.read_word("pause", "") == FinishWord("eos", "pause")
    assert TABLE.read_word("pause", "other") == FinishWord("eos", None, "pause")


@pytest.mark.parametrize(
    ("module", "table"),
    [
        ("protocols.chat.responses", "FINISH_REASONS"),
        ("protocols.openai.responses_api.responses", "FINISH_REASONS"),
        ("protocols.anthropic.responses", "FINISH_REASONS"),
        ("protocols.ollama.responses", "FINISH_REASONS"),
        ("protocols.tgi.responses", "FINISH_REASONS"),
        ("protocols.ovms.responses", "FINISH_REASONS"),
        ("protocols.triton.responses", "FINISH_REASONS"),
        ("protocols.mindie.responses", "FINISH_REASONS"),
        ("protocols.mindie.responses", "EARLY_FINISH_REASONS"),
        ("protocols.mindie.openai_responses", "OPENAI_FINISH_REASONS"),
    ],
)
def test_encoders_have_a_word_for_every_finish_reason(module: str, table: str) -> None:
    words: dict[FinishReason, str] = getattr(importlib.import_module(module), table)
    assert set(words) - {None} == set(get_args(FinishReason))


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("content_filter: PROHIBITED_CONTENT", "content_filter"),
        ("SAFETY", "content_filter"),
        ("sensitive", "content_filter"),
    ],
)
def test_words_of_hosted_apis_are_known(word: str, reason: FinishReason) -> None:
    table = FinishReasonTable("own", CHAT_WORDS)

    assert table.read_word(word, "other") == FinishWord(reason)


@pytest.mark.parametrize("word", ["network_error", "cancelled", "timeout"])
def test_failures_of_other_openai_like_servers_are_errors(word: str) -> None:
    with pytest.raises(WorkerFailed, match=rf"\({word}\)"):
        FinishReasonTable("own", CHAT_WORDS).read_word(word, "own")


def decode_response(source: str, **fields: Any) -> ChoiceEnd:
    decoder = ResponsesDecoder(GenerationRequest(model="m", kind="chat", source=source))
    decoder.feed(json.dumps({"output": [], **fields}).encode())
    [end] = [event for event in decoder.close() if isinstance(event, ChoiceEnd)]
    return end


def test_unknown_status_and_reason_of_an_incomplete_response() -> None:
    incomplete = {"status": "incomplete", "incomplete_details": {"reason": "tired"}}

    assert decode_response("openai responses", **incomplete).own_word == "incomplete: tired"
    assert decode_response("openai responses", status="paused").own_word == "paused"
    with pytest.raises(UnknownFinishReason):
        decode_response("openai", **incomplete)
    with pytest.raises(UnknownFinishReason):
        decode_response("openai", status="paused")


def test_failed_event_without_a_status_is_a_failure() -> None:
    decoder = ResponsesDecoder(GenerationRequest(model="m", kind="chat"))
    with pytest.raises(WorkerFailed):
        decoder.feed(b'data: {"type":"response.failed","response":{}}\n\n')
