"""Ollama: cases OL-01 to OL-40.

The cases about what a worker receives are in test_ollama.py.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tests.conformance.cases import Case, Response, expect, match

PIECES = ("Hello", " world", "!")
NDJSON = "application/x-ndjson"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def chat(number: str, body: Mapping[str, Any], **row: Any) -> Case:
    """Build a case of chat; ``body`` adds to or replaces a user message and a model."""
    default = {"model": "mock", "messages": [{"role": "user", "content": "say hi"}]}
    return Case(number, "POST", "/api/chat", body={**default, **body}, **row)


def generate(number: str, body: Mapping[str, Any], **row: Any) -> Case:
    """Build a case of generate."""
    default = {"model": "mock", "prompt": "a b"}
    return Case(number, "POST", "/api/generate", body={**default, **body}, **row)


def post(number: str, path: str, body: Any, **row: Any) -> Case:
    """Build a case of another path."""
    return Case(number, "POST", path, body=body, **row)


def error(status: int, text: Any) -> dict[str, Any]:
    """Expect this error."""
    return {"status": status, "body_is": {"error": text}}


def answer(text: str = "".join(PIECES), **fields: Any) -> dict[str, Any]:
    """Expect a unary chat response."""
    message = {"role": "assistant", "content": text}
    return {"body_has": {"message": message, "done": True, "done_reason": "stop", **fields}}


def read_lines(answer: Response) -> list[Any]:
    """Return the lines of a stream. Raises Mismatch."""
    expect(answer.body.endswith(b"\n"), "the last line has no end")
    lines = answer.body[:-1].split(b"\n")
    expect(all(lines), f"a line is empty: {answer.text}")
    expect(answer.body.isascii(), "a line is not ASCII")
    return [msgspec.json.decode(line) for line in lines]


def check_durations(body: Any) -> None:
    """All four durations are integers, and the parts do not exceed the total."""
    total, *parts = [body[name] for name in DURATIONS]
    expect(all(type(one) is int and one > 0 for one in (total, *parts)), f"durations: {body}")
    expect(sum(parts) <= total, f"the parts are more than the whole: {body}")


def check_chat_stream(answer: Response) -> None:
    """The stream has a line for each piece, and a last one."""
    *pieces, last = read_lines(answer)
    for line, text in zip(pieces, PIECES, strict=True):
        message = {"role": "assistant", "content": text}
        match({"model": "mock", "created_at": TIME, "message": message, "done": False}, line, "")
    message = {"role": "assistant", "content": ""}
    match({"message": message, "done": True, "done_reason": "stop"}, last, "last", exact=False)
    match({"prompt_eval_count": 2, "eval_count": 3}, last, "last", exact=False)
    check_durations(last)


def check_unary_durations(answer: Response) -> None:
    """A unary response has the durations of a stream's end."""
    check_durations(answer.json)
    match(TIME, answer.json["created_at"], "created_at")


def check_stopped(answer: Response) -> None:
    """The text contains nothing of the stop string."""
    text = "".join(line["message"]["content"] for line in read_lines(answer))
    expect(text == "Hel", f"the text is {text!r}")


def check_tool_call(answer: Response) -> None:
    """One line has the entire call."""
    call, last = read_lines(answer)
    function = {"index": 0, "name": "f", "arguments": {"x": 1}}
    calls = [{"id": re.compile("call_.+"), "function": function}]
    wanted = {"role": "assistant", "content": "", "tool_calls": calls}
    match({"message": wanted, "done": False}, call, "call", exact=False)
    match({"done": True, "done_reason": "stop"}, last, "last", exact=False)


def check_thinking(answer: Response) -> None:
    """Thinking precedes the text."""
    first, *rest = read_lines(answer)
    wanted = {"role": "assistant", "content": "", "thinking": "hmm"}
    match({"message": wanted, "done": False}, first, "first", exact=False)
    expect([line["message"]["content"] for line in rest] == [*PIECES, ""], f"lines: {rest}")
    expect(all("thinking" not in line["message"] for line in rest), f"lines: {rest}")


def check_logprobs(answer: Response) -> None:
    """Each token has a logprob."""
    logprobs = answer.json["logprobs"]
    expect([one["token"] for one in logprobs] == [*PIECES], f"tokens: {logprobs}")
    expect(all(one["logprob"] == -0.5 for one in logprobs), f"logprobs: {logprobs}")
    expect(all(len(one["top_logprobs"]) == 2 for one in logprobs), f"top: {logprobs}")


def check_loading(answer: Response) -> None:
    """The response has no metrics, since no worker was involved."""
    expect(answer.json.keys().isdisjoint(DURATIONS), f"metrics: {answer.json}")


def check_generate_stream(answer: Response) -> None:
    """The stream has a line for each piece, and a last one."""
    *pieces, last = read_lines(answer)
    expect([line["response"] for line in pieces] == [*PIECES], f"lines: {pieces}")
    match({"response": "", "done": True, "done_reason": "stop"}, last, "last", exact=False)


def check_no_context(answer: Response) -> None:
    """The deprecated ``context`` is absent."""
    expect("context" not in answer.json, f"context: {answer.json}")


def check_midfail(answer: Response) -> None:
    """The stream has two lines and an error."""
    *pieces, last = read_lines(answer)
    expect([line["message"]["content"] for line in pieces] == [*PIECES[:2]], f"lines: {pieces}")
    match({"error": str}, last, "last")


def check_unicode(answer: Response) -> None:
    """All characters arrive, escaped to ASCII."""
    text = "".join(line["message"]["content"] for line in read_lines(answer))
    expect(text == "a\u2028\u0085bé", f"the text is {text!r}")


def check_vectors(*wanted: float) -> Any:
    """The response has one vector."""

    def check(answer: Response) -> None:
        [vector] = answer.json["embeddings"]
        near = [math.isclose(*pair, abs_tol=1e-4) for pair in zip(vector, wanted, strict=True)]
        expect(all(near), f"vector: {vector}")

    return check


def check_listing(answer: Response) -> None:
    """The model's name has a tag."""
    names = [one["name"] for one in answer.json["models"]]
    expect("mock:latest" in names, f"names: {names}")
    expect(all(one["model"] == one["name"] for one in answer.json["models"]), f"{answer.json}")


UNARY = {"stream": False}
CASES = (
    chat("OL-01", UNARY, **answer(prompt_eval_count=2, eval_count=3), check=check_unary_durations),
    chat("OL-02", {}, content_type=NDJSON, check=check_chat_stream),
    chat("OL-03", {"stream": True}, content_type=NDJSON, check=check_chat_stream),
    chat("OL-04 tag", {**UNARY, "model": "mock:latest"}, **answer(model="mock:latest")),
    chat("OL-04 case", {**UNARY, "model": "MOCK"}, **answer(model="MOCK")),
    chat("OL-04 both", {**UNARY, "model": "Mock:Latest"}, **answer(model="Mock:Latest")),
    chat("OL-05", {**UNARY, "options": {"num_predict": 2}},
         **answer("Hello world", done_reason="length", eval_count=2)),
    chat("OL-06 -1", {**UNARY, "options": {"num_predict": -1}}, **answer()),
    chat("OL-06 null", {**UNARY, "options": {"num_predict": None}}, **answer()),
    chat("OL-06 none", {**UNARY, "options": {}}, **answer()),
    chat("OL-07", {**UNARY, "options": {"stop": [" world"]}}, **answer("Hello")),
    chat("OL-08", {"options": {"stop": ["lo wor"]}}, content_type=NDJSON, check=check_stopped),
    chat("OL-09", {"options": {"temperature": "hot"}},
         **error(400, 'option "temperature" must be of type float32')),
    chat("OL-10", {**UNARY, "options": {"foo": 1, "mirostat": 2}}, **answer()),
    chat("OL-11", {**UNARY, "tools": [], "format": "", "think": None}, **answer()),
    chat("OL-12", {"messages": [{"role": "user", "content": "use the tool"}], "tools": [TOOL]},
         content_type=NDJSON, check=check_tool_call),
    chat("OL-13", {**UNARY, "messages": [{"role": "user", "content": "use the tool"}],
                   "tools": [TOOL]},
         body_has={"message": {"content": "", "tool_calls": [
             {"id": str, "function": {"index": 0, "name": "f", "arguments": {"x": 1}}}]},
             "done": True, "done_reason": "stop"}),
    chat("OL-18", {"format": "xml"}, **error(400, re.compile('invalid format: "xml"; expected.*'))),
    chat("OL-19", {"model": "mock-think", "think": True}, content_type=NDJSON,
         check=check_thinking),
    chat("OL-20", {"think": True}, **error(400, '"mock" does not support thinking')),
    chat("OL-21", {"think": "huge"}, **error(400, re.compile(".*high.*medium.*low.*max.*"))),
    chat("OL-22", {**UNARY, "logprobs": True, "top_logprobs": 2}, **answer(),
         check=check_logprobs),
    chat("OL-23", {"top_logprobs": 21}, **error(400, "top_logprobs must be between 0 and 20")),
    chat("OL-24", {"messages": []}, **answer("", done_reason="load"), check=check_loading),
    chat("OL-25", {"messages": [], "keep_alive": 0}, **answer("", done_reason="unload")),
    chat("OL-26", {"keep_alive": True}, **error(400, "Unsupported type: 'bool'")),
    post("OL-27", "/api/chat", {"messages": []}, **error(400, "model is required")),
    chat("OL-28", {"model": "nope"}, **error(404, "model 'nope' not found")),
    generate("OL-29", UNARY, body_has={"response": "Hello world!", "done": True,
                                       "prompt_eval_count": 2}, check=check_no_context),
    generate("OL-30", {"model": ""}, **error(404, "model '' not found")),
    generate("OL-31", {"raw": True, "system": "s"},
             **error(400, "raw mode does not support template, system, or context")),
    generate("OL-32", {}, content_type=NDJSON, check=check_generate_stream),
    generate("OL-33", {"suffix": "z"}, **error(400, "mock does not support insert")),
    post("OL-34 empty", "/api/chat", b"", **error(400, "missing request body")),
    post("OL-34 broken", "/api/chat", b"{", **error(400, str)),
    chat("OL-35", {"model": "mock-midfail"}, content_type=NDJSON, check=check_midfail),
    chat("OL-36", {"model": "mock-down"}, **error(503, str),
         answer_headers={"Retry-After": re.compile("[1-9][0-9]*")}),
    chat("OL-37", {"model": "mock-uni"}, content_type=NDJSON, check=check_unicode),
    post("OL-38", "/api/embed", {"model": "mock-emb", "input": ["a b"]},
         body_has={"model": "mock-emb", "prompt_eval_count": 2},
         check=check_vectors(0.82223, 0.54815, 0.13704, -0.06852)),
    post("OL-38 dimensions", "/api/embed",
         {"model": "mock-emb", "input": "a b", "dimensions": 2},
         check=check_vectors(0.83205, 0.5547)),
    post("OL-39 empty", "/api/embed", {"model": "mock-emb", "input": ""},
         body_is={"model": "mock-emb", "embeddings": []}),
    post("OL-39 type", "/api/embed", {"model": "mock-emb", "input": 5},
         **error(400, "invalid input type")),
    post("OL-39 old", "/api/embeddings", {"model": "mock-emb", "prompt": "a b"},
         body_is={"embedding": [3, 2, 0.5, -0.25]}),
    Case("OL-40 tags", "GET", "/api/tags", check=check_listing),
    Case("OL-40 ps", "GET", "/api/ps", check=check_listing),
    Case("OL-40 version", "GET", "/api/version", headers={"authorization": None},
         body_is={"version": re.compile(r"\d+\.\d+\.\d+")}),
    Case("OL-40 root", "GET", "/", headers={"authorization": None}, content_type="text/plain",
         body_is=b"Ollama is running"),
    Case("OL-40 head", "HEAD", "/", headers={"authorization": None}, content_type="text/plain",
         body_is=b""),
    post("OL-40 show", "/api/show", {"model": "mock"},
         body_has={"model_info": {"general.basename": "mock"}, "details": dict,
                   "capabilities": ["completion", "tools"]}),
)  # fmt: skip
"""OL-14 to OL-17 are in test_ollama.py."""
