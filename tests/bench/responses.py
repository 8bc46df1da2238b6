"""The worker's responses in the styles of real servers, as templates that the worker fills in.

``vllm``, ``tgi`` and ``llama-cpp`` are OpenAI's API as these servers write it, and ``python`` is
that of a server with json.dumps. The part of a model's name before its last ``-`` selects the
style; any other model has the style ``mock``, whose chunks differ only in their text.

A request with ``"logprobs": true`` gets log probabilities. A request with tools and without a tool
result gets a tool call. Chunks of models whose name ends in ``-4`` have the field ``obfuscation``,
like OpenAI's own.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, Final

PLACEHOLDERS: Final = (
    *("token", "ascii token", "bare token", "text", "ascii text", "id", "created", "started"),
    *("model", "padding", "digits", "tokens", "prompt tokens", "total tokens", "duration"),
    *("date", "line end"),
)
"""What the worker fills in, in the order of ``enum placeholder`` in worker.c.

``token`` and ``text`` are random words and the mark by which clients recognise a token, ``bare
token`` is only the mark. ``created`` is the current second, ``started`` that of the response.
"""
_FIRST_CODE: Final = 14
"""Placeholders in templates are control characters from this code on."""

WORDS: Final = (
    *(" the", " quick", " brown", " fox", " jumps", " over", " lazy", " dog", ",", ".", " and"),
    *(" request", " token", " model", " answer", " which", " of", " to", " in", " is", " café"),
    *(' "so', '"', "\n", "\n\n", " naïve", " Straße", "日本", " 🙂", " (see", ")", " 3.14", "'s"),
)

_MOCK_ID: Final = "0123456789abcdef0123456789abcdef"
_LOGPROB: Final = {"token": " fox", "logprob": "#-0.<digits>", "bytes": [32, 102, 111, 120]}
_LOGPROBS: Final = {
    "content": [{**_LOGPROB, "top_logprobs": [_LOGPROB, {**_LOGPROB, "logprob": "#-3.<digits>"}]}]
}
_USAGE: Final = {
    "prompt_tokens": "#<prompt tokens>",
    "completion_tokens": "#<tokens>",
    "total_tokens": "#<total tokens>",
}
_TIMINGS: Final = {
    "prompt_n": "#<prompt tokens>",
    "prompt_ms": "#<duration>",
    "prompt_per_second": "#<duration>",
    "predicted_n": "#<tokens>",
    "predicted_ms": "#<duration>",
    "predicted_per_token_ms": "#0.<digits>",
    "predicted_per_second": "#<duration>",
}
_UVICORN: Final = "date: <date>\r\nserver: uvicorn\r\n"

Templates = Mapping[str, str]


def _write(value: object, *, spaces: bool = False) -> str:
    """Encode JSON; a string that starts with # is a number."""
    separators = (", ", ": ") if spaces else (",", ":")
    return re.sub(r'"#([^"]*)"', r"\1", json.dumps(value, separators=separators))


def _generate(text: str, token: str) -> Templates:
    """Build responses of Triton's vLLM backend."""
    before = '{"model_name":"<model>","model_version":"1","text_output":"'
    return {"generate.unary": f'{before}{text}"}}', "generate.token": f'{before}{token}"}}'}


def _answer_with_tool_call(unary: Mapping[str, Any], *, spaces: bool = False) -> str:
    """Return the same response with a tool call instead of the text."""
    response = deepcopy(dict(unary))
    [choice] = response["choices"]
    arguments = json.dumps({"city": "Paris<bare token>", "unit": "celsius"})
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call_<id>", "type": "function", "function": function}
    choice["message"] |= {"content": None, "tool_calls": [call]}
    choice["finish_reason"] = "tool_calls"
    return _write(response, spaces=spaces)


def _stream_tool_call(write_chunk: Callable[..., str]) -> Templates:
    """Build chunks of a tool call whose arguments arrive token by token.

    ``write_chunk`` takes the fields of a delta, and further fields of the choice.
    """

    def write(arguments: str, function: Mapping[str, str] = {}, **fields: Any) -> str:
        call = {"index": 0, "function": {**function, "arguments": arguments}}
        head = {"id": "call_<id>", "type": "function"} if function else {}
        return write_chunk({"tool_calls": [{**head, **call}]}, **fields)

    return {
        "chat.first+tools": write('{"city": "<bare token>', {"name": "get_weather"}),
        "chat.token+tools": write("<bare token>"),
        "chat.last+tools": write('"}', finish_reason="tool_calls"),
    }


def _mock() -> Templates:
    text = "brown fox" * 57 + "<bare token>"
    head = '"created":1763690000,"model":"<model>","choices":'
    tokens = '"usage":{"prompt_tokens":120,"completion_tokens":100,"total_tokens":220}'
    usage = f"[],{tokens}}}"
    templates = dict(_generate(text, "<bare token>"))
    for name, kind, identity in (
        ("chat", "chat.completion", f"chatcmpl-{_MOCK_ID}"),
        ("text", "text_completion", f"cmpl-{_MOCK_ID}"),
    ):
        chunk_kind = f"{kind}.chunk" if name == "chat" else kind
        chunk = f'{{"id":"{identity}","object":"{chunk_kind}",{head}'
        rest = ',"logprobs":null,"finish_reason":'
        if name == "chat":
            unary = f'"message":{{"role":"assistant","content":"{text}"}}'
            token = '"delta":{"content":"<bare token>"}'
            first = '"delta":{"role":"assistant","content":"<bare token>"}'
            last = '"delta":{}'
        else:
            unary = f'"text":"{text}"'
            token = first = '"text":"<bare token>"'
            last = '"text":""'
        templates |= {
            f"{name}.unary": f'{{"id":"{identity}","object":"{kind}",{head}'
            f'[{{"index":0,{unary}{rest}"stop"}}],{tokens}}}',
            f"{name}.first": f'{chunk}[{{"index":0,{first}{rest}null}}]}}',
            f"{name}.token": f'{chunk}[{{"index":0,{token}{rest}null}}]}}',
            f"{name}.last": f'{chunk}[{{"index":0,{last}{rest}"stop"}}]}}',
            f"{name}.usage": f"{chunk}{usage}",
        }
    return templates


def _vllm() -> Templates:
    def chunk(choices: list[Any], **fields: Any) -> str:
        head = {"id": "chatcmpl-<id>", "object": "chat.completion.chunk"}
        return _write(
            {**head, "created": "#<started>", "model": "<model>", "choices": choices} | fields
        )

    def choice(delta: Mapping[str, Any], **fields: Any) -> list[Any]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | fields]

    unary: dict[str, Any] = {
        "id": "chatcmpl-<id>",
        "object": "chat.completion",
        "created": "#<started>",
        "model": "<model>",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "<text>",
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [],
                    "reasoning_content": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {**_USAGE, "prompt_tokens_details": None},
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "kv_transfer_params": None,
    }
    token = {"content": "<token>"}
    return {
        "head": _UVICORN,
        "chat.unary": _write(unary),
        "chat.unary+logprobs": _with_logprobs(_write(unary)),
        "chat.unary+tools": _answer_with_tool_call(unary),
        **_stream_tool_call(lambda delta, **fields: chunk(choice(delta, **fields))),
        "chat.open": chunk(choice({"role": "assistant", "content": ""}), prompt_token_ids=None),
        "chat.token": chunk(choice(token, token_ids=None)),
        "chat.token+logprobs": chunk(choice(token, logprobs=_LOGPROBS, token_ids=None)),
        "chat.token+obfuscation": chunk(choice(token, token_ids=None), obfuscation="<padding>"),
        "chat.last": chunk(choice({"content": ""}, finish_reason="stop", stop_reason=None)),
        "chat.usage": chunk([], usage=_USAGE),
        **_generate("<text>", "<token>"),
    }


def _tgi() -> Templates:
    fingerprint = "3.3.4-sha-9f38d93"

    def chunk(choices: list[Any], **fields: Any) -> str:
        head = {"object": "chat.completion.chunk", "id": "", "created": "#<created>"}
        head |= {"model": "<model>", "system_fingerprint": fingerprint}
        return _write({**head, "choices": choices, "usage": None} | fields)

    def choice(text: str, **fields: Any) -> list[Any]:
        return choice_of({"content": text}, **fields)

    def choice_of(delta: Mapping[str, Any], **fields: Any) -> list[Any]:
        delta = {"role": "assistant", **delta}
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | fields]

    unary = {
        "object": "chat.completion",
        "id": "",
        "created": "#<created>",
        "model": "<model>",
        "system_fingerprint": fingerprint,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "<text>"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": _USAGE,
    }
    return {
        "head": "x-compute-type: 1-nvidia-a100\r\nx-total-time: <digits>\r\n"
        "x-generated-tokens: <tokens>\r\naccess-control-allow-origin: *\r\ndate: <date>\r\n",
        "chat.unary": _write(unary),
        "chat.unary+logprobs": _with_logprobs(_write(unary)),
        "chat.unary+tools": _answer_with_tool_call(unary),
        **_stream_tool_call(lambda delta, **fields: chunk(choice_of(delta, **fields))),
        "chat.token": chunk(choice("<token>")),
        "chat.token+logprobs": chunk(choice("<token>", logprobs=_LOGPROBS)),
        "chat.token+obfuscation": chunk(choice("<token>"), obfuscation="<padding>"),
        "chat.last": chunk(choice("", finish_reason="stop")),
        "chat.usage": chunk([], usage=_USAGE),
        **_generate("<text>", "<token>"),
    }


def _llama_cpp() -> Templates:
    fingerprint = "b6692-35266573"

    def chunk(choices: list[Any], **fields: Any) -> str:
        head = {"choices": choices, "created": "#<created>", "id": "chatcmpl-<id>"}
        head |= {"model": "<model>", "system_fingerprint": fingerprint}
        return _write({**head, "object": "chat.completion.chunk"} | fields)

    def choice(delta: Mapping[str, Any], **fields: Any) -> list[Any]:
        return [{"finish_reason": None, "index": 0, "delta": delta} | fields]

    unary = {
        "choices": [
            {
                "finish_reason": "stop",
                "index": 0,
                "message": {"role": "assistant", "content": "<text>"},
                "logprobs": None,
            }
        ],
        "created": "#<created>",
        "model": "<model>",
        "system_fingerprint": fingerprint,
        "object": "chat.completion",
        "usage": _USAGE,
        "id": "chatcmpl-<id>",
        "timings": _TIMINGS,
    }
    token: Mapping[str, str | None] = {"content": "<token>"}
    return {
        "head": "Server: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
        "Keep-Alive: timeout=5, max=100\r\n",
        "chat.unary": _write(unary),
        "chat.unary+logprobs": _with_logprobs(_write(unary)),
        "chat.unary+tools": _answer_with_tool_call(unary),
        **_stream_tool_call(lambda delta, **fields: chunk(choice(delta, **fields))),
        "chat.open": chunk(choice({"role": "assistant", "content": None})),
        "chat.token": chunk(choice(token)),
        "chat.token+logprobs": chunk(choice(token, logprobs=_LOGPROBS)),
        "chat.token+obfuscation": chunk(choice(token), obfuscation="<padding>"),
        "chat.last": chunk(choice({}, finish_reason="stop"), timings=_TIMINGS),
        "chat.usage": chunk([], usage=_USAGE, timings=_TIMINGS),
        **_generate("<text>", "<token>"),
    }


def _python() -> Templates:
    def build(
        choices: list[Any], kind: str = "chat.completion.chunk", **fields: Any
    ) -> dict[str, Any]:
        head = {"id": "chatcmpl-<id>", "object": kind, "created": "#<started>", "model": "<model>"}
        return {**head, "choices": choices} | fields

    def write(choices: list[Any], **fields: Any) -> str:
        return _write(build(choices, **fields), spaces=True)

    def choice(delta: Mapping[str, Any], **fields: Any) -> list[Any]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | fields]

    message = {"role": "assistant", "content": "<ascii text>"}
    response = build(
        [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "chat.completion",
        usage=_USAGE,
    )
    unary = _write(response, spaces=True)
    token = {"content": "<ascii token>"}
    return {
        "head": _UVICORN,
        "chat.unary": unary,
        "chat.unary+logprobs": _with_logprobs(unary),
        "chat.unary+tools": _answer_with_tool_call(response, spaces=True),
        **_stream_tool_call(lambda delta, **fields: write(choice(delta, **fields))),
        "chat.open": write(choice({"role": "assistant", "content": ""})),
        "chat.token": write(choice(token)),
        "chat.token+logprobs": write(choice(token, logprobs=_LOGPROBS)),
        "chat.token+obfuscation": write(choice(token), obfuscation="<padding>"),
        "chat.last": write(choice({}, finish_reason="stop")),
        "chat.usage": write([], usage=_USAGE),
        **_generate("<text>", "<token>"),
    }


def _with_logprobs(unary: str) -> str:
    """Build a unary response with the log probabilities of twenty tokens, in its own spacing."""
    spaces = '"logprobs": null' in unary
    some = _write({"content": _LOGPROBS["content"] * 20}, spaces=spaces)
    return re.sub(r'("logprobs": ?)null', lambda response: response[1] + some, unary, count=1)


STYLES: Final = ("vllm", "tgi", "llama-cpp", "python")
_ALL: Final[Mapping[str, Templates]] = {
    "mock": _mock(),
    "vllm": _vllm(),
    "tgi": _tgi(),
    "llama-cpp": _llama_cpp(),
    "python": _python(),
}


def encode() -> bytes:
    """Encode the worker's input: the words to write, and then a template per line."""
    return "".join(f"{line}\n" for line in _lines()).encode()


def _lines() -> Iterator[str]:
    for word in WORDS:
        raw, escaped = (json.dumps(word, ensure_ascii=ascii_)[1:-1] for ascii_ in (False, True))
        yield f"word\t{raw}\t{escaped}"
    for style, templates in _ALL.items():
        for name, template in templates.items():
            yield f"{style}\t{name}\t{_compile(template)}"


def _compile(template: str) -> str:
    text = template.replace("\r\n", "<line end>")
    for code, name in enumerate(PLACEHOLDERS, _FIRST_CODE):
        text = text.replace(f"<{name}>", chr(code))
    return text
