"""An unknown word in an enumeration is kept, reported or rejected, and never becomes a known one.

The enumerations of requests come from the OpenAPI documents of the client protocols, so that a new
one is checked without being listed here; those of responses are named as in every protocol.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
import pytest

from gateway.runtime.build import build_adapter
from protocols import PROTOCOLS
from protocols.core.errors import ClientError, GatewayError
from protocols.core.interfaces import ClientRequest, OpenApiProvider
from tests.property.test_unknown_keys import HEADERS, REQUESTS, list_workers, prepare
from tests.property.test_unknown_response_keys import (
    CALL,
    CHAT_ANSWER,
    CLIENTS,
    ITEM_STREAM,
    STREAMS,
    WHOLE,
    WORKERS,
    is_repeated,
    join_events,
    make_chunk,
    translate_response,
)
from tests.support.path_routers import get_adapter, get_path_router

WORD = "x_unknown_word"
IMAGE = "data:image/png;base64,aGk="
TEXTS: Mapping[str, Any] = {
    "url": IMAGE,
    "image_url": IMAGE,
    "data": "aGk=",
    "arguments": "{}",
    "model": "m",
    "value": {"type": "object"},
}
"""Valid texts of fields that do not take any."""

Place = tuple[str | int, ...]


class SchemaReader:
    """Makes requests from the schemas of one protocol."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas

    def list_enumerations(
        self, schema: Any, branches: tuple[int, ...] = (), depth: int = 0
    ) -> Iterator[tuple[Place, Any]]:
        """Each place with an enumeration of words, and a small valid value around a word of it."""
        schema = self._resolve(schema)
        if words := [one for one in self._list_words(schema) if isinstance(one, str)]:
            yield (), words[0]
        for branch in self._list_branches(schema):
            yield from self.list_enumerations(branch, branches, depth)
        for key, inner in schema.get("properties", {}).items():
            for place, value in self.list_enumerations(inner, branches, depth + 1):
                yield (key, *place), {**self.make_value(schema), key: value}
        if "items" in schema and depth < 12:
            for place, value in self.list_enumerations(schema["items"], branches, depth + 1):
                yield (0, *place), [value]

    def make_value(self, schema: Any, key: str = "") -> Any:
        """A small valid value."""
        schema = self._resolve(schema)
        if words := self._list_words(schema):
            return words[0]
        if branches := self._list_branches(schema):
            return self.make_value(branches[0], key)
        match schema.get("type"):
            case "object":
                needed, inner = schema.get("required", ()), schema.get("properties", {})
                return {name: self.make_value(inner.get(name, {}), name) for name in needed}
            case "array":
                return [self.make_value(schema["items"])] if schema.get("minItems", 1) else []
            case "integer" | "number":
                return max(schema.get("minimum", 1), 1)
            case "boolean":
                return True
            case _:
                return TEXTS.get(key, "hi")

    def _resolve(self, schema: Any) -> Any:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    @staticmethod
    def _list_words(schema: Any) -> list[Any]:
        return [schema["const"]] if "const" in schema else schema.get("enum", [])

    @staticmethod
    def _list_branches(schema: Any) -> list[Any]:
        return [*schema.get("anyOf", ()), *schema.get("oneOf", ())]


CHAT_TOOL = {"type": "function", "function": {"name": "hi"}}
COMPANIONS: Mapping[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "tool_choice": (
        ("messages", {"tools": [CHAT_TOOL]}),
        ("input", {"tools": [{"type": "function", "name": "hi", "parameters": {}}]}),
        ("max_tokens", {"tools": [{"name": "hi", "input_schema": {"type": "object"}}]}),
    ),
    "function_call": (("messages", {"functions": [{"name": "hi"}]}),),
    "outputs": (("inputs", {}),),
}
"""Fields without which another is refused, for the kind of request that has the first key."""
EARLIER: Mapping[str, tuple[str, list[Any]]] = {
    "function_call_output": (
        "input",
        [{"type": "function_call", "call_id": "hi", "name": "hi", "arguments": "{}"}],
    ),
    "custom_tool_call_output": (
        "input",
        [{"type": "custom_tool_call", "call_id": "hi", "name": "hi", "input": "hi"}],
    ),
    "tool_result": (
        "messages",
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "hi", "name": "hi", "input": {}}],
            },
        ],
    ),
    "inputs": (
        "inputs",
        [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}],
    ),
}
"""What comes first in a list of the request that has an object of this type, or this list."""
GRAMMAR = "grammar"


def complete_request(body: dict[str, Any], place: Place) -> tuple[dict[str, Any], Place]:
    """The request with what else it needs, and the place in it."""
    body = copy.deepcopy(body)
    for key, companions in COMPANIONS.get(str(place[0]), ()):
        if key in body:
            body.update(companions)
    for kind, (key, first) in EARLIER.items():
        needs_first = kind == key or f"'type': '{kind}'" in str(body)
        if needs_first and isinstance(body.get(key), list):
            body[key] = [*first, *body[key]]
            if place[0] == key:
                place = (key, len(first) + int(place[1]), *place[2:])
    if "tool_calls" in place:
        result = {"role": "tool", "tool_call_id": "hi", "content": "hi"}
        body["messages"] = [*body["messages"], result]
    if GRAMMAR in place:
        body["parameters"][GRAMMAR]["value"] = {"properties": {}}
    return body, place


def list_cases() -> Iterator[Any]:
    """The client protocol, the path, the place of an enumeration, and requests that have it."""
    for name in PROTOCOLS:
        client = build_adapter(name, None, {})
        assert isinstance(client, OpenApiProvider)
        fragment = client.openapi_fragment()
        reader = SchemaReader(fragment.schemas)
        paths = {one.operation: one.path for one in client.endpoints if one.task == "generate"}
        for operation, path in paths.items():
            content = fragment.operations.get(operation, {}).get("requestBody", {}).get("content")
            if content is None:
                continue
            requests: dict[Place, list[tuple[dict[str, Any], Place]]] = {}
            for place, value in reader.list_enumerations(content["application/json"]["schema"]):
                requests.setdefault(place, []).append(complete_request(value, place))
            words = {place[-1] for place in requests}
            for fields in (
                body for one, body in REQUESTS[name] if find_operation(client, one) == operation
            ):
                for place in list_texts(fields):
                    if place[-1] in words and place not in requests:
                        requests[place] = [(fields, place)]
            for place, bodies in requests.items():
                shown = ".".join(map(str, place))
                yield pytest.param(name, fill_path(path), bodies, id=f"{name}{path}-{shown}")


def find_operation(client: Any, path: str) -> str:
    """The operation of an endpoint of the client's protocol."""
    operation: str = get_path_router(client).find_endpoint("POST", path).endpoint.operation
    return operation


def list_texts(value: Any, at: Place = ()) -> Iterator[Place]:
    """The path of each text in a body."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from list_texts(inner, (*at, key))
    elif isinstance(value, str):
        yield at


def fill_path(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "m", path)


def put_word(body: Mapping[str, Any], place: Place) -> dict[str, Any]:
    changed = copy.deepcopy(dict(body))
    target: Any = changed
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = WORD
    return changed


def decode(name: str, path: str, body: dict[str, Any]) -> None:
    """Raise ClientError unless the client's adapter takes the request."""
    client = get_adapter(name)
    endpoint = get_path_router(client).find_endpoint("POST", path)
    data = msgspec.json.encode(body)
    client.decode_request(
        ClientRequest(endpoint.endpoint, endpoint.params, HEADERS, "", data, path, "r")
    )


def is_reported(body: Mapping[str, Any], place: Place, reported: list[str]) -> bool:
    """Whether the field with the word, or an object that contains it, is reported.

    A hosted tool is reported as ``tools.TYPE``.
    """
    path = list(map(str, place))
    paths = [[step for step in re.split(r"[.\[\]]+", field) if step] for field in reported]
    if place[0] == "tools" and ["tools", body["tools"][place[1]].get("type")] in paths:
        return True
    return any(one == path[: len(one)] for one in paths)


@pytest.mark.parametrize(("name", "path", "requests"), list(list_cases()))
def test_an_unknown_word_of_a_request_is_kept_reported_or_refused(
    name: str, path: str, requests: list[tuple[dict[str, Any], Place]]
) -> None:
    client = get_adapter(name)
    lost = []

    for body, place in requests:
        changed = put_word(body, place)
        for worker in list_workers():
            try:
                sent, reported = prepare(client, worker.values[0], path, changed)
            except ClientError:
                continue
            if WORD.encode() not in sent and not is_reported(changed, place, reported):
                lost.append((worker.id, place))

    assert lost == []


@pytest.mark.parametrize(("name", "path", "requests"), list(list_cases()))
def test_a_known_word_of_an_enumeration_is_valid(
    name: str, path: str, requests: list[tuple[dict[str, Any], Place]]
) -> None:
    """Otherwise the property would hold because every request is rejected."""
    refusals = []
    for body, _ in requests:
        try:
            decode(name, path, body)
        except ClientError as e:
            refusals.append(str(e))

    assert len(refusals) < len(requests), refusals


# --- responses ------------------------------------------------------------------------------------

ENUMERATIONS = frozenset({"object", "role", "type", "status", "finish_reason", "stop_reason"})
"""The keys of responses whose values are words of an enumeration."""


def list_response_cases(responses: Mapping[str, Any]) -> Iterator[Any]:
    """The worker protocol and the place of each word."""
    for name, response in responses.items():
        for place in list_texts(response):
            if place[-1] in ENUMERATIONS and not is_decided_later(response, place):
                yield pytest.param(name, place, id=f"{name}-{'.'.join(map(str, place))}")


def is_decided_later(response: Any, place: Place) -> bool:
    """Whether another event of a stream of items counts instead of this one."""
    if response is not ITEM_STREAM:
        return False
    event = ITEM_STREAM[int(place[0])]
    is_first_status = event["type"] == "response.created" and place[-1] == "status"
    return is_first_status or is_repeated(event, place) or ("item" in event and len(place) == 2)


def check_word(client: str, worker: str, data: bytes, *, stream: bool) -> None:
    try:
        written, lost = translate_response(client, WORKERS[worker], data, stream=stream)
    except GatewayError:
        return
    is_lost = not set(lost) <= find_losses_of_known_words(client, worker, stream=stream)
    assert WORD.encode() in written or is_lost or b"error" in written


@cache
def find_losses_of_known_words(client: str, worker: str, *, stream: bool) -> frozenset[str]:
    """What is reported of the same answer with words that are known."""
    data = join_events(worker, STREAMS[worker]) if stream else msgspec.json.encode(WHOLE[worker])
    return frozenset(translate_response(client, WORKERS[worker], data, stream=stream)[1])


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("worker", "place"), list(list_response_cases(WHOLE)))
def test_an_unknown_word_of_a_whole_response_is_kept_reported_or_an_error(
    worker: str, place: Place, client: str
) -> None:
    data = msgspec.json.encode(put_word(WHOLE[worker], place))

    check_word(client, worker, data, stream=False)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("worker", "place"), list(list_response_cases(STREAMS)))
def test_an_unknown_word_of_a_stream_is_kept_reported_or_an_error(
    worker: str, place: Place, client: str
) -> None:
    events = list(STREAMS[worker])
    events[int(place[0])] = put_word(events[int(place[0])], place[1:])

    check_word(client, worker, join_events(worker, events), stream=True)


UNKNOWN_CALL = {"id": "c7", "type": WORD, WORD: {"name": "g", "input": "hi"}}
UNKNOWN_PIECES = (
    {"index": 0, "id": "c7", "type": WORD, WORD: {"name": "g", "input": "h"}},
    {"index": 0, WORD: {"input": "i"}},
)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("others", [(), (CALL,)], ids=["alone", "second"])
@pytest.mark.parametrize("worker", [name for name, one in WHOLE.items() if "choices" in one])
def test_a_call_of_an_unknown_type_reaches_clients_of_the_protocol_and_is_reported_to_others(
    worker: str, others: tuple[Any, ...], client: str, *, stream: bool
) -> None:
    calls = [*others, UNKNOWN_CALL]
    pieces = [{**one, "index": i} for i, one in enumerate(others)]
    pieces += [{**one, "index": len(others)} for one in UNKNOWN_PIECES]
    if stream:
        chunks = [make_chunk({"tool_calls": [piece]}) for piece in pieces]
        data = join_events(worker, [*chunks, make_chunk({}, "tool_calls")])
    else:
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        data = msgspec.json.encode({**CHAT_ANSWER, "choices": [choice]})

    written, lost = translate_response(client, WORKERS[worker], data, stream=stream)

    path = f"response.choices[0].message.tool_calls[{len(others)}]"
    if client == worker:
        wanted = {**UNKNOWN_CALL, "index": len(others)} if stream else UNKNOWN_CALL
        assert [one for one in find_calls(written) if one.get("type") == WORD] == [wanted]
        assert not [one for one in lost if one.startswith(path)]
    else:
        assert WORD.encode() not in written
        assert f"{path}.type" in lost


def find_calls(written: bytes) -> list[dict[str, Any]]:
    """The tool calls in a chat response, or in all events of a stream before its end."""
    events = written.partition(b"data: [DONE]")[0].split(b"\n\n")
    bodies = [one.removeprefix(b"data: ") for one in events if one]
    choices = [choice for body in bodies for choice in msgspec.json.decode(body)["choices"]]
    messages = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    return [call for message in messages for call in message.get("tool_calls") or ()]
