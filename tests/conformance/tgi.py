"""TGI: cases TG-01 to TG-30. Requests name a model, which TGI would ignore.

The cases about what a worker receives are in test_tgi.py.
"""

import re
from collections.abc import Mapping
from typing import Any

from tests.conformance.cases import EVENTS, Case, Response, expect, match

PIECES = ("Hello", " world", "!")
TEXT = "".join(PIECES)


def generate(number: str, parameters: Any, *, path: str = "/generate", **row: Any) -> Case:
    """Build a case of generate."""
    body = {"model": "mock", "inputs": "a b", "parameters": parameters}
    return Case(number, "POST", path, body=body, **row)


def stream(number: str, parameters: Any, **row: Any) -> Case:
    """Build a case of generate_stream."""
    return generate(number, parameters, path="/generate_stream", **row)


def post(number: str, path: str, body: Any, **row: Any) -> Case:
    """Build a case with another body."""
    return Case(number, "POST", path, body=body, **row)


def error(status: int, kind: str, text: Any = str) -> dict[str, Any]:
    """Expect this error."""
    return {"status": status, "body_is": {"error": text, "error_type": kind}}


def invalid(text: str) -> dict[str, Any]:
    """Expect an error of the server's validation."""
    return error(422, "validation", f"Input validation error: {text}")


def token(text: str, logprob: float | None = None) -> dict[str, Any]:
    """Expect a token."""
    return {"id": int, "text": text, "logprob": logprob, "special": False}


def event(index: int, text: str | None = None, details: Any = None) -> dict[str, Any]:
    """Expect an event of a stream; with details each token has a logprob."""
    logprob = -0.5 if details == "some" or isinstance(details, dict) else None
    shown = details if isinstance(details, dict) else None
    item = token(PIECES[index - 1], logprob)
    return {"index": index, "token": item, "generated_text": text, "details": shown}


def details(reason: str, tokens: int = 3, **fields: Any) -> dict[str, Any]:
    """Expect the details of a unary response."""
    items = [token(text, -0.5) for text in PIECES[:tokens]]
    head = {"finish_reason": reason, "generated_tokens": tokens, "seed": None}
    return {**head, "prefill": [], "tokens": items, **fields}


def check_framing(answer: Response) -> None:
    """Events have no blank after the colon, and there is no end mark."""
    blocks = answer.text.split("\n\n")
    expect(blocks.pop() == "", "no blank line at the end")
    expect(all(block.startswith('data:{"') for block in blocks), f"framing: {answer.text}")
    expect("[DONE]" not in answer.text, "there is an end mark")


def check_best_of(answer: Response) -> None:
    """The details have the other sequence."""
    [other] = answer.json["details"]["best_of_sequences"]
    expect({"generated_text", "prefill", "tokens"} <= other.keys(), f"sequence: {other}")


def check_midfail(answer: Response) -> None:
    """The stream has two events and an error."""
    *tokens, last = answer.chunks
    expect([one["token"]["text"] for one in tokens] == [*PIECES[:2]], f"events: {tokens}")
    match({"error": str, "error_type": "generation"}, last, "last")


PLAIN = [event(1), event(2), event(3, TEXT)]
DETAILED = [
    event(1, details="some"),
    event(2, details="some"),
    event(3, TEXT, {"finish_reason": "eos_token", "generated_tokens": 3, "seed": None,
                    "input_length": 2}),
]  # fmt: skip
INFO = {
    "model_id": "mock", "model_sha": None, "model_pipeline_tag": "text-generation",
    "max_concurrent_requests": None, "max_best_of": 2, "max_stop_sequences": 4,
    "max_input_tokens": None, "max_total_tokens": None, "validation_workers": 1,
    "max_client_batch_size": 1, "router": "gateway", "version": "3.3.6", "sha": None,
    "docker_label": None,
}  # fmt: skip
SAMPLED = {"best_of": 2, "do_sample": True}
SCHEMA = {"type": "json_object", "value": {"type": "object", "properties": {}}}


def chat(number: str, body: Mapping[str, Any]) -> Case:
    """Build a case of chat, on a listener with a model."""
    messages = [{"role": "user", "content": "hi"}]
    choice = {"message": {"content": TEXT}, "finish_reason": "stop"}
    return Case(number, "POST", "/v1/chat/completions", body={"messages": messages, **body},
                body_has={"object": "chat.completion", "choices": [choice]},
                needs={"model": "mock"})  # fmt: skip


NULLS: dict[str, Any] = dict.fromkeys(
    ("best_of", "repetition_penalty", "frequency_penalty", "return_full_text", "seed",
     "temperature", "top_k", "top_p", "truncate", "typical_p", "top_n_tokens", "grammar",
     "do_sample", "watermark", "details", "decoder_input_details")
)  # fmt: skip

CASES = (
    generate("TG-01", {}, body_is={"generated_text": TEXT}),
    generate("TG-02", {}, path="/", body_is=[{"generated_text": TEXT}]),
    generate("TG-03", {"details": True},
             body_is={"generated_text": TEXT, "details": details("eos_token")}),
    generate("TG-04", {"max_new_tokens": 2, "details": True},
             body_is={"generated_text": "Hello world", "details": details("length", 2)}),
    generate("TG-05", {"max_new_tokens": 3, "details": True},
             body_is={"generated_text": TEXT, "details": details("length")}),
    generate("TG-06", {"stop": [" world"], "details": True},
             body_is={"generated_text": "Hello world", "details": details("stop_sequence", 2)}),
    stream("TG-07", {}, events=PLAIN, check=check_framing),
    stream("TG-08", {"details": True}, events=DETAILED, check=check_framing),
    post("TG-09", "/", {"model": "mock", "inputs": "a b", "stream": True}, events=PLAIN,
         check=check_framing),
    post("TG-10", "/generate", {"model": "mock", "inputs": "a b", "stream": True},
         body_is={"generated_text": TEXT}),
    generate("TG-11", {"temperature": 0}, **invalid("`temperature` must be strictly positive")),
    generate("TG-12 full", {"top_p": 1.0}, **invalid("`top_p` must be > 0.0 and < 1.0")),
    generate("TG-12 part", {"top_p": 0.99}),
    generate("TG-13 top_k", {"top_k": 0}, **invalid("`top_k` must be strictly positive")),
    generate("TG-13 max", {"max_new_tokens": 0},
             **invalid("`max_new_tokens` must be strictly positive")),
    generate("TG-13 penalty", {"repetition_penalty": 0},
             **invalid("`repetition_penalty` must be strictly positive")),
    generate("TG-14 high", {"frequency_penalty": 2.1},
             **invalid("`frequency_penalty` must be >= -2.0 and <= 2.0")),
    generate("TG-14 low", {"frequency_penalty": -2}),
    generate("TG-15", {"stop": [*"abcde"]},
             **invalid("`stop` supports up to 4 stop sequences. Given: 5")),
    generate("TG-16", {**SAMPLED, "seed": 1},
             **invalid("`seed` must not be set when `best_of` > 1")),
    generate("TG-17 greedy", {"best_of": 2}, **error(422, "validation")),
    generate("TG-17 many", {**SAMPLED, "best_of": 3},
             **invalid("`best_of` must be > 0 and <= 2. Given: 3")),
    generate("TG-18", {**SAMPLED, "details": True}, check=check_best_of),
    stream("TG-19 best_of", SAMPLED, **error(422, "validation")),
    stream("TG-19 prefill", {"decoder_input_details": True}, **error(422, "validation")),
    post("TG-20 empty", "/generate", {"model": "mock", "inputs": ""},
         **invalid("`inputs` cannot be empty")),
    post("TG-20 missing", "/generate", {"model": "mock"}, **error(422, "validation")),
    post("TG-20 broken", "/generate", b"{", **error(400, "validation")),
    generate("TG-22", {"return_full_text": True}, body_is={"generated_text": "a b" + TEXT}),
    stream("TG-22 stream", {"return_full_text": True},
           events=[event(1), event(2), event(3, "a b" + TEXT)]),
    generate("TG-23", {**NULLS, "max_new_tokens": 20, "stop": []},
             body_is={"generated_text": TEXT}),
    post("TG-24", "/generate_stream", {"model": "mock-midfail", "inputs": "a"},
         content_type=EVENTS, check=check_midfail),
    post("TG-25 limit", "/generate", {"model": "mock-429", "inputs": "a"},
         **error(429, "overloaded", "Model is overloaded"), answer_headers={"Retry-After": "2"}),
    post("TG-25 down", "/generate", {"model": "mock-down", "inputs": "a"},
         **error(503, "overloaded", "Model is overloaded"),
         answer_headers={"Retry-After": re.compile("[1-9][0-9]*")}),
    post("TG-26", "/generate", {"model": "mock-500", "inputs": "a"},
         **error(424, "generation", re.compile("Request failed during generation: .+"))),
    Case("TG-27 info", "GET", "/info", body_is=INFO, needs={"model": "mock"}),
    Case("TG-27 health", "GET", "/health", headers={"authorization": None}, body_is=b""),
    Case("TG-27 ping", "GET", "/ping", headers={"authorization": None}, body_is=b""),
    post("TG-28", "/tokenize", {"model": "mock", "inputs": "hé du"},
         body_is=[{"id": 0, "text": "hé", "start": 0, "stop": 3},
                  {"id": 1, "text": " du", "start": 3, "stop": 6}]),
    chat("TG-29 dummy", {"model": "dummy"}),
    chat("TG-29 tgi", {"model": "tgi"}),
    chat("TG-29 format", {"response_format": SCHEMA}),
    generate("TG-30 schema", {"grammar": {"type": "json", "value": {"type": "object"}}},
             **error(422, "validation", re.compile(".*properties.*"))),
)  # fmt: skip
"""TG-21, and what the worker gets in TG-29 and TG-30, are in test_tgi.py."""
