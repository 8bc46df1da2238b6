"""Classification: requests and responses of clients and of workers."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec import Raw

from protocols.core.aggregate import aggregate
from protocols.core.errors import (
    ClientError,
    InvalidParameter,
    UnknownParameter,
    UnsupportedFeature,
    WorkerFailed,
)
from protocols.core.events import Classification, Event, ResponseMetadata, StreamEnd, Usage
from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.core.request import ClassifyRequest
from protocols.openai.endpoints import OpenAI

MakeCall = Callable[..., ClientRequest]
OPENAI, VLLM, SGLANG = OpenAI(), OpenAI("vllm"), OpenAI("sglang")
GOOD, BAD = Classification(0, "pos", (0.1, 0.9)), Classification(1, None, (0.75, 0.25))


def decode(make_call: MakeCall, adapter: OpenAI = OPENAI, **fields: Any) -> ClassifyRequest:
    request = adapter.decode_request(make_call("classify", {"model": "m", **fields}))
    assert isinstance(request, ClassifyRequest)
    return request


def test_request_is_decoded(make_call: MakeCall) -> None:
    options: dict[str, Any] = {
        "truncate_prompt_tokens": -1,
        "add_special_tokens": False,
        "use_activation": False,
    }
    request = decode(make_call, input=["a", "b"], user="u", request_id="r", odd=1, **options)

    assert request.inputs == ("a", "b")
    assert (request.truncate, request.add_special_tokens, request.activation) == (-1, False, False)
    assert (request.labels, request.client_id) == ({"user": "u"}, "r")
    assert request.extra == {"odd": Raw(b"1")}


@pytest.mark.parametrize(
    ("sent", "inputs"),
    [("a", ("a",)), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_input_is_a_text_or_tokens(make_call: MakeCall, sent: Any, inputs: Any) -> None:
    assert decode(make_call, input=sent).inputs == inputs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [0] * 2049}, "input"),
        ({"input": ["a"], "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ],
)
def test_invalid_request_names_the_field(
    make_call: MakeCall, fields: Mapping[str, Any], param: str
) -> None:
    with pytest.raises(ClientError) as excinfo:
        decode(make_call, **fields)
    assert excinfo.value.param == param
    assert isinstance(excinfo.value, InvalidParameter | UnsupportedFeature)


def test_unknown_field_is_rejected_if_configured(make_call: MakeCall) -> None:
    with pytest.raises(UnknownParameter):
        decode(make_call, OpenAI(unknown="reject"), input="a", odd=1)


@pytest.mark.parametrize("usage", [None, Usage(5)])
def test_response_has_a_class_for_each_input(
    make_call: MakeCall, response_context: ResponseContext, usage: Usage | None
) -> None:
    call = make_call("classify", {"model": "m", "input": ["a", "b"]})
    encoder = OPENAI.create_encoder(call, OPENAI.decode_request(call), response_context)
    events: list[Event] = [BAD, GOOD, *([usage] if usage else []), StreamEnd()]
    body = json.loads(encoder.encode_unary(aggregate(events)).body)

    assert body["data"] == [
        {"index": 0, "label": "pos", "probs": [0.1, 0.9], "num_classes": 2},
        {"index": 1, "label": None, "probs": [0.75, 0.25], "num_classes": 2},
    ]
    assert (body["id"], body["object"]) == (f"classify-{response_context.id}", "list")
    assert (body["created"], body["model"]) == (response_context.created, response_context.model)

    expected = {"prompt_tokens": 5, "total_tokens": 5}
    assert body.get("usage") == (expected if usage else None)


REQUEST = ClassifyRequest(
    model="w",
    inputs=("a", "b"),
    truncate=5,
    activation=False,
    priority=1,
    labels={"user": "u"},
    extra={"odd": Raw(b"1")},
)


def encode(adapter: OpenAI, request: ClassifyRequest) -> tuple[str, Any]:
    wire = adapter.encode_request(request)
    return wire.path, json.loads(wire.body)


@pytest.mark.parametrize("profile", ["vllm", "interlingua"])
def test_request_reaches_vllm_outside_v1(profile: str) -> None:
    adapter = OpenAI(profile)

    path, body = encode(adapter, REQUEST)
    assert path == "/classify"

    sent = {"model": "w", "input": ["a", "b"], "truncate_prompt_tokens": 5, "use_activation": False}
    assert {name: body[name] for name in sent} == sent
    assert body["odd"] == 1

    losses = adapter.unsupported_parameters(REQUEST, {})
    assert [(one.path, one.reason) for one in losses] == [("priority", "dropped")]


def test_request_reaches_sglang_below_v1_without_unknown_fields() -> None:
    one = ClassifyRequest(model="w", inputs=("a",), truncate=5)

    assert encode(SGLANG, one) == ("/v1/classify", {"model": "w", "input": "a"})
    assert [loss.path for loss in SGLANG.unsupported_parameters(one, {})] == ["truncate"]


def test_workers_without_the_api_do_not_take_the_request() -> None:
    profiles = {name for name in OpenAI.profiles if "classify" in OpenAI(name).request_kinds}

    assert profiles == {"vllm", "sglang", "interlingua"}


def decode_worker(body: Any, request: ClassifyRequest = REQUEST) -> list[Event]:
    decoder = VLLM.create_decoder(request)
    decoder.feed(body if isinstance(body, bytes) else json.dumps(body).encode())
    return list(decoder.close())


ITEMS = [
    {"index": 1, "label": None, "probs": [0.75, 0.25], "num_classes": 2},
    {"index": 0, "label": "pos", "probs": [0.1, 0.9], "num_classes": 2},
]


@pytest.mark.parametrize(
    ("fields", "last_events"),
    [
        ({}, [StreamEnd()]),
        ({"usage": {"total_tokens": 1}}, [StreamEnd()]),
        ({"usage": {"prompt_tokens": 7}}, [Usage(7), StreamEnd()]),
        ({"usage": {"prompt_tokens": "7"}}, [StreamEnd(has_ignored_usage=True)]),
    ],
)
def test_response_of_a_worker_is_decoded(
    fields: Mapping[str, Any], last_events: list[Event]
) -> None:
    events = decode_worker({"id": "i", "model": "w", "data": ITEMS, **fields})

    assert events == [ResponseMetadata("w", id="i", source="openai"), BAD, GOOD, *last_events]


def test_names_of_a_worker_that_are_no_text_are_left_out() -> None:
    first, *_ = decode_worker({"id": 1, "model": 2, "data": ITEMS})

    assert first == ResponseMetadata(source="openai")


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        {"data": None},
        {"data": ITEMS[:1]},
        {"data": [ITEMS[0], ITEMS[0]]},
        {"error": {"message": "x", "code": 500}},
    ],
)
def test_invalid_response_of_a_worker_fails(body: Any) -> None:
    with pytest.raises(WorkerFailed):
        decode_worker(body)
