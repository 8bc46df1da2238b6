"""An unknown key at any level of a worker's response is kept or reported.

Each object in a response of each worker protocol gets an unknown key in turn, in unary responses
and in streams, for a client of each protocol.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec
import pytest

from gateway.config.registry import ProtocolRegistry
from gateway.runtime.build import build_adapter
from protocols import PROTOCOLS
from protocols.core.aggregate import aggregate
from protocols.core.events import INCOMPLETE_REASONS, ChoiceEnd, Event
from protocols.core.extra import remove_extra_fields
from protocols.core.interfaces import (
    ClientRequest,
    ResponseContext,
    build_kept_keys_reader,
    get_request_kinds,
)
from protocols.core.response_losses import LossyEvent, find_losses, get_single_losses
from tests.property.test_odd_values import DETAILED, GENERATED, TENSORS, TOKENS
from tests.property.test_unknown_keys import HEADERS, KEY, VALUE, add_key, clock, list_places
from tests.protocols import find_rows
from tests.support.path_routers import get_path_router
from tests.support.request_bodies import BODIES

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT_USAGE = {
    "prompt_tokens": 1,
    "completion_tokens": 2,
    "total_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 1},
}
TOKEN = {"token": "hi", "logprob": -0.5, "bytes": [104, 105]}
LOGPROBS = {"content": [{**TOKEN, "top_logprobs": [TOKEN]}], "refusal": None}
CHAT_ANSWER: dict[str, Any] = {
    "id": "a",
    "object": "chat.completion",
    "created": 7,
    "model": "w",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "tool_calls": [CALL]},
            "logprobs": LOGPROBS,
            "finish_reason": "tool_calls",
        }
    ],
    "usage": CHAT_USAGE,
}


def make_chunk(
    delta: dict[str, Any], reason: str | None = None, **more: dict[str, Any]
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason, **more}
    return {"id": "a", "object": "chat.completion.chunk", "model": "w", "choices": [choice]}


CHAT_STREAM: list[dict[str, Any]] = [
    make_chunk({"role": "assistant", "content": ""}),
    make_chunk({"content": "h"}),
    make_chunk({"content": "i"}, logprobs=LOGPROBS),
    make_chunk({"tool_calls": [{"index": 0, **CALL}]}),
    make_chunk({"tool_calls": [{"index": 0, "function": {"arguments": " "}}]}),
    make_chunk({}, "tool_calls"),
    {"id": "a", "model": "w", "choices": [], "usage": CHAT_USAGE},
]
MESSAGE_USAGE = {"input_tokens": 1, "output_tokens": 2}
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "w",
    "content": [
        {"type": "thinking", "thinking": "so", "signature": "s"},
        {"type": "text", "text": "hi"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": MESSAGE_USAGE,
}
MESSAGE_STREAM: list[dict[str, Any]] = [
    {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": MESSAGE_USAGE},
    {"type": "message_stop"},
]
EVENT_LEVEL = frozenset(
    {"message_start", "content_block_start", "content_block_delta", "content_block_stop",
     "message_stop"}
)  # fmt: skip
"""Events that only wrap an object: their own keys are framing. So it is with all of the Responses
API, whose items count as their last event says, not as their first one or the last response."""
ITEMS: dict[str, Any] = {
    "id": "resp_1",
    "model": "w",
    "status": "completed",
    "output": [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "E"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "hi", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
    ],
}
ITEM_STREAM: list[dict[str, Any]] = [
    {"type": "response.created", "response": {**ITEMS, "status": "in_progress", "output": []}},
    *(
        {"type": f"response.output_item.{state}", "output_index": i, "item": item}
        for i, item in enumerate(ITEMS["output"])
        for state in ("added", "done")
    ),
    {"type": "response.completed", "response": ITEMS},
]
CLIENTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "anthropic": (
        "/v1/messages",
        {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    ),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
    "databricks": (
        "/serving-endpoints/m/invocations",
        {"messages": [{"role": "user", "content": "hi"}]},
    ),
    "ovms": ("/v3/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "tgi": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "mindie": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    **find_rows("CONVERSATION"),
}
PROMPT_CLIENTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/completions", {"prompt": "hi"}),
    "ollama": ("/api/generate", {"prompt": "hi", "raw": True}),
    "ovms": ("/v3/completions", {"prompt": "hi"}),
    "tgi": ("/generate", {"inputs": "hi"}),
    "mindie": ("/v2/models/m/generate", {"text_input": "hi", "parameters": {"details": True}}),
    "triton": ("/v2/models/m/generate", {"text_input": "hi"}),
}
SCORE_CLIENTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/rerank", {"query": "hi", "documents": ["a"]}),
    "score": ("/v1/score", {"text_1": "hi", "text_2": "a"}),
    "ranking": ("/v1/ranking", {"query": {"text": "hi"}, "passages": [{"text": "a"}]}),
    "cohere": ("/v2/rerank", {"query": "hi", "documents": ["a"]}),
    "ovms": ("/v3/rerank", {"query": "hi", "documents": ["a"]}),
}
ADAPTERS = dict.fromkeys(("responses", "score", "ranking"), "openai")
"""The protocols of clients that are not named after theirs."""
STREAM_PATHS = {
    "/generate": "/generate_stream",
    "/v2/models/m/generate": "/v2/models/m/generate_stream",
}
"""Paths of streams that are not those of unary responses."""
WORKERS: Mapping[str, Any] = {
    "openai": build_adapter("openai", "vllm", {}),
    "ovms": build_adapter("ovms", None, {}),
    "databricks": build_adapter("databricks", None, {}),
    "tgi": build_adapter("tgi", None, {}),
    "mindie": build_adapter("mindie", None, {}),
    "anthropic": build_adapter("anthropic", None, {}),
    "responses": build_adapter("openai", "openai", {"worker_api": "responses"}),
    **{name: build_adapter(name, None, {}) for name in find_rows("ANSWER")},
}
WHOLE: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("openai", "ovms", "databricks", "tgi", "mindie"), CHAT_ANSWER),
    "anthropic": MESSAGE,
    "responses": ITEMS,
    **find_rows("ANSWER"),
}
OVMS_STREAM = [
    make_chunk({"content": "i"}) if chunk == CHAT_STREAM[2] else chunk for chunk in CHAT_STREAM
]
"""The same from a server whose streams have no log probabilities."""
STREAMS: Mapping[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("openai", "databricks", "tgi", "mindie"), CHAT_STREAM),
    "ovms": OVMS_STREAM,
    "anthropic": MESSAGE_STREAM,
    "responses": ITEM_STREAM,
    **find_rows("EVENTS"),
}
PROMPT_WORKERS: Mapping[str, Any] = {
    "tgi": WORKERS["tgi"],
    "mindie": WORKERS["mindie"],
    "triton": build_adapter("triton", None, {}),
}
PROMPT_ANSWERS: Mapping[str, dict[str, Any]] = {
    "tgi": GENERATED,
    "mindie": DETAILED,
    "triton": TENSORS,
}
PROMPT_STREAMS: Mapping[str, list[dict[str, Any]]] = {
    "tgi": TOKENS,
    "mindie": [{"text_output": "h", "details": {"generated_tokens": 1}}, DETAILED],
    "triton": [{"model_name": "w", "text_output": "h"}, {"model_name": "w", "text_output": "i"}],
}
SCORE_ANSWER: dict[str, Any] = {
    "id": "a",
    "results": [{"index": 0, "relevance_score": 0.5, "document": {"text": "a"}}],
    "usage": {"prompt_tokens": 3, "total_tokens": 3},
    "meta": {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 7},
        "tokens": {"input_tokens": 3},
    },
}
SCORE_ANSWERS: Mapping[str, dict[str, Any]] = dict.fromkeys(
    ("openai", "cohere", "ovms"), SCORE_ANSWER
)
TEXT_USAGE = {"prompt_tokens": 3, "total_tokens": 3}
VECTORS: dict[str, Any] = {
    "object": "list",
    "model": "w",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}],
    "usage": TEXT_USAGE,
}
ANSWERS_BY_KIND: Mapping[str, dict[str, Any]] = {
    "embedding": VECTORS,
    "rerank": SCORE_ANSWER,
    "classify": {
        "id": "a",
        "model": "w",
        "data": [{"index": 0, "label": "A", "probs": [0.5, 0.5], "num_classes": 2}],
        "usage": TEXT_USAGE,
    },
    "tokenize": {"count": 1, "max_model_len": 9, "tokens": [1], "token_strs": ["hi"]},
    "detokenize": {"prompt": "hi"},
}
"""An answer to each kind of request that is no generation."""
OTHER_FORMS = frozenset({"ranking", "response tokens"})
"""Operations whose answers have another form than that of the worker."""
ONE_DOCUMENT = {"documents": ["a"], "passages": [{"text": "a"}]}
REGISTRY = ProtocolRegistry(PROTOCOLS)


def list_whole_cases(answers: Mapping[str, dict[str, Any]] = WHOLE) -> Iterator[Any]:
    for name, body in answers.items():
        for place in list_places(body):
            yield pytest.param(name, place, id=f"{name}-{'.'.join(map(str, place))}")


def list_stream_cases(streams: Mapping[str, list[dict[str, Any]]] = STREAMS) -> Iterator[Any]:
    for name, events in streams.items():
        for place in list_places(events):
            event = events[place[0]]
            is_level = event.get("type") in EVENT_LEVEL or name == "responses"
            if (len(place) > 1 or not is_level) and not is_repeated(event, place):
                yield pytest.param(name, place, id=f"{name}-{'.'.join(map(str, place))}")


def is_repeated(event: dict[str, Any], place: tuple[Any, ...]) -> bool:
    """Whether a later event of a stream of items repeats what is there, and is the one that counts.

    The form of an item in its last event counts.
    """
    kind = str(event.get("type"))
    return kind.endswith("item.added") or (kind.startswith("response.") and "output" in place)


def list_endpoint_cases() -> Iterator[Any]:
    """Each operation of each protocol, its workers, and each place for a key in their answers."""
    for name in PROTOCOLS:
        if name == "triton" or not REGISTRY.serves_clients(name):
            continue  # all endpoints of Triton are generations
        client: Any = REGISTRY.create_adapter(name, None, {})
        for operation, endpoint in {one.operation: one for one in client.endpoints}.items():
            if endpoint.task in ("generate", "tokenize") and operation not in ("nothing", "stop"):
                body = BODIES[name][operation]
                fields = body | {key: one for key, one in ONE_DOCUMENT.items() if key in body}
                call = build_call(client, endpoint.path, {"model": "m", **fields})
                kind = client.decode_request(call).kind
                for worker in ("openai", "ovms", "databricks"):
                    if kind in ANSWERS_BY_KIND and kind in get_request_kinds(WORKERS[worker]):
                        for place in list_places(ANSWERS_BY_KIND[kind]):
                            case = f"{name}-{operation}-{worker}-{'.'.join(map(str, place))}"
                            yield pytest.param(client, call, worker, place, id=case)


def build_call(client: Any, path: str, fields: dict[str, Any]) -> ClientRequest:
    path = re.sub(r"{\w+}", "m", path)
    endpoint = get_path_router(client).find_endpoint("POST", path)
    body = msgspec.json.encode(fields)
    return ClientRequest(endpoint.endpoint, endpoint.params, HEADERS, "", body, path, "r")


def translate_response(
    client_name: str,
    worker: Any,
    data: bytes,
    *,
    stream: bool,
    clients: Mapping[str, tuple[str, dict[str, Any]]] = CLIENTS,
) -> tuple[bytes, list[str]]:
    """Return the client's response, and what must be reported. Raises the worker's error."""
    client = build_adapter(ADAPTERS.get(client_name, client_name), None, {})
    path, fields = clients[client_name]
    path = STREAM_PATHS.get(path, path) if stream else path
    takes_options = stream and client_name in ("openai", "tgi", "ovms") and clients is CLIENTS
    options = {"stream_options": {"include_usage": True}} if takes_options else {}
    call = build_call(client, path, {"model": "m", "stream": stream, **fields, **options})
    return answer_call(client, call, worker, data, stream=stream)


def answer_call(
    client: Any, call: ClientRequest, worker: Any, data: bytes, *, stream: bool
) -> tuple[bytes, list[str]]:
    """The same for a request of this client."""
    decoded = client.decode_request(call)
    decoded = decoded.bind_target("w", decoded.source or client.name)
    request, _ = remove_extra_fields(decoded, build_kept_keys_reader(worker)(decoded))
    decoder = worker.create_decoder(request)
    events: list[Event] = [*decoder.feed(data), *decoder.close()]
    encoder = client.create_encoder(call, request, ResponseContext("r", 1, "m", "1", "w", clock))
    lost = [
        loss.field
        for one in events
        if isinstance(one, get_args(LossyEvent))
        and not (isinstance(one, ChoiceEnd) and is_complete(one))
        for loss in find_losses(one, encoder)
    ]
    if stream:
        written = encoder.encode_events(events)
    else:
        written = encoder.encode_unary(aggregate(events)).body
    return written, lost + [loss.field for loss in get_single_losses(encoder)]


def is_complete(end: ChoiceEnd) -> bool:
    return end.lost_word is None and end.finish_reason not in INCOMPLETE_REASONS


def is_kept_or_reported(written: bytes, lost: list[str]) -> bool:
    """Whether the key is either in the client's response or among the reported paths."""
    return (VALUE.encode() in written) != any(KEY in path for path in lost)


def join_events(name: str, events: list[dict[str, Any]]) -> bytes:
    """The bytes of a worker's stream."""
    data = b"".join(b"data: " + msgspec.json.encode(one) + b"\n\n" for one in events)
    is_chat = STREAMS.get(name) in (CHAT_STREAM, OVMS_STREAM)
    return data + b"data: [DONE]\n\n" if is_chat else data


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("worker", "place"), list(list_whole_cases()))
def test_an_unknown_key_of_a_whole_response_is_kept_or_reported(
    worker: str, place: tuple[Any, ...], client: str
) -> None:
    data = msgspec.json.encode(add_key(WHOLE[worker], place))
    written, lost = translate_response(client, WORKERS[worker], data, stream=False)

    assert is_kept_or_reported(written, lost)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("worker", "place"), list(list_stream_cases()))
def test_an_unknown_key_of_a_stream_is_kept_or_reported(
    worker: str, place: tuple[Any, ...], client: str
) -> None:
    events = list(STREAMS[worker])
    events[place[0]] = add_key(events[place[0]], place[1:])

    written, lost = translate_response(
        client, WORKERS[worker], join_events(worker, events), stream=True
    )

    assert is_kept_or_reported(written, lost)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("position", range(len(ITEM_STREAM)))
@pytest.mark.parametrize("place", [{}, {"output_index": 1}, {"item_id": "fc_1"}], ids=str)
def test_an_unknown_event_of_a_stream_of_items_is_kept_or_reported(
    position: int, place: dict[str, Any], client: str
) -> None:
    added = {"type": f"response.{KEY}", **place, "odd": VALUE}
    events = [*ITEM_STREAM[:position], added, *ITEM_STREAM[position:]]

    written, lost = translate_response(
        client, WORKERS["responses"], join_events("responses", events), stream=True
    )

    assert is_kept_or_reported(written, lost)
    assert (VALUE.encode() in written) is (client == "responses")


OWN_KEYS: Mapping[str, Any] = {"stop_reason": "X", "matched_stop": 7, "token_ids": [9, 8]}
"""Keys of a choice that the decoder knows, and no encoder of the same protocol writes."""


@pytest.mark.parametrize("key", OWN_KEYS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompt", [False, True], ids=["chat", "prompt"])
def test_key_of_a_choice_that_a_worker_need_not_send_reaches_its_own_client(
    key: str, *, stream: bool, prompt: bool
) -> None:
    """Workers such as vLLM and SGLang send these keys without being asked."""
    text = {"text": "hi"} if prompt else {"delta" if stream else "message": {"content": "hi"}}
    choice = {"index": 0, **text, "finish_reason": "stop", key: OWN_KEYS[key]}
    answer = {"id": "a", "model": "w", "choices": [choice]}
    data = join_events("openai", [answer]) if stream else msgspec.json.encode(answer)

    written, lost = translate_response(
        "openai",
        WORKERS["openai"],
        data,
        stream=stream,
        clients=PROMPT_CLIENTS if prompt else CLIENTS,
    )

    assert msgspec.json.encode({key: OWN_KEYS[key]})[1:-1] in written
    assert lost == []


CACHED_TOKENS: Mapping[str, dict[str, int]] = {
    "DeepSeek": {"prompt_cache_hit_tokens": 3, "prompt_cache_miss_tokens": 2},
    "DeepSeek, nothing": {"prompt_cache_hit_tokens": 0, "prompt_cache_miss_tokens": 5},
    "Moonshot": {"cached_tokens": 3},
    "Databricks": {"cache_read_input_tokens": 3},
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CACHED_TOKENS)
def test_cached_tokens_reach_every_client_whatever_the_worker_calls_them(
    name: str, client: str, *, stream: bool
) -> None:
    # given a worker with its own name for cached tokens, and one with that of OpenAI
    counts = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    cached = next(iter(CACHED_TOKENS[name].values()))
    own = counts | CACHED_TOKENS[name]
    standard = counts | ({"prompt_tokens_details": {"cached_tokens": cached}} if cached else {})

    # when each answers the same
    def answer(usage: dict[str, Any]) -> tuple[bytes, list[str]]:
        data = (
            join_events("openai", [*CHAT_STREAM[:-1], CHAT_STREAM[-1] | {"usage": usage}])
            if stream
            else msgspec.json.encode(CHAT_ANSWER | {"usage": usage})
        )
        return translate_response(client, WORKERS["openai"], data, stream=stream)

    # then the client gets the same, or its report, and one of OpenAI the worker's own keys as well
    written, lost = answer(own)
    if client == "openai":
        assert all(f'"{key}":{one}'.encode() in written for key, one in own.items())
        assert not cached or b'"cached_tokens":%d' % cached in written
    else:
        ids = re.compile(rb'"(?:item_)?id":"[^"]*"')
        assert ids.sub(b"", written) == ids.sub(b"", answer(standard)[0])
    is_lost = client == "ollama" and cached > 0
    path = "response.usage.prompt_tokens_details.cached_tokens"
    assert [path for path in lost if "usage" in path] == ([path] if is_lost else [])


@pytest.mark.parametrize("client", PROMPT_CLIENTS)
@pytest.mark.parametrize(("worker", "place"), list(list_whole_cases(PROMPT_ANSWERS)))
def test_an_unknown_key_of_an_answer_to_a_prompt_is_kept_or_reported(
    worker: str, place: tuple[Any, ...], client: str
) -> None:
    data = msgspec.json.encode(add_key(PROMPT_ANSWERS[worker], place))

    written, lost = translate_response(
        client, PROMPT_WORKERS[worker], data, stream=False, clients=PROMPT_CLIENTS
    )

    assert is_kept_or_reported(written, lost)


@pytest.mark.parametrize("client", PROMPT_CLIENTS)
@pytest.mark.parametrize(("worker", "place"), list(list_stream_cases(PROMPT_STREAMS)))
def test_an_unknown_key_of_a_stream_of_a_prompt_is_kept_or_reported(
    worker: str, place: tuple[Any, ...], client: str
) -> None:
    events = list(PROMPT_STREAMS[worker])
    events[place[0]] = add_key(events[place[0]], place[1:])

    written, lost = translate_response(
        client, PROMPT_WORKERS[worker], join_events("", events), stream=True, clients=PROMPT_CLIENTS
    )

    assert is_kept_or_reported(written, lost)


@pytest.mark.parametrize("client", SCORE_CLIENTS)
@pytest.mark.parametrize(("worker", "place"), list(list_whole_cases(SCORE_ANSWERS)))
def test_an_unknown_key_of_scores_is_kept_or_reported(
    worker: str, place: tuple[Any, ...], client: str
) -> None:
    data = msgspec.json.encode(add_key(SCORE_ANSWERS[worker], place))

    written, lost = translate_response(
        client, WORKERS[worker], data, stream=False, clients=SCORE_CLIENTS
    )

    assert is_kept_or_reported(written, lost)


@pytest.mark.parametrize(
    ("client", "worker"), [("openai", "openai"), ("cohere", "cohere"), ("openai", "cohere")]
)
def test_cohere_s_metadata_of_scores_is_the_worker_s_own(client: str, worker: str) -> None:
    data = msgspec.json.encode(SCORE_ANSWER)

    written, lost = translate_response(
        client, WORKERS[worker], data, stream=False, clients=SCORE_CLIENTS
    )

    assert msgspec.json.decode(written)["meta"] == SCORE_ANSWER["meta"]
    assert lost == []


@pytest.mark.parametrize(("client", "call", "worker", "place"), list(list_endpoint_cases()))
def test_an_unknown_key_of_an_answer_of_an_endpoint_is_kept_or_reported(
    client: Any, call: ClientRequest, worker: str, place: tuple[Any, ...]
) -> None:
    kind = client.decode_request(call).kind
    data = msgspec.json.encode(add_key(ANSWERS_BY_KIND[kind], place))

    written, lost = answer_call(client, call, WORKERS[worker], data, stream=False)

    assert is_kept_or_reported(written, lost)
    assert lost == [] or client.name != worker or call.endpoint.operation in OTHER_FORMS


def test_answers_of_all_kinds_are_played() -> None:
    generations = {"chat", "completion"}
    kinds = {kind for worker in WORKERS.values() for kind in get_request_kinds(worker)}

    assert kinds - generations == set(ANSWERS_BY_KIND)
