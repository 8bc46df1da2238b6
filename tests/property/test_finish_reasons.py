"""Answers that ended for different reasons are not the same to a client, unless that is reported.

Each worker protocol's answer gets each word of its table of finish reasons in turn, for a client of
each protocol, unary and streamed.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from protocols.anthropic.decoder import FINISH_REASONS as ANTHROPIC_WORDS
from protocols.chat.decoder import APPROXIMATIONS
from protocols.chat.decoder import FINISH_REASONS as CHAT_WORDS
from protocols.cohere.decoder import FINISH_REASONS as COHERE_WORDS
from protocols.core.events import INCOMPLETE_REASONS
from protocols.core.finish_reasons import FinishReasonTable
from protocols.mindie.decoder import FINISH_REASONS as MINDIE_WORDS
from protocols.openai.responses_api.decoder import INCOMPLETE_REASONS as RESPONSES_WORDS
from protocols.triton.decoder import FINISH_REASONS as TRITON_WORDS
from tests.property.test_unknown_response_keys import (
    CLIENTS,
    PROMPT_ANSWERS,
    PROMPT_CLIENTS,
    PROMPT_WORKERS,
    WORKERS,
    join_events,
    make_chunk,
    translate_response,
)

CHAT = FinishReasonTable("", CHAT_WORDS, APPROXIMATIONS)
TEXT = {"type": "text", "text": "hi"}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hi"}}
ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}
MESSAGE_START = {"type": "message_start", "message": {"id": "m", "content": [], "usage": {}}}
WHOLE: Mapping[str, tuple[FinishReasonTable, Any, tuple[Any, ...]]] = {
    **{
        name: (CHAT, {"id": "a", "choices": [CHOICE]}, ("choices", 0, "finish_reason"))
        for name in ("openai", "ovms", "databricks", "tgi")
    },
    "anthropic": (ANTHROPIC_WORDS, {"id": "m", "content": [TEXT]}, ("stop_reason",)),
    "responses": (
        RESPONSES_WORDS,
        {"id": "r", "status": "incomplete", "output": [ITEM], "incomplete_details": {}},
        ("incomplete_details", "reason"),
    ),
    "cohere": (
        COHERE_WORDS,
        {"id": "c", "message": {"role": "assistant", "content": [TEXT]}},
        ("finish_reason",),
    ),
}
"""A worker's table, an answer, and the place of the word in it."""
STREAMS: Mapping[str, tuple[FinishReasonTable, list[Any], tuple[Any, ...]]] = {
    **{
        name: (CHAT, [make_chunk({"content": "hi"}), make_chunk({})], (1, *WHOLE[name][2]))
        for name in ("openai", "ovms", "databricks", "tgi")
    },
    "anthropic": (
        ANTHROPIC_WORDS,
        [
            MESSAGE_START,
            {"type": "content_block_start", "index": 0, "content_block": TEXT},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {}, "usage": {}},
            {"type": "message_stop"},
        ],
        (3, "delta", "stop_reason"),
    ),
    "responses": (
        RESPONSES_WORDS,
        [{"type": "response.incomplete", "response": WHOLE["responses"][1]}],
        (0, "response", *WHOLE["responses"][2]),
    ),
}
PROMPTS: Mapping[str, tuple[FinishReasonTable, Any, tuple[Any, ...]]] = {
    "tgi": (FinishReasonTable("", CHAT_WORDS), PROMPT_ANSWERS["tgi"], ("details", "finish_reason")),
    "mindie": (MINDIE_WORDS, PROMPT_ANSWERS["mindie"], ("details", "finish_reason")),
    "triton": (TRITON_WORDS, PROMPT_ANSWERS["triton"], ("finish_reason",)),
}
DETAILED_CLIENTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    **PROMPT_CLIENTS,
    "tgi": ("/generate", {"inputs": "hi", "parameters": {"details": True}}),
    "triton": (
        "/v2/models/m/generate",
        {"text_input": "hi", "parameters": {"return_finish_reason": True}},
    ),
}
"""Clients that ask for the reason where it is not always there."""


def put_word(answer: Any, place: tuple[Any, ...], word: str) -> Any:
    changed = copy.deepcopy(answer)
    target = changed
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = word
    return changed


def list_words(table: FinishReasonTable) -> Iterator[tuple[str, str]]:
    """Each word that ends an answer, and a name of what it means."""
    for word, reason in table.words.items():
        if reason is not None:
            yield word, reason if reason in INCOMPLETE_REASONS else "complete"
    for word in table.approximations:
        yield word, word


def assert_meanings_are_kept(answers: Iterator[tuple[str, bytes, bool]]) -> None:
    """Answers that are the same to the client mean the same, but for those that are reported."""
    meanings: dict[bytes, set[str]] = {}
    for meaning, written, is_reported in answers:
        if not is_reported:
            meanings.setdefault(written, set()).add(meaning)

    assert all(len(same) == 1 for same in meanings.values()), meanings


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("worker", WHOLE)
def test_reasons_of_a_whole_answer_are_kept_or_reported(client: str, worker: str) -> None:
    table, answer, place = WHOLE[worker]

    def answer_each() -> Iterator[tuple[str, bytes, bool]]:
        for word, meaning in list_words(table):
            data = msgspec.json.encode(put_word(answer, place, word))
            written, lost = translate_response(client, WORKERS[worker], data, stream=False)
            yield meaning, written, "finish_reason" in str(lost)

    assert_meanings_are_kept(answer_each())


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("worker", STREAMS)
def test_reasons_of_a_stream_are_kept_or_reported(client: str, worker: str) -> None:
    table, events, place = STREAMS[worker]

    def answer_each() -> Iterator[tuple[str, bytes, bool]]:
        for word, meaning in list_words(table):
            data = join_events(worker, put_word(events, place, word))
            written, lost = translate_response(client, WORKERS[worker], data, stream=True)
            yield meaning, written, "finish_reason" in str(lost)

    assert_meanings_are_kept(answer_each())


@pytest.mark.parametrize(
    ("worker", "client"),
    [
        (worker, client)
        for worker in PROMPTS
        for client in DETAILED_CLIENTS
        if (worker, client) != ("mindie", "tgi")  # it asks MindIE for a completion
    ],
)
def test_reasons_of_an_answer_to_a_prompt_are_kept_or_reported(client: str, worker: str) -> None:
    table, answer, place = PROMPTS[worker]

    def answer_each() -> Iterator[tuple[str, bytes, bool]]:
        for word, meaning in list_words(table):
            data = msgspec.json.encode(put_word(answer, place, word))
            written, lost = translate_response(
                client, PROMPT_WORKERS[worker], data, stream=False, clients=DETAILED_CLIENTS
            )
            yield meaning, written, "finish_reason" in str(lost)

    assert_meanings_are_kept(answer_each())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("worker", "word"),
    [
        (worker, word)
        for worker, (table, _, _) in WHOLE.items()
        if table is not CHAT  # its words of other services are mapped to those of the protocol
        for word in (*dict(list_words(table)), "later")
    ],
)
def test_reason_reaches_clients_of_the_worker_s_protocol_unchanged(
    worker: str, word: str, *, stream: bool
) -> None:
    if stream and worker not in STREAMS:
        return
    _, answer, place = STREAMS[worker] if stream else WHOLE[worker]
    changed = put_word(answer, place, word)
    data = join_events(worker, changed) if stream else msgspec.json.encode(changed)

    written, _ = translate_response(worker, WORKERS[worker], data, stream=stream)

    assert f'"{place[-1]}":"{word}"'.encode() in written
