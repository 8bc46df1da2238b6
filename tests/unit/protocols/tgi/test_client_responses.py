"""Responses for clients: JSON, and streams of tokens."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protocols.chat.responses import ChatEncoder, CompletionEncoder
from protocols.core.aggregate import aggregate
from protocols.core.catalog import ModelInfo
from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    ReasoningDelta,
    RefusalDelta,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from protocols.core.interfaces import ResponseContext
from protocols.tgi import TGI
from tests.unit.protocols.tgi.conftest import MakeCall

END = (ChoiceEnd("eos"), Usage(2, 2), StreamEnd())
A = TokenLogprob("a", -0.5, (TopLogprob("x", float("-inf"), 8),), id=7)
B = TokenLogprob("b", None)


@pytest.fixture
def create(make: MakeCall, response_context: ResponseContext) -> Any:
    """Create the encoder for a request with these parameters."""

    def encoder(path: str = "/generate", **parameters: Any) -> Any:
        adapter = TGI(model="m")
        call = make(path, {"inputs": "in", "parameters": parameters})
        return adapter.create_encoder(call, adapter.decode_request(call), response_context)

    return encoder


def stream(encoder: Any, events: Sequence[Event]) -> list[Any]:
    """Encode a stream, with each event in a batch of its own."""
    wire = b"".join(encoder.encode_events([event]) for event in events)
    assert wire.isascii()
    blocks = wire.split(b"\n\n")
    assert blocks.pop() == b""
    assert all(block.startswith(b"data:{") for block in blocks)
    return [msgspec.json.decode(block[5:]) for block in blocks]


def unary(encoder: Any, *events: Event) -> Any:
    return msgspec.json.decode(encoder.encode_unary(aggregate(events)).body)


def token(text: str, **values: Any) -> dict[str, Any]:
    return {"id": 0, "text": text, "logprob": None, "special": False, **values}


def test_stream_holds_the_last_token_until_the_end(create: Any) -> None:
    encoder = create("/generate_stream")

    first, last = stream(encoder, (TextDelta("a\u2028"), TextDelta(""), TextDelta("é"), *END))

    assert encoder.content_type == "text/event-stream"
    assert first == {
        "index": 1, "token": token("a\u2028"), "generated_text": None, "details": None,
    }  # fmt: skip
    assert last == {
        "index": 2, "token": token("é"), "generated_text": "a\u2028é", "details": None,
    }  # fmt: skip


def test_details_of_a_stream_stand_at_its_end(create: Any) -> None:
    encoder = create("/generate_stream", details=True, return_full_text=True, seed=4)

    *_, last = stream(encoder, (TextDelta("a", logprobs=(A,)), *END))

    assert last["generated_text"] == "ina"
    assert last["token"] == token("a", id=7, logprob=-0.5)
    assert last["details"] == {
        "finish_reason": "eos_token", "generated_tokens": 2, "seed": 4, "input_length": 2,
    }  # fmt: skip


def test_delta_of_several_tokens_becomes_several_events(create: Any) -> None:
    encoder = create("/generate_stream", top_n_tokens=1)

    first, last = stream(encoder, (TextDelta("ab", tokens=2, logprobs=(A, B)), *END))

    assert first["token"] == token("a", id=7, logprob=-0.5)
    assert first["top_tokens"] == [token("x", id=8, logprob=-9999.0)]
    assert last["token"] == token("b")
    assert last["top_tokens"] == []


def test_delta_whose_tokens_do_not_spell_its_text_is_one_event(create: Any) -> None:
    delta = TextDelta("é", tokens=2, logprobs=(A, B), token_ids=(4, 5))

    [only] = stream(create("/generate_stream", top_n_tokens=1), (delta, *END))

    assert only["token"] == token("é")
    assert "top_tokens" not in only


def test_token_id_of_a_delta_is_sent(create: Any) -> None:
    [only] = stream(create("/generate_stream"), (TextDelta("a", token_ids=(9,)), *END))

    assert only["token"] == token("a", id=9)


def test_reasoning_and_refusals_are_tokens(create: Any) -> None:
    events = (
        ReasoningDelta("hm"), ReasoningDelta(""), RefusalDelta("no"), ResponseMetadata(), *END,
    )  # fmt: skip

    first, last = stream(create("/generate_stream"), events)

    assert (first["token"]["text"], last["token"]["text"]) == ("hm", "no")
    assert last["generated_text"] == "hmno"


def test_empty_stream_has_one_event(create: Any) -> None:
    [only] = stream(create("/generate_stream", details=True), (StreamEnd(),))

    assert only["token"] == token("", special=True)
    assert only["generated_text"] == ""
    assert only["details"]["generated_tokens"] == 0
    assert only["details"]["input_length"] == 0


@pytest.mark.parametrize(
    ("error", "body"),
    [
        (WorkerFailed("oops"),
         {"error": "Request failed during generation: oops", "error_type": "generation"}),
        (StreamBroken("x"),
         {"error": "Incomplete generation stream", "error_type": "incomplete_generation"}),
    ],
)  # fmt: skip
def test_error_follows_the_token_that_was_held(create: Any, error: Any, body: Any) -> None:
    encoder = create("/generate_stream")
    assert encoder.encode_events([TextDelta("a")]) == b""

    first, last, end = encoder.encode_error_event(error).split(b"\n\n")

    assert b'"text":"a"' in first
    assert msgspec.json.decode(last.removeprefix(b"data:")) == body
    assert end == b""


REASONS = [
    ("eos", {}, "eos_token"),
    ("length", {}, "length"),
    ("stop", {}, "stop_sequence"),
    ("eos", {"max_new_tokens": 2}, "length"),
    ("eos", {"max_new_tokens": 3}, "eos_token"),
    ("eos", {"stop": ["b"]}, "stop_sequence"),
    ("eos", {"stop": ["c"]}, "eos_token"),
]


@pytest.mark.parametrize(("reason", "parameters", "expected"), REASONS, ids=str)
def test_finish_reason_is_one_of_the_server(
    create: Any, reason: Any, parameters: dict[str, Any], expected: str
) -> None:
    events = (TextDelta("ab", tokens=2), ChoiceEnd(reason), Usage(1, 2), StreamEnd())

    body = unary(create(details=True, **parameters), *events)

    assert body["details"]["finish_reason"] == expected


def test_unknown_finish_reason_is_shown_as_the_worker_wrote_it(create: Any) -> None:
    """This holds even if max_tokens or a stop string suggests another reason."""
    end = ChoiceEnd("unknown", own_word="later")
    encoder = create(details=True, max_new_tokens=2, stop=["b"])

    body = unary(encoder, TextDelta("ab", tokens=2), end, Usage(1, 2), StreamEnd())

    assert body["details"]["finish_reason"] == "later"


def test_estimated_tokens_do_not_reach_the_limit(create: Any) -> None:
    usage = Usage(1, 2, source="estimated")
    encoder = create(details=True, max_new_tokens=2)

    body = unary(encoder, TextDelta("ab"), ChoiceEnd("eos"), usage, StreamEnd())

    assert body["details"]["finish_reason"] == "eos_token"


def test_unary_response_is_an_object(create: Any) -> None:
    encoder = create()

    assert unary(encoder, ReasoningDelta("hm"), TextDelta("a"), *END) == {"generated_text": "hma"}

    headers = dict(encoder.headers())
    assert (headers["x-generated-tokens"], headers["x-prompt-tokens"]) == ("2", "2")
    assert headers["x-compute-characters"] == "2"


def test_unary_response_of_the_root_is_listed(create: Any) -> None:
    assert unary(create("/"), TextDelta("a"), *END) == [{"generated_text": "a"}]


def test_unary_response_without_usage_has_counted_tokens(create: Any) -> None:
    encoder = create(details=True)

    body = unary(encoder, TextDelta("a", tokens=4), ChoiceEnd("eos"), StreamEnd())

    assert body["details"]["generated_tokens"] == 4
    assert "x-prompt-tokens" not in dict(encoder.headers())


def test_unary_details_have_the_tokens(create: Any) -> None:
    encoder = create(details=True, top_n_tokens=1)

    details = unary(encoder, TextDelta("ab", tokens=2, logprobs=(A, B)), *END)["details"]

    assert details["tokens"] == [token("a", id=7, logprob=-0.5), token("b")]
    assert details["top_tokens"] == [[token("x", id=8, logprob=-9999.0)], []]
    assert details["prefill"] == []


def test_unary_details_without_logprobs_have_the_whole_text(create: Any) -> None:
    assert unary(create(details=True), TextDelta("ab"), *END)["details"]["tokens"] == [token("ab")]
    assert unary(create(details=True), StreamEnd())["details"]["tokens"] == []


def test_best_sequence_is_first(create: Any) -> None:
    encoder = create("/", best_of=2, do_sample=True, details=True)
    events = (
        TextDelta("b", logprobs=(TokenLogprob("b", -2.0),)), ChoiceEnd("eos"),
        TextDelta("a", 1, logprobs=(TokenLogprob("a", -1.0),)), ChoiceEnd("length", 1), StreamEnd(),
    )  # fmt: skip

    [body] = unary(encoder, *events)

    [other] = body["details"]["best_of_sequences"]
    assert (body["generated_text"], body["details"]["finish_reason"]) == ("a", "length")
    assert (other["generated_text"], other["finish_reason"]) == ("b", "eos_token")
    assert other["generated_tokens"] == 1


def test_v1_has_the_encoders_of_openai(make: MakeCall, response_context: ResponseContext) -> None:
    adapter = TGI(model="m")
    chat = make("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    text = make("/v1/completions", {"prompt": "a"})

    assert isinstance(
        adapter.create_encoder(chat, adapter.decode_request(chat), response_context), ChatEncoder
    )
    assert isinstance(
        adapter.create_encoder(text, adapter.decode_request(text), response_context),
        CompletionEncoder,
    )


@pytest.mark.parametrize(
    ("metadata", "fingerprint"),
    [(ResponseMetadata(), "3.3.6-native"), (ResponseMetadata(fingerprint="fp"), "fp")],
)
def test_v1_chat_has_a_fingerprint(
    make: MakeCall, response_context: ResponseContext, metadata: ResponseMetadata, fingerprint: str
) -> None:
    adapter = TGI(model="m")
    call = make("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    encoder = adapter.create_encoder(call, adapter.decode_request(call), response_context)

    body = unary(encoder, metadata, TextDelta("a"), *END)

    assert body["system_fingerprint"] == fingerprint


def test_vectors_are_arrays(make: MakeCall, response_context: ResponseContext) -> None:
    adapter, call = TGI(model="m"), make("/", {"inputs": "a"})
    request = adapter.decode_request(call, ModelInfo("m", (), task="embedding"))

    encoder = adapter.create_encoder(call, request, response_context)

    response = encoder.encode_unary(aggregate([Embedding(0, (1.0, 2.0)), StreamEnd()]))
    assert response.body == b"[[1.0,2.0]]"
    assert encoder.headers() == ()
    assert encoder.encode_events([]) == b""
    assert b"generation" in encoder.encode_error_event(WorkerFailed("x"))
