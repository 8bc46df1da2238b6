"""Tokenize and detokenize: requests and responses of clients and of workers."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec import Raw

from protocols.core.aggregate import aggregate
from protocols.core.errors import InvalidParameter, UnsupportedFeature, WorkerFailed
from protocols.core.events import DetokenizedText, Event, StreamEnd, TokenList
from protocols.core.interfaces import (
    ClientRequest,
    ResponseContext,
    build_unsupported_kind_error,
)
from protocols.core.request import (
    DetokenizeRequest,
    Message,
    PromptOptions,
    TextPart,
    TokenizeRequest,
    Tool,
)
from protocols.openai.endpoints import OpenAI

MakeCall = Callable[..., ClientRequest]
OPENAI, VLLM = OpenAI(), OpenAI("vllm")
SAY = [{"role": "user", "content": "hi"}]
TURNS = (Message("user", (TextPart("hi"),)),)


def decode(make_call: MakeCall, operation: str = "tokenize", **fields: Any) -> Any:
    return OPENAI.decode_request(make_call(operation, {"model": "m", **fields}))


def answer(
    make_call: MakeCall,
    response_context: ResponseContext,
    event: Event,
    operation: str,
    **fields: Any,
) -> Any:
    call = make_call(operation, {"model": "m", **fields})
    encoder = OPENAI.create_encoder(call, OPENAI.decode_request(call), response_context)
    return json.loads(encoder.encode_unary(aggregate([event, StreamEnd()])).body)


# --- clients --------------------------------------------------------------------------------------


def test_text_to_tokenize_is_decoded(make_call: MakeCall) -> None:
    request = decode(make_call, prompt="hi", add_special_tokens=False, return_token_strs=True)

    assert (request.prompt, request.messages, request.return_texts) == ("hi", (), True)
    assert request.templating == PromptOptions("raw", add_special_tokens=False)
    assert decode(make_call, prompt="").prompt == ""


def test_conversation_to_tokenize_is_decoded(make_call: MakeCall) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    request = decode(
        make_call,
        messages=SAY,
        tools=[tool],
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template_kwargs={"x": 1},
    )

    assert (request.prompt, request.messages) == (None, TURNS)
    assert [one.name for one in request.tools] == ["f"]
    assert request.templating.continue_final is True
    assert request.templating.add_generation_prompt is False
    assert list(request.templating.arguments) == ["x"]


def test_conversation_needs_no_options(make_call: MakeCall) -> None:
    request = decode(make_call, messages=SAY)

    assert (request.messages, request.tools, request.templating) == (TURNS, (), PromptOptions())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "messages": SAY}, "messages"),
        ({"messages": []}, "messages"),
        (
            {"messages": SAY, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_invalid_tokenize_request_names_the_field(
    make_call: MakeCall, fields: Mapping[str, Any], param: str
) -> None:
    with pytest.raises(InvalidParameter) as excinfo:
        decode(make_call, **fields)
    assert excinfo.value.param == param


@pytest.mark.parametrize(
    ("tokens", "param"),
    [
        (None, "tokens"),
        ("a", "tokens"),
        ([1, -1], "tokens[1]"),
        ([2**31], "tokens[0]"),
        ([1.5], "tokens[0]"),
        ([True], "tokens[0]"),
        (["a"], "tokens[0]"),
    ],
)
def test_invalid_detokenize_request_names_the_field(
    make_call: MakeCall, tokens: Any, param: str
) -> None:
    with pytest.raises(InvalidParameter) as excinfo:
        decode(make_call, "detokenize", tokens=tokens)
    assert excinfo.value.param == param


def test_tokenize_response_has_the_texts_only_if_requested(
    make_call: MakeCall, response_context: ResponseContext
) -> None:
    tokens = TokenList((104, 105), ("h", "i"), 4096)

    assert answer(make_call, response_context, tokens, "tokenize", prompt="hi") == {
        "count": 2,
        "max_model_len": 4096,
        "tokens": [104, 105],
        "token_strs": None,
    }

    texts = answer(
        make_call, response_context, tokens, "tokenize", prompt="hi", return_token_strs=True
    )
    assert texts["token_strs"] == ["h", "i"]


def test_detokenize_response_has_the_text(
    make_call: MakeCall, response_context: ResponseContext
) -> None:
    event = DetokenizedText("hé")

    assert answer(make_call, response_context, event, "detokenize", tokens=[]) == {"prompt": "hé"}


def test_model_without_tokenizer_is_not_implemented(make_call: MakeCall) -> None:
    error = build_unsupported_kind_error("tokenize")
    statuses = {
        operation: OPENAI.encode_error(error, make_call(operation)).status
        for operation in ("tokenize", "detokenize", "rerank", "chat")
    }

    assert statuses == {"tokenize": 501, "detokenize": 501, "rerank": 400, "chat": 400}

    body = json.loads(OPENAI.encode_error(error, make_call("tokenize")).body)
    assert body["error"]["type"] == "not_implemented_error"
    assert (
        OPENAI.encode_error(InvalidParameter("x", param="p"), make_call("tokenize")).status == 400
    )


# --- workers --------------------------------------------------------------------------------------

TEXT = TokenizeRequest(
    model="w", prompt="hi", return_texts=True, templating=PromptOptions(add_special_tokens=False)
)
CHAT = TokenizeRequest(
    model="w",
    messages=TURNS,
    tools=(Tool("f"),),
    templating=PromptOptions(continue_final=True, template="t", arguments={}),
)


def encode(adapter: OpenAI, request: Any) -> tuple[str, Any]:
    wire = adapter.encode_request(request)
    return wire.path, json.loads(wire.body)


@pytest.mark.parametrize("profile", ["vllm", "interlingua"])
def test_text_is_tokenized_by_vllm(profile: str) -> None:
    assert encode(OpenAI(profile), TEXT) == (
        "/tokenize",
        {"model": "w", "prompt": "hi", "add_special_tokens": False, "return_token_strs": True},
    )


def test_unset_options_are_not_sent() -> None:
    plain = TokenizeRequest(model="w", prompt="hi")

    assert encode(VLLM, plain)[1] == {"model": "w", "prompt": "hi"}


def test_conversation_is_tokenized_by_vllm() -> None:
    assert encode(VLLM, CHAT) == (
        "/tokenize",
        {
            "model": "w",
            "messages": SAY,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "continue_final_message": True,
            "chat_template_kwargs": {},
        },
    )

    plain = TokenizeRequest(model="w", messages=TURNS)
    assert encode(VLLM, plain)[1] == {"model": "w", "messages": SAY}


def test_chat_template_of_the_client_needs_the_powers_of_the_worker() -> None:
    assert encode(OpenAI("vllm", powers=True), CHAT)[1]["chat_template"] == "t"
    assert [one.path for one in VLLM.unsupported_parameters(CHAT, {})] == ["templating.template"]
    assert OpenAI("vllm", powers=True).unsupported_parameters(CHAT, {}) == ()


def test_unknown_fields_reach_the_worker_unless_they_control_it() -> None:
    extra = {"odd": Raw(b"1"), "kv_transfer_params": Raw(b"{}")}
    request = TokenizeRequest(model="w", prompt="hi", extra=extra)

    body = encode(VLLM, request)[1]

    assert body["odd"] == 1
    assert "kv_transfer_params" not in body


def test_text_is_tokenized_by_sglang_and_llamacpp() -> None:
    assert encode(OpenAI("sglang"), TEXT) == (
        "/tokenize",
        {"model": "w", "prompt": "hi", "add_special_tokens": False},
    )
    assert encode(OpenAI("llamacpp"), TEXT) == (
        "/tokenize",
        {"content": "hi", "add_special": False, "with_pieces": True},
    )


@pytest.mark.parametrize("profile", ["sglang", "llamacpp"])
def test_worker_that_tokenizes_texts_only_rejects_a_conversation(profile: str) -> None:
    with pytest.raises(UnsupportedFeature, match="not conversations"):
        OpenAI(profile).encode_request(CHAT)


def test_tokens_are_detokenized_by_workers() -> None:
    request = DetokenizeRequest(model="w", token_ids=(1, 2))

    assert encode(VLLM, request) == ("/detokenize", {"model": "w", "tokens": [1, 2]})
    assert encode(OpenAI("llamacpp"), request) == ("/detokenize", {"tokens": [1, 2]})
    assert VLLM.unsupported_parameters(request, {}) == ()


def decode_worker(request: Any, body: Any) -> Any:
    decoder = VLLM.create_decoder(request)
    decoder.feed(body if isinstance(body, bytes) else json.dumps(body).encode())
    return list(decoder.close())


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (
            {"count": 2, "max_model_len": 9, "tokens": [1, 2], "token_strs": ["a", "b"]},
            TokenList((1, 2), ("a", "b"), 9),
        ),
        ({"tokens": [], "token_strs": None, "max_model_len": -1}, TokenList(())),
        (
            {"tokens": [{"id": 1, "piece": "a"}, {"id": 2, "piece": [195]}]},
            TokenList((1, 2), ("a", "")),
        ),
    ],
    ids=["vllm", "nothing", "llamacpp"],
)
def test_tokens_of_workers_are_decoded(body: Any, tokens: TokenList) -> None:
    assert decode_worker(TEXT, body) == [tokens, StreamEnd()]


@pytest.mark.parametrize("name", ["prompt", "text", "content"])
def test_texts_of_workers_are_decoded(name: str) -> None:
    request = DetokenizeRequest(model="w", token_ids=(1,))

    assert decode_worker(request, {name: "a"}) == [DetokenizedText("a"), StreamEnd()]


@pytest.mark.parametrize("request_", [TEXT, DetokenizeRequest(model="w", token_ids=(1,))])
@pytest.mark.parametrize(
    "body", [b"{", b"{}", b'{"tokens":"a","prompt":5}', b'{"error":{"message":"x","code":500}}']
)
def test_invalid_response_of_a_tokenizer_fails(request_: Any, body: bytes) -> None:
    with pytest.raises(WorkerFailed):
        decode_worker(request_, body)
