"""Stored responses: references in requests, and the endpoints that return them."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from protocols.core.aggregate import aggregate
from protocols.core.errors import (
    ClientError,
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    StoredObjectNotFound,
    UnsupportedFeature,
)
from protocols.core.events import ChoiceEnd, StreamEnd, TextDelta, TokenList
from protocols.core.interfaces import ClientRequest, ResponseContext, StoredResponse
from protocols.core.request import GenerationRequest, TokenizeRequest
from protocols.openai import OpenAI
from protocols.openai.responses_api import state
from protocols.openai.responses_api.responses import ResponsesEncoder

ADAPTER = OpenAI()
NO_CATALOG: Any = None
OUTPUT = [{"id": "msg_out", "type": "message", "role": "assistant", "content": "b"}]
STORED = StoredResponse(
    "resp_1",
    ("msg_in", "msg_out"),
    msgspec.json.encode(
        {
            "response": {"id": "resp_1", "output": OUTPUT},
            "input": [{"id": f"msg_{n}", "role": "user", "content": "a"} for n in range(3)],
            "history": [{"role": "user", "content": "before"}],
        }
    ),
)


def create_request(operation: str, body: Any = None, query: str = "", **headers: str) -> Any:
    endpoint = next(one for one in ADAPTER.endpoints if one.operation == operation)
    content = b"" if body is None else msgspec.json.encode({"model": "m"} | body)
    params = {"response_id": "resp_1"}
    return ClientRequest(endpoint, params, headers, query, content, endpoint.path)


def encode(operation: str, query: str = "") -> Any:
    response = ADAPTER.encode_stored(create_request(operation, query=query), STORED)
    assert dict(response.headers)["Content-Type"] == "application/json"
    return msgspec.json.decode(response.body)


def test_stored_response_is_never_in_the_background() -> None:
    with pytest.raises(ClientError) as excinfo:
        encode("response cancellation")

    reply = ADAPTER.encode_error(excinfo.value, create_request("response cancellation"))
    error = msgspec.json.decode(reply.body)["error"]
    assert reply.status == 400
    assert error["message"] == "Cannot cancel a synchronous response."
    assert (error["type"], error["param"]) == ("invalid_request_error", None)


def test_compaction_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeature, match="Compaction of responses"):
        ADAPTER.handle_info_request(create_request("response compaction", {}), NO_CATALOG)


def test_input_tokens_are_those_of_a_conversation(response_context: ResponseContext) -> None:
    call = create_request("response tokens", {"input": "hi", "instructions": "be brief"})
    request = ADAPTER.decode_request(call)
    response = aggregate([TokenList((1, 2, 3)), StreamEnd()])

    reply = ADAPTER.create_encoder(call, request, response_context).encode_unary(response)

    assert isinstance(request, TokenizeRequest)
    assert [message.role for message in request.messages] == ["system", "user"]
    assert msgspec.json.decode(reply.body) == {"object": "response.input_tokens", "input_tokens": 3}


def test_only_this_endpoint_answers_with_a_token_count() -> None:
    reply = ADAPTER.encode_token_count(create_request("response tokens", {"input": "a"}), 6)

    assert reply is not None
    assert msgspec.json.decode(reply.body)["input_tokens"] == 6
    assert ADAPTER.encode_token_count(create_request("tokenize", {"prompt": "a"}), 6) is None


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, []),
        ({"previous_response_id": "r", "input": "x"}, ["r"]),
        ({"previous_response_id": 5}, []),
        ({"input": [5, {"type": "item_reference", "id": "a"}, {"id": "b"}]}, ["a", "b"]),
        ({"input": [{"type": "message", "id": "a"}, {"role": "user", "id": "b"}]}, []),
        ({"input": [{"id": 5}]}, []),
    ],
)
def test_references_are_listed(body: Any, wanted: list[str]) -> None:
    assert list(ADAPTER.count_references(create_request("response", body))) == wanted


def test_every_reference_to_an_item_is_counted() -> None:
    items = [{"type": "item_reference", "id": "a"}, {"id": "b"}, {"id": "a"}]
    body = {"previous_response_id": "r", "input": [*items, {"id": "r"}]}

    assert ADAPTER.count_references(create_request("response", body)) == {"r": 2, "a": 2, "b": 1}


def test_reference_without_an_id_is_rejected() -> None:
    call = create_request("response", {"input": [{"type": "item_reference", "id": 5}]})

    with pytest.raises(ClientError) as excinfo:
        ADAPTER.decode_request(call)

    assert excinfo.value.param == "input[0].id"


def test_parts_of_a_stored_response_have_their_size_in_a_request() -> None:
    parts = ADAPTER.read_parts(STORED, ["resp_1", "msg_1", "msg_out", "other"])

    stored = msgspec.json.decode(STORED.body)
    history = [*stored["history"], *stored["input"], *OUTPUT]

    assert {name: msgspec.json.decode(part) for name, part in parts.items()} == {
        "resp_1": history,
        "msg_1": {"id": "msg_1", "role": "user", "content": "a"},
        "msg_out": OUTPUT[0],
    }


def test_listing_references_never_fails_and_is_bounded() -> None:
    items = [{"type": "item_reference", "id": f"i{n}"} for n in range(state.MAX_REFERENCES + 9)]

    assert state.count_references(b"{") == {}

    names = state.count_references(msgspec.json.encode({"input": items}))
    assert len(names) == state.MAX_REFERENCES + 1


def test_history_and_items_are_found() -> None:
    body = {"previous_response_id": "resp_1", "input": [{"id": "msg_1"}, {"id": "msg_out"}]}
    call = create_request("response", body)
    names = ADAPTER.count_references(call)

    ADAPTER.set_references(call, ADAPTER.read_parts(STORED, names))

    request = ADAPTER.decode_request(call)
    assert isinstance(request, GenerationRequest)

    texts = [(one.role, one.text) for one in request.messages]
    user = ("user", "a")
    assert texts == [
        ("user", "before"), user, user, user, ("assistant", "b"), user, ("assistant", "b")
    ]  # fmt: skip


def test_copy_of_a_request_refers_to_the_same_history() -> None:
    call = create_request("response", {"previous_response_id": "resp_1", "input": "x"})
    names = ADAPTER.count_references(call)
    ADAPTER.set_references(call, ADAPTER.read_parts(STORED, names))
    target = replace(call, headers={"x-other": "1"})

    ADAPTER.copy_references(call, target)

    request = ADAPTER.decode_request(target)
    assert isinstance(request, GenerationRequest)
    assert [one.text for one in request.messages] == ["before", "a", "a", "a", "b", "x"]


def test_item_that_is_not_in_the_response_is_not_found() -> None:
    call = create_request("response", {"input": [{"id": "other"}]})

    ADAPTER.set_references(call, ADAPTER.read_parts(STORED, ["other"]))

    with pytest.raises(StoredObjectNotFound):
        ADAPTER.decode_request(call)


def test_adapter_encodes_the_response_and_offers_it_for_storage() -> None:
    call = create_request("response", {"input": "x", "stream": False})
    ADAPTER.set_references(call, {})
    request = ADAPTER.decode_request(call)
    response_context = ResponseContext("r", 1, "m", "1", "w", lambda: 0.0)

    encoder = ADAPTER.create_encoder(call, request, response_context)
    encoder.encode_events([TextDelta("x"), ChoiceEnd("eos"), StreamEnd()])

    assert isinstance(encoder, ResponsesEncoder)
    assert encoder.stored_response is not None


def test_nothing_is_stored_without_a_store() -> None:
    call = create_request("response", {"input": "x"})
    ADAPTER.set_references(call, None)
    request = ADAPTER.decode_request(call)
    response_context = ResponseContext("r", 1, "m", "1", "w", lambda: 0.0)

    encoder = ADAPTER.create_encoder(call, request, response_context)
    encoder.encode_events([TextDelta("x"), ChoiceEnd("eos"), StreamEnd()])

    assert isinstance(encoder, ResponsesEncoder)
    assert encoder.stored_response is None


def test_stored_response_is_returned_and_deleted() -> None:
    assert ADAPTER.read_stored_id(create_request("stored response")) == "resp_1"
    assert encode("stored response") == {"id": "resp_1", "output": OUTPUT}
    assert encode("response deletion") == {"id": "resp_1", "object": "response", "deleted": True}
    with pytest.raises(UnsupportedFeature):
        encode("stored response", "stream=true")


@pytest.mark.parametrize(
    ("query", "wanted", "has_more"),
    [
        ("", ["msg_2", "msg_1", "msg_0"], False),
        ("order=asc&limit=2", ["msg_0", "msg_1"], True),
        ("order=asc&after=msg_0", ["msg_1", "msg_2"], False),
        ("after=msg_0", [], False),
    ],
)
def test_input_items(query: str, wanted: list[str], has_more: bool) -> None:
    body = encode("response items", query)

    assert [one["id"] for one in body["data"]] == wanted

    ends = (wanted[0], wanted[-1]) if wanted else (None, None)
    assert (body["first_id"], body["last_id"], body["has_more"]) == (*ends, has_more)


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("limit=99999", "limit"),
     ("order=up", "order"), ("after=x", "after")],
)  # fmt: skip
def test_invalid_query_is_rejected(query: str, param: str) -> None:
    with pytest.raises(ClientError) as excinfo:
        encode("response items", query)

    assert excinfo.value.param == param


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (ContextTooLong("x"), 400, "context_length_exceeded", "input"),
        (UnsupportedFeature("x", param="messages[0].content"), 400, "unsupported_value", "input"),
        (StoredObjectNotFound("x", id="r", param="previous_response_id"), 400,
         "previous_response_not_found", "previous_response_id"),
        (StoredObjectNotFound("x", id="r"), 404, None, None),
        (Overloaded("x"), 503, "service_unavailable", None),
    ],
)  # fmt: skip
def test_errors_name_this_apis_fields(
    error: GatewayError, status: int, code: str | None, param: str | None
) -> None:
    response = ADAPTER.encode_error(error, create_request("response", {}))

    body = msgspec.json.decode(response.body)["error"]
    assert (response.status, body["code"], body["param"]) == (status, code, param)


def test_overload_stops_codex() -> None:
    call = create_request("response", {}, **{"user-agent": "codex_exec/0.169.0"})

    response = ADAPTER.encode_error(Overloaded("x"), call)

    assert msgspec.json.decode(response.body)["error"]["code"] == "server_is_overloaded"


@pytest.mark.parametrize(("seconds", "wanted"), [(None, "1"), (7.0, "7")])
def test_rate_limit_error_always_has_retry_after(seconds: float | None, wanted: str) -> None:
    error = RateLimitExceeded("x", retry_after=seconds)

    response = ADAPTER.encode_error(error, create_request("response", {}))

    assert dict(response.headers)["Retry-After"] == wanted


def test_reference_to_reasoning_has_the_signature_that_the_client_did_not_ask_for() -> None:
    """Only the store holds it; an item without one is what the client got."""
    reasoning: dict[str, Any] = {"id": "rs_1", "type": "reasoning", "summary": []}
    response = {"id": "resp_1", "output": [reasoning, *OUTPUT]}
    body = {"response": response, "sealed": {"rs_1": "signed"}}
    stored = StoredResponse("resp_1", ("rs_1", "msg_out"), msgspec.json.encode(body))

    parts = state.read_parts(stored, {"rs_1", "msg_out"})

    assert msgspec.json.decode(parts["rs_1"]) == {**reasoning, "encrypted_content": "signed"}
    assert msgspec.json.decode(parts["msg_out"]) == OUTPUT[0]
