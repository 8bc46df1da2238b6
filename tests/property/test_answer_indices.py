"""An answer has the choices, vectors, scores or classes that the worker was asked for.

For each client with several choices or prompts and each worker, answers have each list of up to
three indices: what is missing, or doubled in a whole answer, is an error, and what nobody asked for
is reported. If one choice was asked for, workers may count from 1.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

import msgspec
import pytest

from gateway.emulation.fan_out import FAN_OUT_FIELDS, FanOut
from gateway.runtime.build import build_adapter
from protocols.chat.embeddings import EmbeddingCounter
from protocols.chat.worker_errors import raise_worker_error
from protocols.core.aggregate import aggregate
from protocols.core.errors import WorkerError
from protocols.core.events import Event, ResponseExtra
from protocols.core.interfaces import get_request_kinds
from protocols.core.request import (
    ClassifyRequest,
    EmbeddingRequest,
    GenerationRequest,
    RerankRequest,
)
from tests.property.test_unknown_response_keys import WORKERS, build_call

TURNS: Final = {"messages": [{"role": "user", "content": "hi"}], "temperature": 1}
CLIENTS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "openai one": ("openai", "/v1/chat/completions", TURNS),
    "openai n": ("openai", "/v1/chat/completions", {**TURNS, "n": 2}),
    "openai prompts": ("openai", "/v1/completions", {"prompt": ["a", "b"]}),
    "openai tokens": ("openai", "/v1/completions", {"prompt": [7, 8, 9]}),
    "openai lists of tokens": ("openai", "/v1/completions", {"prompt": [[7], [8, 9]], "n": 1}),
    "openai best": ("openai", "/v1/completions", {"prompt": "a", "n": 2, "best_of": 3}),
    "openai product": ("openai", "/v1/completions", {"prompt": ["a"], "n": 2, "echo": True}),
    "databricks n": ("databricks", "/serving-endpoints/m/invocations", {**TURNS, "n": 2}),
    "databricks prompt": ("databricks", "/serving-endpoints/m/invocations", {"prompt": "a"}),
    "ovms n": ("ovms", "/v3/chat/completions", {**TURNS, "n": 2, "best_of": 2}),
    "mindie n": ("mindie", "/v1/chat/completions", {**TURNS, "n": 2}),
    "tgi": ("tgi", "/v1/chat/completions", TURNS),
    "anthropic": ("anthropic", "/v1/messages", {**TURNS, "max_tokens": 9}),
    "ollama": ("ollama", "/api/chat", {"messages": TURNS["messages"]}),
}
"""Requests of clients: their protocol, path and fields."""
INDICES: Final = [
    one for size in (1, 2, 3) for one in product((0, 1, 2, 5), repeat=size)
]  # also those of no answer


def list_cases() -> Iterator[Any]:
    """Each client with each worker whose answers have choices, whole and streamed."""
    for client, (_, _, fields) in CLIENTS.items():
        for worker in ("openai", "ovms", "databricks", "tgi", "mindie"):
            if worker in ("tgi", "mindie") and "prompt" in fields:
                continue  # their answers to prompts have no indices
            yield pytest.param(client, worker, False, id=f"{client}-{worker}-whole")
            if "best_of" not in fields:
                yield pytest.param(client, worker, True, id=f"{client}-{worker}-streamed")


def read_request(client: str, worker: Any, *, stream: bool) -> GenerationRequest:
    """The request that the worker gets, which may be one of several."""
    protocol, path, fields = CLIENTS[client]
    adapter: Any = build_adapter(protocol, None, {})
    call = build_call(adapter, path, {"model": "m", **fields, "stream": stream})
    request = adapter.decode_request(call).bind_target("w", protocol)
    lost = {one.path for one in worker.unsupported_parameters(request, {})}
    part = next(iter(FanOut(request, lost & FAN_OUT_FIELDS))).request
    assert isinstance(part, GenerationRequest)
    return part


def write_answer(indices: Sequence[int], *, is_chat: bool, stream: bool) -> bytes:
    content = {"delta" if stream else "message": {"content": "hi"}} if is_chat else {"text": "hi"}
    choices = [{"index": i, **content, "finish_reason": "stop"} for i in indices]
    if not stream:
        return msgspec.json.encode({"id": "a", "model": "w", "choices": choices})
    events = [{"id": "a", "model": "w", "choices": [one]} for one in choices]
    data = b"".join(b"data: %b\n\n" % msgspec.json.encode(one) for one in events)
    return data + b"data: [DONE]\n\n"


def decode(decoder: Any, data: bytes) -> list[Event]:
    return [*decoder.feed(data), *decoder.close()]


def find_expected(indices: Sequence[int], count: int, *, stream: bool) -> list[int]:
    """The worker's indices of the requested choices.

    One choice may have any index if it is the only one of an answer, or the first of a stream.
    """
    if count == 1 and (stream or len(indices) == 1):
        return [indices[0]]
    return [*range(count)]


@pytest.mark.parametrize(("client", "worker", "stream"), list(list_cases()))
def test_an_answer_has_each_requested_choice_once(
    client: str, worker: str, *, stream: bool
) -> None:
    adapter = WORKERS[worker]
    request = read_request(client, adapter, stream=stream)
    count = request.choice_count
    is_chat = bool(request.messages)
    for indices in INDICES:
        data = write_answer(indices, is_chat=is_chat, stream=stream)
        expected = find_expected(indices, count, stream=stream)
        requested = [index for index in indices if index in expected]
        if stream:  # a chunk with a finish reason need not be the last one of its choice
            requested = [*dict.fromkeys(requested)]
        surplus = {index for index in indices if index not in expected}
        if sorted(requested) != expected or (surplus and len(request.prompts) > 1):
            with pytest.raises(WorkerError):
                decode(adapter.create_decoder(request), data)
            continue

        events = decode(adapter.create_decoder(request), data)

        assert [one.index for one in aggregate(events).choices] == [*range(count)]
        lost = [path for one in events if isinstance(one, ResponseExtra) for path, _ in one.values]
        renumbered = {("choices[0]", "index")} if expected[0] else set()
        assert {*lost} == {(f"choices[{index}]",) for index in surplus} | renumbered


ITEMS: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    "vectors": (EmbeddingRequest(model="m", inputs=("a", "b")), {"embedding": [0.5]}),
    "scores": (RerankRequest(model="m", queries=("q",), documents=("a", "b")), {"score": 0.5}),
    "classes": (ClassifyRequest(model="m", inputs=("a", "b")), {"label": "A", "probs": [1.0]}),
}
"""A request with two inputs, and an item of its answer without an index."""


def list_item_decoders() -> Iterator[Any]:
    """Each decoder of answers with an item for each input, those of pass-through included."""
    for name, (request, item) in ITEMS.items():
        for worker in ("openai", "ovms", "databricks", "mindie"):
            if request.kind in get_request_kinds(WORKERS[worker]):
                create = partial(WORKERS[worker].create_decoder, request)
                yield pytest.param(create, item, id=f"{worker}-{name}")
    skim = partial(EmbeddingCounter, ITEMS["vectors"][0], raise_worker_error)
    yield pytest.param(skim, ITEMS["vectors"][1], id="passed-through-vectors")


@pytest.mark.parametrize(("create_decoder", "item"), list(list_item_decoders()))
def test_an_answer_has_an_item_for_each_input(
    create_decoder: Callable[[], Any], item: dict[str, Any]
) -> None:
    """Vectors that all have one index have none: each is that of the input at its position."""
    for indices in INDICES:
        data = msgspec.json.encode({"data": [{"index": i, **item} for i in indices]})
        is_unnumbered = "embedding" in item and len(indices) == 2 and len({*indices}) == 1
        if sorted(indices) == [0, 1] or is_unnumbered:
            assert decode(create_decoder(), data)
        else:
            with pytest.raises(WorkerError):
                decode(create_decoder(), data)
