"""Every request and response in the documentation of the first releases, byte for byte.

Responses printed over several lines are compared without the blanks between tokens, as a server
writes them.
"""

from typing import Any

import msgspec

from protocols.core.events import ChoiceEnd, StreamEnd, StreamStart, TextDelta, Timing, Usage
from protocols.core.request import (
    GenerationRequest,
    Message,
    PromptOptions,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
)

# --- generate_stream ------------------------------------------------------------------------------

GENERATE = b"""{
    "id":"a123",
    "text_input": "My name is Olivier and I",
    "parameters": {
        "details": true,
        "do_sample": true,
        "max_new_tokens":200,
        "repetition_penalty": 1.1,
        "seed": 123,
        "temperature": 1,
        "top_k": 10,
        "top_p": 0.99,
        "batch_size":100,
        "typical_p": 0.5,
        "watermark": false,
        "perf_stat": false
    }
}"""
PIECES = (
    ("am", 10), (" passion", 11), ("ate", 9), (" about", 11), (" music", 10), (".", 12),
    ("\n", 10), ("T", 19), ("od", 12), ("ay", 30), ("</s>", 5067),
)  # fmt: skip
GENERATED = rb"""data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":"am","details":{"generated_tokens":1,"first_token_cost":null,"decode_cost":null,"batch_size":1,"queue_wait_time":10}}

data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":" passion","details":{"generated_tokens":2,"first_token_cost":null,"decode_cost":null,"batch_size":1,"queue_wait_time":11}}

data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":"ate","details":{"generated_tokens":3,"first_token_cost":null,"decode_cost":null,"batch_size":1,"queue_wait_time":9}}

data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":" about","details":{"generated_tokens":4,"first_token_cost":null,"decode_cost":null,"batch_size":1,"queue_wait_time":11}}

data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":" music","details":{"generated_tokens":5,"first_token_cost":null,"decode_cost":null,"batch_size":1,"queue_wait_time":10}}

data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":".","details":{"generated_tokens":6,"first_token_cost":null,"decode_cost":null,"batch_size":1,"queue_wait_time":12}}

data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":"\n","details":{"generated_tokens":7,"first_token_cost":null,"decode_cost":null,"batch_size":1,"queue_wait_time":10}}

data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":"T","details":{"generated_tokens":8,"first_token_cost":null,"decode_cost":null,"batch_size":1,"queue_wait_time":19}}

data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":"od","details":{"generated_tokens":9,"first_token_cost":null,"decode_cost":null,"batch_size":1,"queue_wait_time":12}}

data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":"ay","details":{"generated_tokens":10,"first_token_cost":null,"decode_cost":null,"batch_size":1,"queue_wait_time":30}}

data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":"</s>","details":{"finish_reason":"eos_token","generated_tokens":424,"first_token_cost":null,"decode_cost":null,"batch_size":1,"queue_wait_time":5067}}

"""  # noqa: E501
STREAM = "/v2/models/llama_65b/generate_stream"


def test_documented_generate_stream_request_is_decoded(bench: Any) -> None:
    request = bench("rc1").decode(STREAM, GENERATE)
    assert request == GenerationRequest(
        model="llama_65b",
        kind="completion",
        prompts=("My name is Olivier and I",),
        templating=PromptOptions(mode="raw"),
        sampling=SamplingParams(
            temperature=1.0,
            top_k=10,
            top_p=0.99,
            typical_p=0.5,
            do_sample=True,
            seed=123,
            repetition_penalty=1.1,
            watermark=False,
        ),
        stopping=StopConditions(max_tokens=200),
        stream=True,
        response_options=ResponseOptions(details=True, timing=True),
        client_id="a123",
        provided_fields=frozenset(
            {
                *("temperature", "top_k", "top_p", "typical_p", "do_sample", "seed", "watermark"),
                *("repetition_penalty", "max_new_tokens", "details", "batch_size"),
            }
        ),
        extra={"batch_size": msgspec.Raw(b"100"), "perf_stat": msgspec.Raw(b"false")},
    )


def test_documented_generate_stream_response(bench: Any) -> None:
    one = bench("rc1")
    encoder = one.encoder(STREAM, GENERATE)
    events = [
        event
        for text, wait in PIECES
        for event in (Timing(queue=wait / 1e6, batch_size=1), TextDelta(text))
    ]

    sent = one.stream(
        encoder, StreamStart(7), *events, ChoiceEnd("eos"), Usage(7, 424), StreamEnd()
    )

    assert sent == GENERATED
    assert encoder.content_type == "text/event-stream"
    assert encoder.headers() == (("RequestUUID", "r1"), ("startTime", "1707275960000000000"))


# --- chat completions -----------------------------------------------------------------------------

CHAT = "/v1/chat/completions"
SINGLE = b"""{
    "model": "gpt-3.5-turbo",
    "messages": [{
        "role": "user",
        "content": "You are a helpful assistant."
    }],
    "max_tokens": 20,
    "presence_penalty": 1.03,
    "frequency_penalty": 1.0,
    "seed": null,
    "temperature": 0.5,
    "top_p": 0.95,
    "stream": false
}"""
MANY = b"""{
    "model": "gpt-3.5-turbo",
    "messages": [{
        "role": "system",
        "content": "You are a student who is good at math."
        },
        {
        "role": "user",
        "content": "what is your hobby?"
        }
    ],
    "max_tokens": 20,
    "presence_penalty": 1.03,
    "frequency_penalty": 1.0,
    "seed": null,
    "temperature": 0.5,
    "top_p": 0.95,
    "stream": false
}"""
ANSWER = rb"""{
    "id": "chatcmpl-123",
    "object": "chat.completion",
    "created": 1677652288,
    "model": "gpt-3.5-turbo-0613",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "\n\nHello there, how may I assist you today?"
            },
            "finish_reason": "eos_token"
        }
    ],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 12,
        "total_tokens": 21
    }
}"""
WORDS = (
    "am", " a", " French", "man", " living", " in", " the", " UK", ".", " I", " am", " a", " keen",
    " photograph", "er", " and", " I", " have", " been",
)  # fmt: skip
CHUNK = (
    'data: {"id":"1","object":"chat.completion.chunk","created":1707275960,"model":"baichuan",'
    '"choices":[{"index":0,"delta":{"role":"assistant","content":"%s"},"finish_reason":null}]}\n\n'
)
LAST = (
    'data: {"id":"1","object":"chat.completion.chunk","created":1707275960,"model":"baichuan",'
    '"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
)


def make_chat(*messages: Message) -> GenerationRequest:
    return GenerationRequest(
        model="gpt-3.5-turbo",
        kind="chat",
        messages=messages,
        sampling=SamplingParams(
            temperature=0.5, top_p=0.95, presence_penalty=1.03, frequency_penalty=1.0
        ),
        stopping=StopConditions(max_tokens=20),
        client_id="endpoint_common_0",
        provided_fields=frozenset(
            {
                *("max_tokens", "presence_penalty", "frequency_penalty"),
                *("temperature", "top_p", "stream"),
            }
        ),
        extra={},
    )


def test_documented_single_turn_chat_request_is_decoded(bench: Any) -> None:
    assert bench("rc1").decode(CHAT, SINGLE) == make_chat(
        Message("user", (TextPart("You are a helpful assistant."),))
    )


def test_documented_multi_turn_chat_request_is_decoded(bench: Any) -> None:
    assert bench("rc1").decode(CHAT, MANY) == make_chat(
        Message("system", (TextPart("You are a student who is good at math."),)),
        Message("user", (TextPart("what is your hobby?"),)),
    )


def test_documented_unary_chat_response(bench: Any) -> None:
    one = bench("rc1")
    call = one.call(CHAT, SINGLE, headers={"req-id": "chatcmpl-123"})
    response_context = one.build_response_context("gpt-3.5-turbo-0613", created=1677652288)
    encoder = one.adapter.create_encoder(call, one.adapter.decode_request(call), response_context)
    delta = TextDelta("\n\nHello there, how may I assist you today?", tokens=12)

    reply = one.whole(encoder, delta, ChoiceEnd("eos"), Usage(9, 12), StreamEnd())

    # json keeps the order of keys, so this compares all bytes but blanks
    assert reply.body == msgspec.json.encode(msgspec.json.decode(ANSWER))
    assert reply.headers == (("Content-Type", "application/json"), ("Connection", "close"))


def test_documented_chat_stream(bench: Any) -> None:
    one = bench("rc1")
    body = msgspec.json.decode(SINGLE) | {"stream": True}
    encoder = one.encoder(CHAT, body, model="baichuan", name="1")

    events = (
        StreamStart(9),
        *map(TextDelta, WORDS),
        ChoiceEnd("length"),
        Usage(9, 20),
        StreamEnd(),
    )

    assert one.stream(encoder, *events).decode() == "".join(CHUNK % word for word in WORDS) + LAST
