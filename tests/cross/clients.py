"""Each client protocol: how it builds a request, and how it reads the bytes of a response."""

import json
from itertools import chain
from typing import Any, Final

from tests.cross.client import Client, DecodedResponse
from tests.cross.script import PROMPT, TOOL, Json, RequestOptions
from tests.protocols import find_rows

_SEED: Final = 11

# --- OpenAI's response format ---------------------------------------------------------------------


def _build_common_fields(model: str, options: RequestOptions) -> dict[str, Any]:
    """Build the fields that all OpenAI-like protocols have."""
    fields: dict[str, Any] = {"model": model}
    if options.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if options.max_tokens is not None:
        fields["max_tokens"] = options.max_tokens
    if options.stops:
        fields["stop"] = list(options.stops)
    if options.n > 1:
        fields |= {"n": options.n, "temperature": 0.5}
    return fields


def _build_chat_body(model: str, options: RequestOptions) -> Json:
    fields = _build_common_fields(model, options) | {
        "messages": [{"role": "user", "content": PROMPT}]
    }
    if options.top_logprobs is not None:
        fields |= {"logprobs": True} | (
            {"top_logprobs": options.top_logprobs} if options.top_logprobs else {}
        )
    if options.tool:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        function = {"name": TOOL, "description": "looks up", "parameters": schema}
        fields |= {"tools": [{"type": "function", "function": function}], "tool_choice": "auto"}
    return fields


def _build_chat_body_without_stream_options(model: str, options: RequestOptions) -> Json:
    """Build a chat body for protocols without ``stream_options``."""
    return {
        name: value
        for name, value in _build_chat_body(model, options).items()
        if name != "stream_options"
    }


def _build_endpoint_chat_body(model: str, options: RequestOptions) -> Json:
    return {
        name: value
        for name, value in _build_chat_body_without_stream_options(model, options).items()
        if name != "model"
    }


def _build_completion_body(model: str, options: RequestOptions) -> Json:
    fields = _build_common_fields(model, options) | {"prompt": PROMPT}
    return fields if options.top_logprobs is None else fields | {"logprobs": options.top_logprobs}


def _build_endpoint_completion_body(model: str, options: RequestOptions) -> Json:
    body = _build_completion_body(model, options)
    return {name: one for name, one in body.items() if name not in ("model", "stream_options")}


def _read_choices(response: DecodedResponse, body: Any) -> None:
    for choice in body["choices"]:
        index = choice["index"]
        message = choice.get("message") or choice.get("delta") or choice
        response.add_text(index, message.get("content", message.get("text")))
        if choice.get("finish_reason"):
            response.reasons[index] = choice["finish_reason"]
        for at, call in enumerate(message.get("tool_calls") or ()):
            name, arguments = response.calls.setdefault(call.get("index", at), ["", ""])
            function = call["function"]
            new_call = [
                name + (function.get("name") or ""),
                arguments + function.get("arguments", ""),
            ]
            response.calls[call.get("index", at)] = new_call
        _read_logprobs(response, choice.get("logprobs") or {})
    if usage := body.get("usage"):
        response.usage = usage["prompt_tokens"], usage["completion_tokens"]


def _read_mindie_choices(response: DecodedResponse, body: Any) -> None:
    """Read MindIE's choices, each with a usage of its own in a stream."""
    before = response.usage[1] if response.usage and "usage" in body else 0
    _read_choices(response, body)
    if response.usage:
        response.usage = response.usage[0], response.usage[1] + before


def _read_logprobs(response: DecodedResponse, body: Json) -> None:
    response.logprobs += [(one["token"], one["logprob"]) for one in body.get("content") or ()]
    response.logprobs += zip(body.get("tokens", ()), body.get("token_logprobs", ()), strict=True)


def _get_error_message(body: Any) -> str:
    return str(body["error"]["message"])


def _get_error_text(body: Any) -> str:
    return str(body["error"])


_OPENAI: Final[dict[str, Any]] = {
    "read": _read_choices,
    "finish_reasons": {"eos": "stop", "stop": "stop", "length": "length",
                       "tool_calls": "tool_calls", "unknown": "stop"},
    "statuses": {"refused": 400, "limited": 429, "failed": 502, "busy": 503},
    "read_error": _get_error_message,
}  # fmt: skip

_DATABRICKS: Final[dict[str, Any]] = {
    **_OPENAI,
    "statuses": {"refused": 400, "limited": 429, "failed": 500, "busy": 503},
    "read_error": lambda body: str(body["message"]),
}
_OVMS: Final[dict[str, Any]] = {
    **_OPENAI,
    "finish_reasons": {**_OPENAI["finish_reasons"], "unknown": "unknown"},
    "statuses": {"refused": 400, "limited": 429, "failed": 400, "busy": 503},
    "read_error": _get_error_text,
}

# --- Triton and MindIE ----------------------------------------------------------------------------


def _build_generate_body(model: str, options: RequestOptions) -> Json:
    """Build a request for Triton's vLLM backend: parameters in one tensor, all outputs."""
    del model
    parameters: dict[str, Any] = {}
    if options.max_tokens is not None:
        parameters["max_tokens"] = options.max_tokens
    if options.stops:
        parameters["stop"] = list(options.stops)
    if options.n > 1:
        parameters |= {"n": options.n, "temperature": 0.5}
    if options.top_logprobs is not None:
        parameters["logprobs"] = options.top_logprobs
    fields = {"text_input": PROMPT, "stream": options.stream, "exclude_input_in_output": True}
    flags = ("finish_reason", "num_input_tokens", "num_output_tokens")
    fields |= {f"return_{name}": True for name in flags}
    if options.top_logprobs is not None:
        fields["return_logprobs"] = True
    return fields | ({"sampling_parameters": json.dumps(parameters)} if parameters else {})


def _read_generate_response(response: DecodedResponse, body: Any) -> None:
    for index, text in enumerate(_as_list(body["text_output"])):
        response.add_text(index, text)
    for index, reason in enumerate(_as_list(body["finish_reason"])):
        if response.reasons.get(index, "None") == "None":
            response.reasons[index] = reason
    token_count = sum(_as_list(body["num_output_tokens"])) + (
        response.usage[1] if response.usage else 0
    )
    response.usage = body.get("num_input_tokens"), token_count
    for column in _as_list(body.get("logprobs") or []):
        for likely in json.loads(column) or ():
            taken = next(iter(likely.values()))
            response.logprobs.append((taken["decoded_token"], taken["logprob"]))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _build_mindie_text_body(model: str, options: RequestOptions) -> Json:
    del model
    parameters: dict[str, Any] = {"details": True, "max_new_tokens": options.max_tokens or 20}
    return {"text_input": PROMPT, "parameters": parameters}


def _read_mindie_text(response: DecodedResponse, body: Any) -> None:
    response.add_text(0, body["text_output"])
    details = body["details"]
    response.usage = None, details["generated_tokens"]
    if "finish_reason" in details:
        response.reasons[0] = details["finish_reason"]


# --- Ollama and TGI -------------------------------------------------------------------------------


def _build_ollama_body(model: str, request_options: RequestOptions) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if request_options.max_tokens is not None:
        options["num_predict"] = request_options.max_tokens
    if request_options.stops:
        options["stop"] = list(request_options.stops)
    fields: dict[str, Any] = {"model": model, "options": options}
    if not request_options.stream:  # streaming is Ollama's default
        fields["stream"] = False
    if request_options.top_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": request_options.top_logprobs}
    return fields


def _build_ollama_chat_body(model: str, options: RequestOptions) -> Json:
    fields = _build_ollama_body(model, options) | {
        "messages": [{"role": "user", "content": PROMPT}]
    }
    if options.tool:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        function = {"name": TOOL, "description": "looks up", "parameters": schema}
        fields["tools"] = [{"type": "function", "function": function}]
    return fields


def _build_ollama_prompt_body(model: str, options: RequestOptions) -> Json:
    return _build_ollama_body(model, options) | {"prompt": PROMPT}


def _read_ollama_answer(response: DecodedResponse, body: Any) -> None:
    message = body.get("message") or {"content": body.get("response")}
    response.add_text(0, message["content"])
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.dumps(function["arguments"])
        response.calls[function["index"]] = [function["name"], arguments]
    response.logprobs += [(one["token"], one["logprob"]) for one in body.get("logprobs", ())]
    if body["done"]:
        response.reasons[0] = body["done_reason"]
        response.usage = body["prompt_eval_count"], body["eval_count"]


_OLLAMA: Final[dict[str, Any]] = {
    "read": _read_ollama_answer,
    "finish_reasons": {"eos": "stop", "stop": "stop", "length": "length", "tool_calls": "stop",
              "unknown": "stop"},
    "statuses": {"refused": 400, "limited": 429, "failed": 502, "busy": 503},
    "read_error": _get_error_text,
    "end": b"",
    "prefix": b"",
    "separator": b"\n",
    "content_type": "application/x-ndjson",
}  # fmt: skip


def _build_tgi_body(model: str, options: RequestOptions) -> Json:
    parameters: dict[str, Any] = {"details": True, "do_sample": True}
    if options.max_tokens is not None:
        parameters["max_new_tokens"] = options.max_tokens
    if options.stops:
        parameters["stop"] = list(options.stops)
    if options.top_logprobs:
        parameters["top_n_tokens"] = options.top_logprobs
    return {"model": model, "inputs": PROMPT, "parameters": parameters}


def _read_tgi_answer(response: DecodedResponse, body: Any) -> None:
    """Read an event with one token or a unary response; only streams have the prompt length."""
    details = body["details"]
    tokens = [body["token"]] if "token" in body else details["tokens"]
    response.add_text(0, body["token"]["text"] if "token" in body else body["generated_text"])
    pairs = [(one["text"], one["logprob"]) for one in tokens]
    response.logprobs += [pair for pair in pairs if pair[1] is not None]
    if details is not None:
        response.reasons[0] = details["finish_reason"]
        response.usage = details.get("input_length"), details["generated_tokens"]


# --- OpenAI's Responses API -----------------------------------------------------------------------


def _build_responses_body(model: str, options: RequestOptions) -> Json:
    fields: dict[str, Any] = {"model": model, "input": PROMPT, "stream": options.stream}
    if options.max_tokens is not None:
        fields["max_output_tokens"] = options.max_tokens
    if options.stops:  # an extension of vLLM
        fields["stop"] = list(options.stops)
    if options.top_logprobs is not None:
        fields |= {
            "include": ["message.output_text.logprobs"],
            "top_logprobs": options.top_logprobs,
        }
    if options.tool:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        tool = {"type": "function", "name": TOOL, "description": "looks up", "parameters": schema}
        fields |= {"tools": [tool], "tool_choice": "auto"}
    return fields


def _read_response(decoded: DecodedResponse, body: Any) -> None:
    """Read a response or an event: only the last event has usage, items and status."""
    kind = body.get("type", "")
    if kind == "response.output_text.delta":
        decoded.add_text(0, body["delta"])
    response = body.get("response", body)
    status = response.get("status")
    if status == "failed":
        decoded.error += response["error"]["message"]
    if status not in ("completed", "incomplete"):
        return
    details = response["incomplete_details"]
    decoded.reasons[0] = status if details is None else details["reason"]
    usage = response["usage"]
    decoded.usage = usage["input_tokens"], usage["output_tokens"]
    decoded.add_text(0, "")
    for index, item in enumerate(response["output"]):
        if item["type"] == "function_call":
            decoded.calls[index] = [item["name"], item["arguments"]]
        else:
            [part] = item["content"]
            decoded.logprobs += [(one["token"], one["logprob"]) for one in part["logprobs"]]
            if not kind:
                decoded.add_text(0, part["text"])
            assert decoded.texts == {0: part["text"]}


# --- Anthropic ------------------------------------------------------------------------------------


def _build_message_body(model: str, options: RequestOptions) -> Json:
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": options.max_tokens or 20,
    }
    if options.stream:
        fields["stream"] = True
    if options.stops:
        fields["stop_sequences"] = list(options.stops)
    if options.tool:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        fields["tools"] = [{"name": TOOL, "description": "looks up", "input_schema": schema}]
    return fields


def _read_message(response: DecodedResponse, body: Any) -> None:
    """Read a message or an event."""
    response.add_text(0, "")
    match body["type"]:
        case "message":
            for at, block in enumerate(body["content"]):
                response.add_text(0, block.get("text"))
                if block["type"] == "tool_use":
                    response.calls[at] = [block["name"], json.dumps(block["input"])]
            response.reasons[0] = body["stop_reason"]
        case "content_block_start" if body["content_block"]["type"] == "tool_use":
            response.calls[body["index"]] = [body["content_block"]["name"], ""]
        case "content_block_delta":
            response.add_text(0, body["delta"].get("text"))
            if "partial_json" in body["delta"]:
                response.calls[body["index"]][1] += body["delta"]["partial_json"]
        case "message_delta":
            response.reasons[0] = body["delta"]["stop_reason"]
        case _:
            pass
    if usage := body.get("usage") or body.get("message", {}).get("usage"):
        before = response.usage[0] if response.usage else None
        response.usage = usage.get("input_tokens", before), usage["output_tokens"]


CLIENTS: Final = (
    Client(
        name="openai chat",
        shows_fingerprint=True,
        kind="chat",
        path="/v1/chat/completions",
        fields=_build_chat_body,
        **_OPENAI,
    ),
    Client(
        name="openai completions",
        shows_fingerprint=True,
        kind="text",
        always_limited=True,
        path="/v1/completions",
        fields=_build_completion_body,
        can=frozenset({"stop", "n", "logprobs"}),
        can_stream=frozenset({"stop", "n", "logprobs"}),
        **_OPENAI,
    ),
    Client(
        name="openai responses",
        kind="chat",
        path="/v1/responses",
        fields=_build_responses_body,
        **{
            **_OPENAI,
            "read": _read_response,
            "finish_reasons": {"eos": "completed", "stop": "completed",
                               "length": "max_output_tokens", "tool_calls": "completed",
                               "unknown": "completed"},
        },
        can=frozenset({"stop", "logprobs", "tools"}),
        can_stream=frozenset({"stop", "logprobs", "tools"}),
        end=b"",
    ),
    Client(
        name="databricks",
        kind="chat",
        path="/serving-endpoints/MODEL/invocations",
        fields=_build_endpoint_chat_body,
        **_DATABRICKS,
    ),
    Client(
        name="databricks completions",
        kind="chat",  # the worker applies its chat template to prompts
        path="/serving-endpoints/MODEL/invocations",
        fields=_build_endpoint_completion_body,
        can=frozenset({"stop"}),
        can_stream=frozenset({"stop"}),
        **_DATABRICKS,
    ),
    Client(
        name="triton",
        kind="text",
        path="/v2/models/MODEL/generate",
        stream_path="/v2/models/MODEL/generate_stream",
        fields=_build_generate_body,
        read=_read_generate_response,
        finish_reasons={"eos": "stop", "stop": "stop", "length": "length", "unknown": "None"},
        statuses={"refused": 400, "limited": 429, "failed": 400, "busy": 503},
        read_error=_get_error_text,
        can=frozenset({"stop", "n", "logprobs"}),
        can_stream=frozenset({"stop", "n", "logprobs"}),
        end=b"",
    ),
    Client(
        name="mindie",
        kind="text",
        always_limited=True,
        path="/mindie/v2/models/MODEL/generate",
        stream_path="/mindie/v2/models/MODEL/generate_stream",
        fields=_build_mindie_text_body,
        read=_read_mindie_text,
        finish_reasons={"eos": "eos_token", "stop": "eos_token", "length": "length",
               "unknown": "invalid finishReason"},
        statuses={"refused": 422, "limited": 429, "failed": 500, "busy": 503},
        read_error=_get_error_text,
        can=frozenset(),
        can_stream=frozenset(),
        end=b"",
        prefix=b"data:",
    ),
    Client(
        name="mindie chat",
        kind="chat",
        path="/mindie/v1/chat/completions",
        fields=_build_chat_body_without_stream_options,
        **{
            **_OPENAI,
            "read": _read_mindie_choices,
            "statuses": {"refused": 422, "limited": 429, "failed": 500, "busy": 503},
            "read_error": _get_error_text,
        },
    ),
    Client(
        name="ovms",
        kind="chat",
        path="/v3/chat/completions",
        fields=_build_chat_body,
        keeps_stop_in_stream=True,
        can=frozenset({"stop", "logprobs", "tools"}),
        can_stream=frozenset({"stop", "tools"}),
        **_OVMS,
    ),
    Client(
        name="ovms completions",
        kind="text",
        lists_alternatives=False,
        path="/v3/completions",
        fields=_build_completion_body,
        keeps_stop_in_stream=True,
        can=frozenset({"stop", "logprobs"}),
        can_stream=frozenset({"stop"}),
        **_OVMS,
    ),
    Client(
        name="ollama",
        kind="chat",
        path="/api/chat",
        fields=_build_ollama_chat_body,
        can=frozenset({"stop", "logprobs", "tools"}),
        can_stream=frozenset({"stop", "logprobs", "tools"}),
        **_OLLAMA,
    ),
    Client(
        name="ollama generate",
        kind="chat",
        path="/api/generate",
        fields=_build_ollama_prompt_body,
        can=frozenset({"stop", "logprobs"}),
        can_stream=frozenset({"stop", "logprobs"}),
        **_OLLAMA,
    ),
    Client(
        name="tgi",
        kind="text",
        path="/tgi/generate",
        stream_path="/tgi/generate_stream",
        fields=_build_tgi_body,
        read=_read_tgi_answer,
        finish_reasons={"eos": "eos_token", "stop": "stop_sequence", "length": "length",
               "unknown": "eos_token"},
        statuses={"refused": 422, "limited": 429, "failed": 424, "busy": 503},
        read_error=_get_error_text,
        can=frozenset({"stop", "logprobs"}),
        can_stream=frozenset({"stop", "logprobs"}),
        keeps_stop_in_stream=True,
        keeps_stop_in_unary=True,
        always_logprobs=True,
        infers_length=True,
        end=b"",
        prefix=b"data:",
    ),
    Client(
        name="anthropic",
        kind="chat",
        always_limited=True,
        names_stop=True,
        path="/v1/messages",
        fields=_build_message_body,
        read=_read_message,
        finish_reasons={"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens",
               "tool_calls": "tool_use", "unknown": "end_turn"},
        statuses={"refused": 400, "limited": 429, "failed": 502, "busy": 529},
        read_error=_get_error_message,
        can=frozenset({"stop", "tools"}),
        can_stream=frozenset({"stop", "tools"}),
        end=b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ),
    *chain.from_iterable(find_rows("CROSS_CLIENTS").values()),
)  # fmt: skip
"""A new client protocol has its rows in ``tests.protocols``."""
