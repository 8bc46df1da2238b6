"""A client's request into the internal one.

Everything here is said by the graph, inside its sentence; what is checked before the graph (JSON,
``model``, ``stream``) stands in ``front_door``. The order of the checks is the server's.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Raw

from gateway.core.ports import Call
from gateway.core.types import EmbedRequest, GenerateRequest, Prompt, Want
from protocols.body import read_object, value
from protocols.ovms import tables
from protocols.ovms.messages import read_format, read_messages, read_tools, wrong
from protocols.params import Values

BEST_OF_LIMIT = 20
MOST_INPUTS = 500
"""The documented default; the sources that were read have no such check, and so no text for it."""
IGNORE_EOS_LIMIT = 4000
"""How many tokens the early release makes at most when it does not stop at the end of text."""

_STRUCTURE = frozenset(
    {"model", "messages", "prompt", "input", "stream", "stream_options", "tools", "tool_choice",
     "response_format", "chat_template_kwargs", "stop", "echo", "logprobs", "user",
     "encoding_format"}
)  # fmt: skip
"""What is read here, row by row of no table."""

_KNOWN = _STRUCTURE | {row.param.wire for row in tables.ALL}
_EARLY_KNOWN = {"model", "messages", "prompt", "stream", "user"} | {
    row.param.wire for row in tables.EARLY
}


def is_json(call: Call) -> bool:
    """Whether the body is read at all: any other content names its model by the path."""
    return "application/json" in call.headers.get("content-type", "")


def front_door(call: Call, *, generates: bool) -> tuple[dict[str, Raw], str, bool]:
    """The fields, the model (perhaps empty) and ``stream``. Raises Malformed, InvalidParameter.

    ``stream`` is looked at only on the paths that generate.
    """
    fields = read_object(call.body)
    if "model" not in fields:
        raise wrong("model field is missing in JSON body", "model")
    model = value(fields["model"])
    if not isinstance(model, str):
        raise wrong("model field is not a string", "model")
    stream = value(fields["stream"]) if generates and "stream" in fields else False
    if not isinstance(stream, bool):
        raise wrong("stream field is not a boolean", "stream")
    return fields, model, stream


def generation(call: Call, *, chat: bool, early: bool) -> GenerateRequest:
    """A conversation or a completion. Raises ClientError."""
    fields, model, stream = front_door(call, generates=True)
    values = Values()
    usage = False
    if early:
        _read_early(fields, values)
    else:
        usage = _usage(fields, stream=stream)
        _read_common(fields, values, stream=stream)
    if chat:
        _read_chat(fields, values, stream=stream, early=early)
    else:
        _read_completion(fields, values, stream=stream, early=early)
    known = _EARLY_KNOWN if early else _KNOWN
    values.given = {name for name, raw in fields.items() if bytes(raw) != b"null"}
    final: Literal["none", "final"] = "none" if early or (stream and not usage) else "final"
    return GenerateRequest(
        model=model,
        kind="chat" if chat else "completion",
        stream=stream,
        want=Want(usage=final),
        labels=_labels(fields),
        extra={name: raw for name, raw in fields.items() if name not in known},
        **values.build_request_arguments(),
    )


def embedding(call: Call) -> EmbedRequest:
    """Inputs to embed. Raises ClientError."""
    fields, model, _ = front_door(call, generates=False)
    inputs = _inputs(fields.get("input"))
    if len(inputs) > MOST_INPUTS:
        text = f"The number of input documents exceeds allowed configured value: {MOST_INPUTS}"
        raise wrong(text, "input")
    encoding: Literal["float", "base64"] = "float"
    if "encoding_format" in fields:
        match value(fields["encoding_format"]):
            case "float":
                pass
            case "base64":
                encoding = "base64"
            case str():
                text = "encoding_format should either base64 or float"
                raise wrong(text, "encoding_format")
            case _:
                raise wrong("encoding_format should be string", "encoding_format")
    return EmbedRequest(
        model=model,
        inputs=inputs,
        encoding=encoding,
        labels=_labels(fields),
        given=frozenset(fields) & {"encoding_format"},
        extra={name: raw for name, raw in fields.items() if name not in _STRUCTURE},
    )


def _labels(fields: Mapping[str, Raw]) -> dict[str, str]:
    user = value(fields["user"]) if "user" in fields else None
    return {"user": user} if isinstance(user, str) else {}


# --- what both kinds share ------------------------------------------------------------------------


def _usage(fields: Mapping[str, Raw], *, stream: bool) -> bool:
    """Whether the stream is to end with usage."""
    options = value(fields["stream_options"]) if "stream_options" in fields else None
    if options is None:
        return False
    if not stream:
        text = "stream_options provided, but stream not set to true"
        raise wrong(text, "stream_options")
    if not isinstance(options, dict):
        raise wrong("stream_options is not an object", "stream_options")
    include = options.pop("include_usage", False)
    if not isinstance(include, bool):
        raise wrong("stream_options.include_usage is not a boolean", "stream_options")
    if options:
        raise wrong(
            "Found unexpected stream options. Properties accepted in stream_options: include_usage",
            "stream_options",
        )
    return include


def _read_common(fields: Mapping[str, Raw], values: Values, *, stream: bool) -> None:
    tables.read(tables.BEFORE_STOP, fields, values)
    stop = _stop(fields.get("stop"))
    if stop:
        values["stopping.stop"] = stop
        if stream:  # its promise of streams
            values["stopping.include_stop"] = stream
    tables.read((tables.INCLUDE_STOP,), fields, values)
    if stream and values.get("stopping.include_stop") is False:
        raise wrong(
            "include_stop_str_in_output cannot be set to false if streaming is used",
            "include_stop_str_in_output",
        )
    tables.read(tables.BEST_OF, fields, values)
    if "best_of" in values.given:
        if values.get("sampling.beam_width", 1) >= BEST_OF_LIMIT:
            text = f"best_of exceeds limit provided in graph config: {BEST_OF_LIMIT}"
            raise wrong(text, "best_of")
        if stream:
            raise wrong("best_of cannot be used in streaming mode", "best_of")
    tables.read(tables.AFTER_BEST_OF[:1], fields, values)
    _check_n(values)
    tables.read(tables.AFTER_BEST_OF[1:], fields, values)


def _read_early(fields: Mapping[str, Raw], values: Values) -> None:
    tables.read(tables.EARLY, fields, values)
    if "temperature" not in values.given:
        values["sampling.temperature"] = 0.0  # the early release promises greedy decoding
    if values.get("stopping.ignore_eos"):
        if values.get("stopping.max_tokens", 0) > IGNORE_EOS_LIMIT:
            raise wrong(
                f"when ignore_eos is true max_tokens can not be greater than {IGNORE_EOS_LIMIT}",
                "max_tokens",
            )
        if "max_tokens" not in values.given:
            values["stopping.max_tokens"] = IGNORE_EOS_LIMIT
    _check_n(values)


def _check_n(values: Values) -> None:
    if values.get("n", 1) > values.get("sampling.beam_width", 1):
        raise wrong("n value cannot be greater than best_of", "n")


def _stop(raw: Raw | None) -> tuple[str, ...]:
    got = None if raw is None else value(raw)
    match got:
        case None:
            return ()
        case str():
            return (got,)
        case list() if len(got) > tables.MOST_STOPS:
            raise wrong(f"stop array must have no more than {tables.MOST_STOPS} strings", "stop")
        case list() if all(isinstance(one, str) for one in got):
            return tuple(got)
        case list():
            raise wrong("stop array contains non string element", "stop")
        case _:
            raise wrong("stop is not a string or array of strings", "stop")


# --- what is one kind's own -----------------------------------------------------------------------


def _read_chat(fields: Mapping[str, Raw], values: Values, *, stream: bool, early: bool) -> None:
    values["messages"] = read_messages(fields.get("messages"))
    if not early:
        tools, choice = read_tools(fields)
        values["tools"] = tools
        values["tool_choice"] = choice
        logprobs = _flag(fields, "logprobs")
        if logprobs and stream:
            raise wrong("logprobs are not supported in streaming mode.", "logprobs")
        if logprobs:
            values["logprobs.top"] = 0
        tables.read((tables.MAX_COMPLETION_TOKENS,), fields, values)
    if values.get("stopping.max_tokens") == 0:
        raise wrong("max_tokens value should be greater than 0", "max_tokens")
    if not early:
        values["output"] = read_format(fields.get("response_format"))
        _template_arguments(fields, values)


def _read_completion(
    fields: Mapping[str, Raw], values: Values, *, stream: bool, early: bool
) -> None:
    prompt = value(fields["prompt"]) if "prompt" in fields else ""
    if not isinstance(prompt, str):
        raise wrong("prompt is not a string", "prompt")
    if not prompt:
        raise wrong("prompt is missing", "prompt")
    values["prompts"] = (prompt,)
    values["templating.mode"] = "raw"
    echo = False
    if not early:
        if _completion_logprobs(fields, stream=stream):
            values["logprobs.top"] = 0
        echo = _flag(fields, "echo")
        if echo:
            values["echo"] = echo
    if values.get("stopping.max_tokens") == 0 and not echo:
        text = "max_tokens value should be greater than 0"
        raise wrong(text if early else f"{text} unless echo is set", "max_tokens")


def _completion_logprobs(fields: Mapping[str, Raw], *, stream: bool) -> bool:
    match value(fields["logprobs"]) if "logprobs" in fields else None:
        case None:
            return False
        case bool():
            raise wrong("logprobs accepts integer values", "logprobs")
        case 1 as got if type(got) is int:
            if stream:
                raise wrong("logprobs are not supported in streaming mode.", "logprobs")
            return True
        case int():
            raise wrong("accepted logprobs value is currently 1 only", "logprobs")
        case _:
            raise wrong("logprobs accepts integer values", "logprobs")


def _flag(fields: Mapping[str, Raw], name: str) -> bool:
    got = value(fields[name]) if name in fields else None
    if got is None:
        return False
    if not isinstance(got, bool):
        raise wrong(f"{name} accepts values true or false", name)
    return got


def _template_arguments(fields: Mapping[str, Raw], values: Values) -> None:
    raw = fields.get("chat_template_kwargs")
    got = None if raw is None else value(raw)
    if raw is None or got is None:
        return
    if not isinstance(got, dict):
        raise wrong("chat_template_kwargs must be an object", "chat_template_kwargs")
    values["templating.arguments"] = msgspec.json.decode(raw, type=dict[str, Raw])


def _inputs(raw: Raw | None) -> tuple[Prompt, ...]:
    """Texts, or lists of token ids. Source: src/tokenize/tokenize_parser.cpp, parseInput."""
    if raw is None:
        raise wrong("input field is required", "input")
    match value(raw):
        case str() as text:
            return (text,)
        case []:
            raise wrong("input array should not be empty", "input")
        case list() as items:
            return _several(items)
        case _:
            text = "input should be string, array of strings or array of integers"
            raise wrong(text, "input")


def _several(items: list[object]) -> tuple[Prompt, ...]:
    if all(isinstance(item, str) for item in items):
        return tuple(item for item in items if isinstance(item, str))
    if all(type(item) is int for item in items):
        return (tuple(item for item in items if isinstance(item, int)),)
    if all(isinstance(item, list) for item in items):
        return tuple(_token_ids(item) for item in items if isinstance(item, list))
    if all(isinstance(item, str | list) or type(item) is int for item in items):
        raise wrong("input must be homogeneous", "input")
    raise wrong("every element in input array should be either string or int", "input")


def _token_ids(item: list[object]) -> tuple[int, ...]:
    if not item:
        raise wrong("inner arrays in input should not be empty", "input")
    if not all(type(token) is int for token in item):
        text = "input must be either array of strings or array of array of integers"
        strings = all(isinstance(token, str) for token in item)
        raise wrong(text if strings else "input must be homogeneous", "input")
    return tuple(token for token in item if isinstance(token, int))
