"""How each client protocol asks, and how its answers are read: by their bytes alone."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import httpx
from msgspec import Struct, field
from msgspec.structs import replace

from tests.cross.script import PROMPT, TOOL, Json, RequestOptions
from tests.cross.workers.table import WAYS, Losses, Worker

Kind = Literal["chat", "text"]
_JSON: Final = {"Content-Type": "application/json"}
_SEED: Final = 11


class DecodedResponse(Struct):
    """What a client makes of an answer. ``usage``: prompt tokens where told, completion tokens."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: tuple[int | None, int] | None = None
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    """The name and the arguments of each call."""
    error: str = ""
    """What an error in a stream says."""
    done: bool = False
    """The protocol's own end has come, where it has one."""

    def more(self, index: int, text: str | None) -> None:
        """A piece of a choice."""
        self.texts[index] = self.texts.get(index, "") + (text or "")


class Client(Struct, frozen=True, kw_only=True):
    """One way to ask. ``path`` has the model's name where MODEL stands."""

    name: str
    kind: Kind
    path: str
    stream_path: str = ""
    fields: Callable[[str, RequestOptions], Json]
    read: Callable[[DecodedResponse, Any], None]
    """Adds an answer, or an event, to what was heard."""
    words: Mapping[str, str]
    """Of each finish reason."""
    statuses: Mapping[str, int]
    """Of what a worker did not answer, by play."""
    read_error: Callable[[Any], str]
    """The text of a refusal's body."""
    can: frozenset[str] = frozenset({"stop", "n", "logprobs", "tools"})
    can_stream: frozenset[str] = can
    keeps_streamed: bool = False
    """By its contract a stop string stays in the text of a stream."""
    keeps_whole: bool = False
    """The same of an answer in one piece."""
    always_logprobs: bool = False
    """Its details hold each token's probability, so that it asks for them always."""
    counts: bool = False
    """By its contract an answer of so many tokens as it may have has reached its limit."""
    limits: bool = False
    """It always says how long an answer may be, or its protocol does."""
    end: bytes = b"data: [DONE]\n\n"
    """The last thing in a stream that came to its end."""
    prefix: bytes = b"data: "
    separator: bytes = b"\n\n"
    content_type: str = "text/event-stream"
    """Of a stream."""
    names_stop: bool = False
    """Its answers say which stop string ended them."""

    def way(self, options: RequestOptions) -> str:
        """As the workers' rows name it."""
        return f"{self.kind} stream" if options.stream else self.kind

    def sees(self, row: Worker) -> Worker:
        """The row of a worker, as it shows to this client."""
        if self.always_logprobs and row.has_completions:
            return replace(row, stop={}, silent=(), keeps=WAYS)
        return row

    def list_expected_losses(
        self, row: Worker, *, stream: bool, limited: bool | None = None
    ) -> Losses:
        """What is lost of each of its questions to this worker."""
        way = self.way(RequestOptions(stream=stream))
        lost = row.logprobs.get(way) if self.always_logprobs else None
        losses = row.list_expected_losses(
            self.kind, limited=self.limits if limited is None else limited
        )
        return losses | row.loss("logprobs.top", lost)

    def build_request(self, model: str, options: RequestOptions) -> httpx.Request:
        """The request, without a host."""
        path = (options.stream and self.stream_path) or self.path
        body = json.dumps(self.fields(model, options), ensure_ascii=False).encode()
        url = f"http://localhost{path.replace('MODEL', model)}"
        return httpx.Request("POST", url, content=body, headers=_JSON)

    def read_response(self, answer: httpx.Response, options: RequestOptions) -> DecodedResponse:
        """What the answer says."""
        response = DecodedResponse()
        if not options.stream:
            self.read(response, answer.json())
            response.done = True
            return response
        assert answer.headers["content-type"].startswith(self.content_type)
        body = answer.content
        response.done = body.endswith(self.end)
        for block in body.removesuffix(self.end if self.end in body else b"").split(self.separator):
            part = block.partition(b"\n")[2] if block.startswith(b"event: ") else block
            if not part:
                continue
            if not part.startswith(self.prefix):
                response.error += part.decode()
                continue
            got = json.loads(part.removeprefix(self.prefix))
            if "error" in got:
                response.error += str(got["error"])
            else:
                self.read(response, got)
        return response


# --- in OpenAI's manner ---------------------------------------------------------------------------


def _build_common_fields(model: str, options: RequestOptions) -> dict[str, Any]:
    """The fields that all of these have."""
    fields: dict[str, Any] = {"model": model}
    if options.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if options.most is not None:
        fields["max_tokens"] = options.most
    if options.stops:
        fields["stop"] = list(options.stops)
    if options.n > 1:
        fields |= {"n": options.n, "temperature": 0.5}
    return fields


def _build_chat_body(model: str, options: RequestOptions) -> Json:
    fields = _build_common_fields(model, options) | {
        "messages": [{"role": "user", "content": PROMPT}]
    }
    if options.top is not None:
        fields |= {"logprobs": True} | ({"top_logprobs": options.top} if options.top else {})
    if options.tool:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        function = {"name": TOOL, "description": "looks up", "parameters": schema}
        fields |= {"tools": [{"type": "function", "function": function}], "tool_choice": "auto"}
    return fields


def _build_chat_body_without_stream_options(model: str, options: RequestOptions) -> Json:
    """Without what this protocol does not name."""
    return {
        name: got
        for name, got in _build_chat_body(model, options).items()
        if name != "stream_options"
    }


def _build_endpoint_chat_body(model: str, options: RequestOptions) -> Json:
    return {
        name: got
        for name, got in _build_chat_body_without_stream_options(model, options).items()
        if name != "model"
    }


def _build_completion_body(model: str, options: RequestOptions) -> Json:
    fields = _build_common_fields(model, options) | {"prompt": PROMPT}
    return fields if options.top is None else fields | {"logprobs": options.top}


def _build_endpoint_completion_body(model: str, options: RequestOptions) -> Json:
    got = _build_completion_body(model, options)
    return {name: one for name, one in got.items() if name not in ("model", "stream_options")}


def _read_choices(response: DecodedResponse, got: Any) -> None:
    for choice in got["choices"]:
        index = choice["index"]
        message = choice.get("message") or choice.get("delta") or choice
        response.more(index, message.get("content", message.get("text")))
        if choice.get("finish_reason"):
            response.reasons[index] = choice["finish_reason"]
        for at, call in enumerate(message.get("tool_calls") or ()):
            name, arguments = response.calls.setdefault(call.get("index", at), ["", ""])
            function = call["function"]
            more = [name + (function.get("name") or ""), arguments + function.get("arguments", "")]
            response.calls[call.get("index", at)] = more
        _read_logprobs(response, choice.get("logprobs") or {})
    if usage := got.get("usage"):
        response.usage = usage["prompt_tokens"], usage["completion_tokens"]


def _read_mindie_choices(response: DecodedResponse, got: Any) -> None:
    """In a stream each choice tells its own usage."""
    before = response.usage[1] if response.usage and "usage" in got else 0
    _read_choices(response, got)
    if response.usage:
        response.usage = response.usage[0], response.usage[1] + before


def _read_logprobs(response: DecodedResponse, got: Json) -> None:
    response.logprobs += [(one["token"], one["logprob"]) for one in got.get("content") or ()]
    response.logprobs += zip(got.get("tokens", ()), got.get("token_logprobs", ()), strict=True)


def _get_error_message(got: Any) -> str:
    return str(got["error"]["message"])


def _get_error_text(got: Any) -> str:
    return str(got["error"])


_OPENAI: Final[dict[str, Any]] = {
    "read": _read_choices,
    "words": {"eos": "stop", "stop": "stop", "length": "length", "tool_calls": "tool_calls",
              "unknown": "stop"},
    "statuses": {"refused": 400, "limited": 429, "failed": 502, "busy": 503},
    "read_error": _get_error_message,
}  # fmt: skip

_DATABRICKS: Final[dict[str, Any]] = {
    **_OPENAI,
    "statuses": {"refused": 400, "limited": 429, "failed": 500, "busy": 503},
    "read_error": lambda got: str(got["message"]),
}
_OVMS: Final[dict[str, Any]] = {
    **_OPENAI,
    "words": {**_OPENAI["words"], "unknown": "unknown"},
    "statuses": {"refused": 400, "limited": 429, "failed": 400, "busy": 503},
    "read_error": _get_error_text,
}

# --- Triton and MindIE ----------------------------------------------------------------------------


def _build_generate_body(model: str, options: RequestOptions) -> Json:
    """For a model of vLLM's: all parameters in one tensor, and everything that it can tell."""
    del model
    parameters: dict[str, Any] = {}
    if options.most is not None:
        parameters["max_tokens"] = options.most
    if options.stops:
        parameters["stop"] = list(options.stops)
    if options.n > 1:
        parameters |= {"n": options.n, "temperature": 0.5}
    if options.top is not None:
        parameters["logprobs"] = options.top
    fields = {"text_input": PROMPT, "stream": options.stream, "exclude_input_in_output": True}
    flags = ("finish_reason", "num_input_tokens", "num_output_tokens")
    fields |= {f"return_{name}": True for name in flags}
    if options.top is not None:
        fields["return_logprobs"] = True
    return fields | ({"sampling_parameters": json.dumps(parameters)} if parameters else {})


def _read_generate_response(response: DecodedResponse, got: Any) -> None:
    for index, text in enumerate(_as_list(got["text_output"])):
        response.more(index, text)
    for index, reason in enumerate(_as_list(got["finish_reason"])):
        if response.reasons.get(index, "None") == "None":
            response.reasons[index] = reason
    token_count = sum(_as_list(got["num_output_tokens"])) + (
        response.usage[1] if response.usage else 0
    )
    response.usage = got.get("num_input_tokens"), token_count
    for column in _as_list(got.get("logprobs") or []):
        for likely in json.loads(column) or ():
            taken = next(iter(likely.values()))
            response.logprobs.append((taken["decoded_token"], taken["logprob"]))


def _as_list(got: Any) -> list[Any]:
    return got if isinstance(got, list) else [got]


def _build_mindie_text_body(model: str, options: RequestOptions) -> Json:
    del model
    parameters: dict[str, Any] = {"details": True, "max_new_tokens": options.most or 20}
    return {"text_input": PROMPT, "parameters": parameters}


def _read_mindie_text(response: DecodedResponse, got: Any) -> None:
    response.more(0, got["text_output"])
    details = got["details"]
    response.usage = None, details["generated_tokens"]
    if "finish_reason" in details:
        response.reasons[0] = details["finish_reason"]


# --- Ollama and TGI -------------------------------------------------------------------------------


def _build_ollama_body(model: str, request_options: RequestOptions) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if request_options.most is not None:
        options["num_predict"] = request_options.most
    if request_options.stops:
        options["stop"] = list(request_options.stops)
    fields: dict[str, Any] = {"model": model, "options": options}
    if not request_options.stream:  # which is its default
        fields["stream"] = False
    if request_options.top is not None:
        fields |= {"logprobs": True, "top_logprobs": request_options.top}
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


def _read_ollama_answer(response: DecodedResponse, got: Any) -> None:
    message = got.get("message") or {"content": got.get("response")}
    response.more(0, message["content"])
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.dumps(function["arguments"])
        response.calls[function["index"]] = [function["name"], arguments]
    response.logprobs += [(one["token"], one["logprob"]) for one in got.get("logprobs", ())]
    if got["done"]:
        response.reasons[0] = got["done_reason"]
        response.usage = got["prompt_eval_count"], got["eval_count"]


_OLLAMA: Final[dict[str, Any]] = {
    "read": _read_ollama_answer,
    "words": {"eos": "stop", "stop": "stop", "length": "length", "tool_calls": "stop",
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
    if options.most is not None:
        parameters["max_new_tokens"] = options.most
    if options.stops:
        parameters["stop"] = list(options.stops)
    if options.top:
        parameters["top_n_tokens"] = options.top
    return {"model": model, "inputs": PROMPT, "parameters": parameters}


def _read_tgi_answer(response: DecodedResponse, got: Any) -> None:
    """An event has one token, a whole answer all; only a stream tells the prompt's length."""
    details = got["details"]
    tokens = [got["token"]] if "token" in got else details["tokens"]
    response.more(0, got["token"]["text"] if "token" in got else got["generated_text"])
    pairs = [(one["text"], one["logprob"]) for one in tokens]
    response.logprobs += [pair for pair in pairs if pair[1] is not None]
    if details is not None:
        response.reasons[0] = details["finish_reason"]
        response.usage = details.get("input_length"), details["generated_tokens"]


# --- OpenAI's Responses API -----------------------------------------------------------------------


def _build_responses_body(model: str, options: RequestOptions) -> Json:
    fields: dict[str, Any] = {"model": model, "input": PROMPT, "stream": options.stream}
    if options.most is not None:
        fields["max_output_tokens"] = options.most
    if options.stops:  # a parameter of vLLM's
        fields["stop"] = list(options.stops)
    if options.top is not None:
        fields |= {"include": ["message.output_text.logprobs"], "top_logprobs": options.top}
    if options.tool:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        tool = {"type": "function", "name": TOOL, "description": "looks up", "parameters": schema}
        fields |= {"tools": [tool], "tool_choice": "auto"}
    return fields


def _read_response(decoded: DecodedResponse, got: Any) -> None:
    """A response, or an event: only the last has usage, the items, and how it ended."""
    kind = got.get("type", "")
    if kind == "response.output_text.delta":
        decoded.more(0, got["delta"])
    response = got.get("response", got)
    status = response.get("status")
    if status == "failed":
        decoded.error += response["error"]["message"]
    if status not in ("completed", "incomplete"):
        return
    details = response["incomplete_details"]
    decoded.reasons[0] = status if details is None else details["reason"]
    usage = response["usage"]
    decoded.usage = usage["input_tokens"], usage["output_tokens"]
    decoded.more(0, "")
    for index, item in enumerate(response["output"]):
        if item["type"] == "function_call":
            decoded.calls[index] = [item["name"], item["arguments"]]
        else:
            [part] = item["content"]
            decoded.logprobs += [(one["token"], one["logprob"]) for one in part["logprobs"]]
            if not kind:
                decoded.more(0, part["text"])
            assert decoded.texts == {0: part["text"]}


# --- Anthropic ------------------------------------------------------------------------------------


def _build_message_body(model: str, options: RequestOptions) -> Json:
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": options.most or 20,
    }
    if options.stream:
        fields["stream"] = True
    if options.stops:
        fields["stop_sequences"] = list(options.stops)
    if options.tool:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        fields["tools"] = [{"name": TOOL, "description": "looks up", "input_schema": schema}]
    return fields


def _read_message(response: DecodedResponse, got: Any) -> None:
    """Adds a message, or an event."""
    response.more(0, "")
    match got["type"]:
        case "message":
            for at, block in enumerate(got["content"]):
                response.more(0, block.get("text"))
                if block["type"] == "tool_use":
                    response.calls[at] = [block["name"], json.dumps(block["input"])]
            response.reasons[0] = got["stop_reason"]
        case "content_block_start" if got["content_block"]["type"] == "tool_use":
            response.calls[got["index"]] = [got["content_block"]["name"], ""]
        case "content_block_delta":
            response.more(0, got["delta"].get("text"))
            if "partial_json" in got["delta"]:
                response.calls[got["index"]][1] += got["delta"]["partial_json"]
        case "message_delta":
            response.reasons[0] = got["delta"]["stop_reason"]
        case _:
            pass
    if usage := got.get("usage") or got.get("message", {}).get("usage"):
        before = response.usage[0] if response.usage else None
        response.usage = usage.get("input_tokens", before), usage["output_tokens"]


CLIENTS: Final = (
    Client(
        name="openai chat",
        kind="chat",
        path="/v1/chat/completions",
        fields=_build_chat_body,
        **_OPENAI,
    ),
    Client(
        name="openai completions",
        kind="text",
        limits=True,
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
            "words": {"eos": "completed", "stop": "completed", "length": "max_output_tokens",
                      "tool_calls": "completed", "unknown": "completed"},
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
        kind="chat",  # its prompts go through the worker's template
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
        words={"eos": "stop", "stop": "stop", "length": "length", "unknown": "None"},
        statuses={"refused": 400, "limited": 429, "failed": 400, "busy": 503},
        read_error=_get_error_text,
        can=frozenset({"stop", "n", "logprobs"}),
        can_stream=frozenset({"stop", "n", "logprobs"}),
        end=b"",
    ),
    Client(
        name="mindie",
        kind="text",
        limits=True,
        path="/mindie/v2/models/MODEL/generate",
        stream_path="/mindie/v2/models/MODEL/generate_stream",
        fields=_build_mindie_text_body,
        read=_read_mindie_text,
        words={"eos": "eos_token", "stop": "eos_token", "length": "length",
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
        keeps_streamed=True,
        can=frozenset({"stop", "logprobs", "tools"}),
        can_stream=frozenset({"stop", "tools"}),
        **_OVMS,
    ),
    Client(
        name="ovms completions",
        kind="text",
        path="/v3/completions",
        fields=_build_completion_body,
        keeps_streamed=True,
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
        words={"eos": "eos_token", "stop": "stop_sequence", "length": "length",
               "unknown": "eos_token"},
        statuses={"refused": 422, "limited": 429, "failed": 424, "busy": 503},
        read_error=_get_error_text,
        can=frozenset({"stop", "logprobs"}),
        can_stream=frozenset({"stop", "logprobs"}),
        keeps_streamed=True,
        keeps_whole=True,
        always_logprobs=True,
        counts=True,
        end=b"",
        prefix=b"data:",
    ),
    Client(
        name="anthropic",
        kind="chat",
        limits=True,
        names_stop=True,
        path="/v1/messages",
        fields=_build_message_body,
        read=_read_message,
        words={"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens",
               "tool_calls": "tool_use", "unknown": "end_turn"},
        statuses={"refused": 400, "limited": 429, "failed": 502, "busy": 529},
        read_error=_get_error_message,
        can=frozenset({"stop", "tools"}),
        can_stream=frozenset({"stop", "tools"}),
        end=b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ),
)  # fmt: skip
"""Adding a client protocol costs one row and what reads its answers."""
