"""The endpoints that name no model: MindIE's own, and those like TGI's and vLLM's."""

from typing import Any

import msgspec
import pytest

from protocols.core.errors import StreamBroken
from protocols.core.events import (
    ChoiceEnd,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    StreamStart,
    TextDelta,
    Timing,
    Usage,
)

HELLO = (StreamStart(2), TextDelta("Hello", token_ids=(1,)), TextDelta("!", token_ids=(2,)))
END = (ChoiceEnd("eos"), Usage(2, 2), StreamEnd())
INPUTS = {"inputs": "a b"}
PROMPT = {"prompt": "a b"}
DETAILS = {"parameters": {"details": True, "seed": 7}}
TEMPERATURE = "Parameter temperature must be in (0.0,3.40282e+38], got 0."


@pytest.fixture
def llama_bench(bench: Any) -> Any:
    return bench(model="llama")


# --- model and format -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "stream"),
    [
        ("/generate", INPUTS, False),
        ("/generate", INPUTS | {"stream": True}, False),
        ("/generate", PROMPT, False),
        ("/generate", PROMPT | {"stream": True}, True),
        ("/generate", PROMPT | INPUTS | {"stream": True}, True),
        ("/generate_stream", INPUTS, True),
        ("/", INPUTS, False),
        ("/", INPUTS | {"stream": True}, True),
        ("/infer", INPUTS | {"stream": True}, True),
        ("/infer_token", {"input_id": [1, 2]}, False),
    ],
)
def test_default_model_and_stream_flag_are_decoded(
    llama_bench: Any, path: str, body: Any, stream: bool
) -> None:
    call = llama_bench.call(path, body)
    envelope = llama_bench.adapter.read_routing_info(call)
    assert (envelope.model, envelope.stream) == ("llama", stream)

    request = llama_bench.adapter.decode_request(call)
    assert (request.model, request.stream) == ("llama", stream)


def test_model_in_body_overrides_the_default_model(bench: Any) -> None:
    body = PROMPT | {"model": "other"}
    assert bench(model="llama").decode("/generate", body).model == "other"
    assert bench().refused("/generate", PROMPT) == (
        422,
        "Request contains not model or model null",
    )


NEITHER = (
    '{"Error": "`inputs` or `prompt` must be necessary and data type must be string. Additionally, '
    'the request body must be valid json", "error_type": "validation"}'
)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", b"{", NEITHER),
        ("/generate", {"inputs": None}, NEITHER),
        ("/", b"{", "Failed to parse context to json body"),
        ("/", INPUTS | {"stream": 1}, "Stream must be boolean type."),
        (
            "/generate_stream",
            {},
            "Request should contain 'inputs' and the type should be string.",
        ),
        ("/generate_stream", {"inputs": 5}, "The type of inputs is abnormal"),
        ("/generate_stream", {"inputs": []}, "Inputs arr is empty"),
        ("/generate_stream", {"inputs": ""}, "Inputs length must be in (0, 41943040], but got 0"),
        ("/generate", INPUTS | {"parameters": {"temperature": 0}}, TEMPERATURE),
        (
            "/generate",
            INPUTS | {"parameters": {"top_p": 1.0}},
            "Parameter top_p must be in (0.0,1.0], got 1.0.",
        ),
        (
            "/generate",
            INPUTS | {"parameters": {"top_k": 0}},
            "Parameter top_k must be in -1 || (0,2147483647], got 0",
        ),
        (
            "/generate",
            INPUTS | {"parameters": {"stop": 5}},
            "Input validation error: param stop must be string or list[string]",
        ),
        (
            "/generate",
            INPUTS | {"parameters": {"stop": "x" * 1025}},
            "Input validation error: length of `stop` must be in [1, 1024], but got 1025",
        ),
        (
            "/generate",
            INPUTS | {"parameters": {"truncate": 0}},
            "truncate must be in (0,2147483647], got 0.",
        ),
        (
            "/generate",
            INPUTS | {"parameters": {"adapter_id": "?"}},
            "The format of adapter_id is invalid.",
        ),
        (
            "/generate",
            INPUTS | {"parameters": {"adapter_id": 5}},
            "adapter_id must be string type.",
        ),
        (
            "/generate_stream",
            INPUTS | {"parameters": {"decoder_input_details": True}},
            "The decoder_input_details must not be true when stream is true.",
        ),
        ("/generate", {"prompt": 5}, "The type of prompt is abnormal"),
        ("/generate", {"prompt": []}, "Prompt arr is empty"),
        (
            "/generate",
            {"prompt": ""},
            (
                "Prompt must be necessary and data type must be string and length in "
                "(0, 41943040], but the length of inputs is 0"
            ),
        ),
        (
            "/generate",
            PROMPT | {"max_tokens": 0},
            "Parameter max_tokens must be (0,2147483647], got 0",
        ),
        (
            "/generate",
            PROMPT | {"n": 2},
            (
                "Best_of/N can not greater than 1 when temperature is 0 or not set, but best_of is "
                "None, n is 2."
            ),
        ),
        (
            "/generate",
            PROMPT | {"n": 3, "best_of": 2, "temperature": 1},
            "best_of should greater than or equal to n, but best_of is 2, n is 3.",
        ),
        ("/infer", INPUTS | {"input_id": [1]}, "Input conflict."),
        ("/infer", {}, "Not found inputs."),
        ("/infer", {"inputs": None}, "Inputs must not be null"),
        ("/infer", {"inputs": 5}, "The type of inputs is abnormal"),
        (
            "/infer",
            {"inputs": ""},
            (
                "Inputs must be necessary and data type must be string and length in "
                "(0, 41943040], but the length of inputs is 0"
            ),
        ),
        ("/infer", INPUTS | {"stream": "x"}, "stream must be boolean type."),
        (
            "/infer",
            INPUTS | {"parameters": {"top_p": 1.0}},
            "Parameter top_p must be in (0.0,1.0], got 1.0.",
        ),
        ("/infer_token", {"input_id": None}, "Input_id should not be empty"),
        ("/infer_token", {"input_id": 5}, "Parameter input_id must be an array"),
        ("/infer_token", {"input_id": ["x"]}, "Parameter input_id must be integer"),
        ("/infer_token", {"input_id": [1048577]}, "Data element in param input_id is invalid"),
        (
            "/infer_token",
            {"input_id": []},
            "Inputs token length must be in (0, 1048576], but got 0",
        ),
    ],
)
def test_invalid_body_returns_422(llama_bench: Any, path: str, body: Any, message: str) -> None:
    assert llama_bench.refused(path, body) == (422, message)


def test_tgi_style_parameters_are_decoded(llama_bench: Any) -> None:
    parameters = {
        "stop": ["x", "y"],
        "truncate": 3,
        "adapter_id": "lora/a",
        "return_full_text": False,
        "decoder_input_details": True,
    }
    request = llama_bench.decode("/generate", INPUTS | {"parameters": parameters})
    assert request.stopping.stop == ("x", "y")
    assert (request.stopping.truncate_prompt, request.stopping.max_tokens) == (3, 20)
    assert request.adapter == "lora/a"
    assert request.response_options.details
    assert {name: bytes(raw) for name, raw in request.extra.items()} == {
        "return_full_text": b"false"
    }

    names = llama_bench.adapter.field_names(llama_bench.call("/generate", INPUTS))
    assert names["adapter"] == "adapter_id"
    assert names["stopping.stop"] == "stop"


def test_vllm_style_parameters_are_decoded(llama_bench: Any) -> None:
    """They stand beside the prompt; without a maximum length, the model's default applies."""
    body = PROMPT | {
        "temperature": 0.5,
        "n": 2,
        "best_of": 3,
        "top_k": -1,
        "stop_token_ids": [7, 5, 7, -1],
        "include_stop_str_in_output": True,
    }
    request = llama_bench.decode("/generate", body)

    assert (request.n, request.best_of) == (3, None)
    assert request.sampling.top_k is None
    assert request.stopping.stop_token_ids == (5, 7)
    assert request.stopping.include_stop is True
    assert request.stopping.max_tokens is None
    assert llama_bench.decode("/generate", PROMPT | {"temperature": 0}).sampling.temperature == 0
    assert llama_bench.adapter.field_names(llama_bench.call("/generate", PROMPT))["n"] == "n"


# --- MindIE's own responses -----------------------------------------------------------------------


def test_native_stream_with_details(llama_bench: Any) -> None:
    encoder = llama_bench.encoder("/infer", INPUTS | DETAILS | {"stream": True})
    sent = llama_bench.stream(encoder, HELLO[0], 0.1, HELLO[1], Timing(decode=0.02), HELLO[2], *END)

    assert sent == (
        b'data: {"prefill_time":100,"decode_time":null,"token":{"id":[1],"text":"Hello"}}\n\n'
        b'data: {"prefill_time":null,"decode_time":20,"token":{"id":[2],"text":"!"}}\n\n'
        b'data: {"prefill_time":null,"decode_time":0,"generated_text":"Hello!",'
        b'"details":{"finish_reason":"eos_token","generated_tokens":2,"seed":7},'
        b'"token":{"id":[],"text":null}}\n\n'
    )
    assert encoder.headers()[0] == ("RequestUUID", "r1")
    assert encoder.encode_error_event(StreamBroken("cut")) == b"Failed to get engine response"


def test_native_stream_without_details(llama_bench: Any) -> None:
    encoder = llama_bench.encoder("/infer", INPUTS | {"stream": True})
    sent = llama_bench.stream(encoder, ReasoningDelta("hm "), TextDelta("x"), *END)
    assert sent.endswith(
        b'"generated_text":"hm x","details":null,"token":{"id":[],"text":null}}\n\n'
    )


def test_native_unary_response(llama_bench: Any) -> None:
    assert llama_bench.whole(llama_bench.encoder("/infer", INPUTS), *HELLO, *END).body == (
        b'{"generated_text":"Hello!"}'
    )

    reply = llama_bench.whole(
        llama_bench.encoder("/infer_token", {"input_id": [5]} | DETAILS), *HELLO, *END
    )
    assert reply.body == (
        b'{"generated_text":"Hello!","details":{"finish_reason":"eos_token","generated_tokens":2,'
        b'"generated_token_ids":[1,2],"seed":7}}'
    )


# --- responses like TGI's -------------------------------------------------------------------------


def test_tgi_style_stream_with_details(llama_bench: Any) -> None:
    encoder = llama_bench.encoder("/generate_stream", INPUTS | DETAILS)
    assert llama_bench.stream(encoder, *HELLO, *END) == (
        b'data: {"token":{"id":[1],"text":"Hello","logprob":null,"special":null},'
        b'"generated_text":null,"details":null}\n\n'
        b'data: {"token":{"id":[2],"text":"!","logprob":null,"special":null},'
        b'"generated_text":null,"details":null}\n\n'
        b'data: {"token":{"id":[],"text":"","logprob":null,"special":null},'
        b'"generated_text":"Hello!","details":{"prompt_tokens":2,"finish_reason":"eos_token",'
        b'"generated_tokens":2,"seed":7}}\n\n'
    )
    assert encoder.headers()[0] == ("RequestUUID", "r1")
    assert encoder.encode_error_event(StreamBroken("cut")) == b"Failed to get engine response"


def test_tgi_style_stream_without_details(llama_bench: Any) -> None:
    encoder = llama_bench.encoder("/", INPUTS | {"stream": True})
    sent = llama_bench.stream(encoder, TextDelta("x"), RefusalDelta("!"), *END)
    assert sent.endswith(b'"generated_text":"x!","details":null}\n\n')


def test_tgi_style_unary_response(llama_bench: Any) -> None:
    plain = b'{"generated_text":"Hello!"}'
    assert llama_bench.whole(llama_bench.encoder("/generate", INPUTS), *HELLO, *END).body == plain
    assert (
        llama_bench.whole(llama_bench.encoder("/", INPUTS), *HELLO, *END).body
        == b"[" + plain + b"]"
    )

    detailed = llama_bench.encoder("/generate", INPUTS | DETAILS)
    assert llama_bench.whole(detailed, *HELLO, *END).body == (
        b'{"details":{"prompt_tokens":2,"finish_reason":"eos_token","generated_tokens":2,'
        b'"prefill":[],"seed":7,"tokens":[{"id":1,"logprob":null,"special":null,"text":null},'
        b'{"id":2,"logprob":null,"special":null,"text":null}]},"generated_text":"Hello!"}'
    )

    uncounted = llama_bench.whole(
        llama_bench.encoder("/generate", INPUTS | DETAILS),
        TextDelta("x"),
        ChoiceEnd("eos"),
        StreamEnd(),
    )
    assert msgspec.json.decode(uncounted.body)["details"]["generated_tokens"] == 1


# --- responses like vLLM's ------------------------------------------------------------------------


def test_vllm_style_stream_is_nul_separated_json(llama_bench: Any) -> None:
    """JSON objects, each followed by a NUL byte, without an end mark."""
    encoder = llama_bench.encoder("/generate", PROMPT | {"stream": True})
    assert llama_bench.stream(encoder, *HELLO, *END) == b'{"text":["Hello"]}\0{"text":["!"]}\0'
    assert encoder.content_type == "text/event-stream"
    assert encoder.headers()[0] == ("RequestUUID", "r1")
    assert encoder.encode_error_event(StreamBroken("cut")) == b"Failed to get engine response"


def test_vllm_style_stream_of_two_choices(llama_bench: Any) -> None:
    encoder = llama_bench.encoder("/generate", PROMPT | {"stream": True, "n": 2, "temperature": 1})
    sent = llama_bench.stream(
        encoder,
        TextDelta("x", 0),
        TextDelta("y", 1),
        ChoiceEnd("eos", 0),
        ChoiceEnd("eos", 1),
        StreamEnd(),
    )

    assert sent == b'{"text":["x",""]}\0{"text":["","y"]}\0'


def test_vllm_style_unary_response_includes_the_prompt(llama_bench: Any) -> None:
    assert (
        llama_bench.whole(llama_bench.encoder("/generate", PROMPT), *HELLO, *END).body
        == b'{"text":["a bHello!"]}'
    )

    media = {"prompt": [{"text": "see "}, {"image_url": "u"}]}
    assert llama_bench.whole(llama_bench.encoder("/generate", media), *HELLO, *END).body == (
        b'{"text":["see Hello!"]}'
    )
