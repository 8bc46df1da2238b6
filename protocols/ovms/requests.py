"""Client bodies to the internal request.

The graph reports these errors within its own text; JSON, ``model`` and ``stream`` are checked
before the graph (``read_routing_fields``). The order of the checks is the server's.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Raw

from protocols.chat.field_keys import read_field_extra
from protocols.core.interfaces import ClientRequest
from protocols.core.json_text import decode_json
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    Prompt,
    RerankRequest,
    ResponseOptions,
)
from protocols.json_body import decode_value, read_object
from protocols.ovms import params
from protocols.ovms.messages import (
    build_param_error,
    read_messages,
    read_response_format,
    read_tools,
)
from protocols.params import ParsedParams

_encode = msgspec.json.Encoder().encode


# --- tools ----------------------------------------------------------------------------------------


# --- output ---------------------------------------------------------------------------------------


BEST_OF_LIMIT = 20
MAX_INPUTS = 500
"""The documented default; the sources have no such check, and so no error text."""
MAX_IGNORE_EOS_TOKENS = 4000
"""The first release generates at most this many tokens with ``ignore_eos``."""

_EMBEDDING_FIELDS = frozenset({"model", "input", "encoding_format", "user"})
_SEPARATE_FIELDS: Mapping[bool, Mapping[str, tuple[str, ...]]] = {
    False: {
        "chat": ("stream_options", "stop", "logprobs", "messages", "tools", "tool_choice",
                 "response_format", "chat_template_kwargs"),
        "completion": ("stream_options", "stop", "logprobs", "prompt"),
    },
    True: {"chat": ("messages",), "completion": ("prompt",)},
}  # fmt: skip
"""The fields that are not read by a table, for the early release or not."""
_KNOWN_FIELDS = {
    (early, kind): {"model", "stream", "user", *names, *(row.wire for row in tables[kind])}
    for early, tables in ((False, params.PARAM_TABLES), (True, params.EARLY_PARAM_TABLES))
    for kind, names in _SEPARATE_FIELDS[early].items()
}
"""All fields that an endpoint reads."""


def has_json_body(call: ClientRequest) -> bool:
    """Whether the body is read at all: otherwise the path names the model."""
    return "application/json" in call.headers.get("content-type", "")


def read_routing_fields(
    call: ClientRequest, *, generates: bool
) -> tuple[dict[str, Raw], str, bool]:
    """Read fields, model (may be empty) and ``stream``. Raises MalformedRequest, InvalidParameter.

    ``stream`` is checked only for generation endpoints.
    """
    fields = read_object(call.body)
    if "model" not in fields:
        raise build_param_error("model field is missing in JSON body", "model")
    model = decode_value(fields["model"])
    if not isinstance(model, str):
        raise build_param_error("model field is not a string", "model")
    stream = decode_value(fields["stream"]) if generates and "stream" in fields else False
    if not isinstance(stream, bool):
        raise build_param_error("stream field is not a boolean", "stream")
    return fields, model, stream


def read_generation_request(call: ClientRequest, *, chat: bool, early: bool) -> GenerationRequest:
    """Read a chat or completions request. Raises ClientError."""
    fields, model, stream = read_routing_fields(call, generates=True)
    values = ParsedParams()
    usage = False
    if early:
        _read_early_params(fields, values)
    else:
        usage = _read_include_usage(fields, stream=stream)
        _read_common_params(fields, values, stream=stream)
    if chat:
        _read_chat_fields(fields, values, stream=stream, early=early)
    else:
        _read_completion_fields(fields, values, stream=stream, early=early)
    kind: Literal["chat", "completion"] = "chat" if chat else "completion"
    known = _KNOWN_FIELDS[early, kind]
    values.provided_fields = {name for name, raw in fields.items() if bytes(raw) != b"null"}
    final: Literal["none", "final"] = "none" if early or (stream and not usage) else "final"
    return GenerationRequest(
        model=model,
        kind=kind,
        stream=stream,
        response_options=ResponseOptions(usage=final),
        labels=_read_labels(fields),
        extra={name: raw for name, raw in fields.items() if name not in known},
        field_extra=() if early else read_field_extra(fields),
        **values.build_request_arguments(),
    )


def read_embedding_request(call: ClientRequest) -> EmbeddingRequest:
    """Read an embeddings request. Raises ClientError."""
    fields, model, _ = read_routing_fields(call, generates=False)
    inputs = _read_inputs(fields.get("input"))
    if len(inputs) > MAX_INPUTS:
        text = f"The number of input documents exceeds allowed configured value: {MAX_INPUTS}"
        raise build_param_error(text, "input")
    encoding: Literal["float", "base64"] = "float"
    if "encoding_format" in fields:
        match decode_value(fields["encoding_format"]):
            case "float":
                pass
            case "base64":
                encoding = "base64"
            case str():
                text = "encoding_format should either base64 or float"
                raise build_param_error(text, "encoding_format")
            case _:
                raise build_param_error("encoding_format should be string", "encoding_format")
    return EmbeddingRequest(
        model=model,
        inputs=inputs,
        encoding=encoding,
        labels=_read_labels(fields),
        provided_fields=frozenset(fields) & {"encoding_format"},
        extra={name: raw for name, raw in fields.items() if name not in _EMBEDDING_FIELDS},
    )


_RERANK_FIELDS = frozenset(
    {"model", "query", "documents", "top_n", "rank_fields", "return_documents"}
)


def read_rerank_request(call: ClientRequest) -> RerankRequest:
    """Read a rerank request. Raises ClientError.

    Documents are texts; the server reads objects with a title and a text, and rejects them when it
    returns documents. Source: src/rerank/rerank_utils.cpp.
    """
    fields, model, _ = read_routing_fields(call, generates=False)
    values = {name: decode_value(fields[name]) for name in _RERANK_FIELDS if name in fields}
    if "query" not in values:
        raise build_param_error("query field is missing in request", "query")
    if not isinstance(values["query"], str):
        raise build_param_error("query is not a string", "query")
    top_n, return_documents = values.get("top_n"), values.get("return_documents")
    documents = _read_documents(values)
    if top_n is not None and type(top_n) is not int:
        raise build_param_error("top_n accepts integer values", "top_n")
    rank_fields = values.get("rank_fields")
    if rank_fields is not None and not isinstance(rank_fields, list):
        raise build_param_error("rank_fields is not an array", "rank_fields")
    if not all(isinstance(name, str) for name in rank_fields or ()):
        raise build_param_error("rank_fields array element is not a string", "rank_fields")
    if return_documents is not None and not isinstance(return_documents, bool):
        raise build_param_error("return_documents accepts boolean values", "return_documents")
    return RerankRequest(
        model=model,
        queries=(values["query"],),
        documents=documents,
        top_n=top_n,
        return_documents=return_documents,
        provided_fields=frozenset(values),
        extra={name: raw for name, raw in fields.items() if name not in _RERANK_FIELDS},
    )


def _read_documents(values: Mapping[str, Any]) -> tuple[str, ...]:
    if "documents" not in values:
        raise build_param_error("documents field is missing in request", "documents")
    documents = values["documents"]
    if not isinstance(documents, list):
        raise build_param_error("documents is not an array", "documents")
    for document in documents:
        if not isinstance(document, str | dict):
            text = "documents array element is neither string nor object"
            raise build_param_error(text, "documents")
    if len({type(document) for document in documents}) > 1:
        text = "all documents have to be the same type (string or objects)"
        raise build_param_error(text, "documents")
    if documents and isinstance(documents[0], dict):
        for document in documents:
            for name in ("title", "text"):
                if name not in document:
                    text = f"document {name} field is missing"
                    raise build_param_error(text, "documents")
                if not isinstance(document[name], str):
                    text = f"document {name} field have to be string"
                    raise build_param_error(text, "documents")
        raise build_param_error("document map not supported", "documents")
    if not documents:
        raise build_param_error("documents array is empty", "documents")
    return tuple(documents)


def _read_labels(fields: Mapping[str, Raw]) -> dict[str, str]:
    user = decode_value(fields["user"]) if "user" in fields else None
    return {"user": user} if isinstance(user, str) else {}


# --- shared by both kinds -------------------------------------------------------------------------


def _read_include_usage(fields: Mapping[str, Raw], *, stream: bool) -> bool:
    """Whether the stream ends with usage."""
    options = decode_value(fields["stream_options"]) if "stream_options" in fields else None
    if options is None:
        return False
    if not stream:
        text = "stream_options provided, but stream not set to true"
        raise build_param_error(text, "stream_options")
    if not isinstance(options, dict):
        raise build_param_error("stream_options is not an object", "stream_options")
    include = options.pop("include_usage", False)
    if not isinstance(include, bool):
        raise build_param_error("stream_options.include_usage is not a boolean", "stream_options")
    if options:
        raise build_param_error(
            "Found unexpected stream options. Properties accepted in stream_options: include_usage",
            "stream_options",
        )
    return include


def _read_common_params(fields: Mapping[str, Raw], values: ParsedParams, *, stream: bool) -> None:
    params.read_params(params.PARAMS_BEFORE_STOP, fields, values)
    stop = _read_stop_strings(fields.get("stop"))
    if stop:
        values["stopping.stop"] = stop
        if stream:  # the first release supports fewer parameters in a stream
            values["stopping.include_stop"] = stream
    params.read_params((params.INCLUDE_STOP,), fields, values)
    if stream and values.get("stopping.include_stop") is False:
        raise build_param_error(
            "include_stop_str_in_output cannot be set to false if streaming is used",
            "include_stop_str_in_output",
        )
    params.read_params(params.BEST_OF_PARAMS, fields, values)
    if "best_of" in values.provided_fields:
        if values.get("sampling.beam_width", 1) >= BEST_OF_LIMIT:
            text = f"best_of exceeds limit provided in graph config: {BEST_OF_LIMIT}"
            raise build_param_error(text, "best_of")
        if stream:
            raise build_param_error("best_of cannot be used in streaming mode", "best_of")
    params.read_params(params.PARAMS_AFTER_BEST_OF[:1], fields, values)
    _check_n(values)
    params.read_params(params.PARAMS_AFTER_BEST_OF[1:], fields, values)


def _read_early_params(fields: Mapping[str, Raw], values: ParsedParams) -> None:
    params.read_params(params.EARLY_PARAMS, fields, values)
    if "temperature" not in values.provided_fields:
        values["sampling.temperature"] = 0.0  # the first release is greedy by default
    if values.get("stopping.ignore_eos"):
        if values.get("stopping.max_tokens", 0) > MAX_IGNORE_EOS_TOKENS:
            raise build_param_error(
                "when ignore_eos is true max_tokens can not be greater than "
                f"{MAX_IGNORE_EOS_TOKENS}",
                "max_tokens",
            )
        if "max_tokens" not in values.provided_fields:
            values["stopping.max_tokens"] = MAX_IGNORE_EOS_TOKENS
    _check_n(values)


def _check_n(values: ParsedParams) -> None:
    if values.get("n", 1) > values.get("sampling.beam_width", 1):
        raise build_param_error("n value cannot be greater than best_of", "n")


def _read_stop_strings(raw: Raw | None) -> tuple[str, ...]:
    value = None if raw is None else decode_value(raw)
    match value:
        case None:
            return ()
        case str():
            return (value,)
        case list() if len(value) > params.MAX_STOP_STRINGS:
            raise build_param_error(
                f"stop array must have no more than {params.MAX_STOP_STRINGS} strings", "stop"
            )
        case list() if all(isinstance(one, str) for one in value):
            return tuple(value)
        case list():
            raise build_param_error("stop array contains non string element", "stop")
        case _:
            raise build_param_error("stop is not a string or array of strings", "stop")


# --- chat or completions only ---------------------------------------------------------------------


def _read_chat_fields(
    fields: Mapping[str, Raw], values: ParsedParams, *, stream: bool, early: bool
) -> None:
    values["messages"] = read_messages(fields.get("messages"))
    if not early:
        tools, choice = read_tools(fields)
        values["tools"] = tools
        values["tool_choice"] = choice
        logprobs = _read_flag(fields, "logprobs")
        if logprobs and stream:
            raise build_param_error("logprobs are not supported in streaming mode.", "logprobs")
        if logprobs:
            values["logprobs.top"] = 0
        params.read_params((params.MAX_COMPLETION_TOKENS,), fields, values)
    if values.get("stopping.max_tokens") == 0:
        raise build_param_error("max_tokens value should be greater than 0", "max_tokens")
    if not early:
        values["output"] = read_response_format(fields.get("response_format"))
        _read_template_arguments(fields, values)


def _read_completion_fields(
    fields: Mapping[str, Raw], values: ParsedParams, *, stream: bool, early: bool
) -> None:
    prompt = decode_value(fields["prompt"]) if "prompt" in fields else ""
    if not isinstance(prompt, str):
        raise build_param_error("prompt is not a string", "prompt")
    if not prompt:
        raise build_param_error("prompt is missing", "prompt")
    values["prompts"] = (prompt,)
    values["templating.mode"] = "raw"
    echo = False
    if not early:
        if _read_completion_logprobs(fields, stream=stream):
            values["logprobs.top"] = 0
        echo = _read_flag(fields, "echo")
        if echo:
            values["echo"] = echo
    if values.get("stopping.max_tokens") == 0 and not echo:
        text = "max_tokens value should be greater than 0"
        raise build_param_error(text if early else f"{text} unless echo is set", "max_tokens")


def _read_completion_logprobs(fields: Mapping[str, Raw], *, stream: bool) -> bool:
    match decode_value(fields["logprobs"]) if "logprobs" in fields else None:
        case None:
            return False
        case bool():
            raise build_param_error("logprobs accepts integer values", "logprobs")
        case 1 as value if type(value) is int:
            if stream:
                raise build_param_error("logprobs are not supported in streaming mode.", "logprobs")
            return True
        case int():
            raise build_param_error("accepted logprobs value is currently 1 only", "logprobs")
        case _:
            raise build_param_error("logprobs accepts integer values", "logprobs")


def _read_flag(fields: Mapping[str, Raw], name: str) -> bool:
    value = decode_value(fields[name]) if name in fields else None
    if value is None:
        return False
    if not isinstance(value, bool):
        raise build_param_error(f"{name} accepts values true or false", name)
    return value


def _read_template_arguments(fields: Mapping[str, Raw], values: ParsedParams) -> None:
    raw = fields.get("chat_template_kwargs")
    value = None if raw is None else decode_value(raw)
    if raw is None or value is None:
        return
    if not isinstance(value, dict):
        raise build_param_error("chat_template_kwargs must be an object", "chat_template_kwargs")
    values["templating.arguments"] = decode_json(raw, kind=dict[str, Raw])


def _read_inputs(raw: Raw | None) -> tuple[Prompt, ...]:
    """Read texts or lists of token ids. Source: src/tokenize/tokenize_parser.cpp, parseInput."""
    if raw is None:
        raise build_param_error("input field is required", "input")
    match decode_value(raw):
        case str() as text:
            return (text,)
        case []:
            raise build_param_error("input array should not be empty", "input")
        case list() as items:
            return _read_input_items(items)
        case _:
            text = "input should be string, array of strings or array of integers"
            raise build_param_error(text, "input")


def _read_input_items(items: list[object]) -> tuple[Prompt, ...]:
    if all(isinstance(item, str) for item in items):
        return tuple(item for item in items if isinstance(item, str))
    if all(type(item) is int for item in items):
        return (tuple(item for item in items if isinstance(item, int)),)
    if all(isinstance(item, list) for item in items):
        return tuple(_read_token_ids(item) for item in items if isinstance(item, list))
    if all(isinstance(item, str | list) or type(item) is int for item in items):
        raise build_param_error("input must be homogeneous", "input")
    raise build_param_error("every element in input array should be either string or int", "input")


def _read_token_ids(item: list[object]) -> tuple[int, ...]:
    if not item:
        raise build_param_error("inner arrays in input should not be empty", "input")
    if not all(type(token) is int for token in item):
        text = "input must be either array of strings or array of array of integers"
        strings = all(isinstance(token, str) for token in item)
        raise build_param_error(text if strings else "input must be homogeneous", "input")
    return tuple(token for token in item if isinstance(token, int))
