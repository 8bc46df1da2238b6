"""Decodes requests of clients: ``{inputs, parameters, stream}``, chat, and completions.

Source: text-generation-inference 3.3, ``router/src/lib.rs``, ``validation.rs`` and ``chat.rs``.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from protocols import params
from protocols.chat.params import NULL, as_object, invalid_type_error, null_to_none
from protocols.chat.requests import RequestRules, read_chat, read_completion
from protocols.core.errors import InvalidParameter, MalformedRequest
from protocols.core.request import (
    EmbeddingRequest,
    ExtraFields,
    FieldPath,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    OutputFormat,
    PromptOptions,
    RegexFormat,
)
from protocols.json_body import decode_value
from protocols.params import ParamTable, ParsedParams

Fields = Mapping[str, Raw]
_encode = msgspec.json.Encoder().encode
_PREFIX: Final = "Input validation error: "
_PARAMETERS: Final = "parameters"
PREFILL_FIELD: Final = "decoder_input_details"
"""Stands in ``extra``: of a response in the format of this protocol only."""
REQUEST_FIELDS: Final = frozenset({"inputs", "parameters", "stream", "model"})
_SAMPLING_FIELDS: Final = ("sampling.top_k", "sampling.top_p", "sampling.typical_p")
"""Parameters that turn sampling on, as does a temperature other than 1."""
_PLACEHOLDER_MODELS: Final = ("", "tgi", "dummy")
"""What clients send as the model where a server has only one."""
CHAT_RULES: Final = RequestRules(default_completion_tokens=None)


class GenerateOptions(Struct, frozen=True):
    """What the encoder needs of a generate request."""

    inputs: str
    returns_inputs: bool = False
    top_tokens: int = 0
    best_of: int = 1


def fail(text: str, param: str) -> InvalidParameter:
    """The error of the server's validation."""
    return InvalidParameter(_PREFIX + text, param=param, problem="conflict")


def read_inputs(fields: Fields) -> str:
    """The prompt. Raises InvalidParameter."""
    raw = fields.get("inputs")
    if raw is None:
        raise InvalidParameter("missing field `inputs`", param="inputs", problem="missing")
    value = decode_value(raw)
    if not isinstance(value, str):
        raise invalid_type_error("inputs", "a string", value)
    if not value:
        raise fail("`inputs` cannot be empty", "inputs")
    return value


def read_generate(
    fields: Fields, table: ParamTable, model: str, templating: PromptOptions, *, stream: bool
) -> tuple[GenerationRequest, GenerateOptions]:
    """Decode a generate request. Raises ClientError.

    Without ``parameters`` the server samples; with some it decodes greedily by default.
    """
    inputs = read_inputs(fields)
    raw = null_to_none(fields.get("parameters"))
    own = {} if raw is None else as_object(raw, "parameters")
    values = params.read_params(table, own)
    best_of = _read_best_of(values, stream=stream)
    if raw is not None and not values.pop("sampling.do_sample", False) and not _is_sampled(values):
        values["sampling.temperature"] = 0.0
    if values.get("stopping.stop"):
        values["stopping.include_stop"] = True
    top = values.pop("request.top_n_tokens", 0)
    if top or values.get("response_options.details") or best_of > 1:
        values["logprobs.top"] = top
    extra = {name: value for name, value in fields.items() if name not in REQUEST_FIELDS}
    if values.pop("request.decoder_input_details", False):
        if stream:
            text = "`decoder_input_details` == true is not supported when streaming tokens"
            raise fail(text, PREFILL_FIELD)
        extra[PREFILL_FIELD] = own[PREFILL_FIELD]
    options = GenerateOptions(
        inputs, bool(values.pop("request.return_full_text", False)), top, best_of
    )
    request = GenerationRequest(
        model=model,
        kind="completion",
        prompts=(inputs,),
        templating=templating,
        fills_context=True,
        n=best_of if best_of > 1 else None,
        output=read_grammar(own.get("grammar"), "grammar"),
        stream=stream,
        extra=extra,
        field_extra=_find_unknown_parameters(own, table),
        **values.build_request_arguments(),
    )
    return request, options


def _find_unknown_parameters(own: Fields, table: ParamTable) -> tuple[ExtraFields, ...]:
    known = {*table.by_wire, "grammar"}
    values: dict[FieldPath, Any] = {
        (name,): decode_value(raw) for name, raw in own.items() if name not in known and raw != NULL
    }
    return (ExtraFields(_PARAMETERS, values, (_PARAMETERS,)),) if values else ()


def _is_sampled(values: ParsedParams) -> bool:
    if any(name in values for name in _SAMPLING_FIELDS):
        return True
    temperature: float = values.get("sampling.temperature", 1.0)
    return temperature != 1.0


def _read_best_of(values: ParsedParams, *, stream: bool) -> int:
    best_of: int = values.pop("request.best_of", 1)
    if best_of == 1:
        return 1
    if values.get("sampling.seed") is not None:
        raise fail("`seed` must not be set when `best_of` > 1", "seed")
    if stream:
        raise fail("`best_of` != 1 is not supported when streaming tokens", "best_of")
    if not values.get("sampling.do_sample") and not _is_sampled(values):
        text = "you must use sampling when `best_of` is > 1"
        raise fail(text, "best_of")
    return best_of


def read_grammar(raw: Raw | None, at: str) -> OutputFormat | None:
    """An output format in TGI's notation. Raises InvalidParameter."""
    raw = null_to_none(raw)
    if raw is None:
        return None
    fields = as_object(raw, at)
    kind = decode_value(fields.get("type", NULL))
    value = null_to_none(fields.get("value"))
    match kind:
        case "json_object" if value is None:
            return JsonObjectFormat()
        case "json" | "json_object" if value is not None:
            return JsonSchemaFormat(_read_schema(value, f"{at}.value"))
        case "json_schema" if value is not None:
            inner = as_object(value, f"{at}.value")
            schema = inner.get("schema", NULL)
            return JsonSchemaFormat(_read_schema(schema, f"{at}.value.schema"))
        case "regex" if value is not None and isinstance(decode_value(value), str):
            return RegexFormat(decode_value(value))
        case _:
            text = f"`{at}` must have a type of json, json_object, json_schema or regex and a value"
            raise fail(text, at)


def _read_schema(raw: Raw, at: str) -> Raw:
    """A JSON Schema; also as text. Raises InvalidParameter."""
    value = decode_value(raw)
    if isinstance(value, str):
        try:
            text = value.encode()
            value, raw = decode_value(text), Raw(text)
        except MalformedRequest:
            value = None
    if not isinstance(value, dict) or "properties" not in value:
        raise fail("Grammar must have a 'properties' field", at)
    return raw


# --- chat and completions -------------------------------------------------------------------------


def read_model(fields: Fields, default_model: str) -> str:
    """The model; the listener's where the client's name stands for any. Raises InvalidParameter."""
    raw = null_to_none(fields.get("model"))
    name = "" if raw is None else decode_value(raw)
    if not isinstance(name, str):
        raise invalid_type_error("model", "a string", name)
    return default_model if name in _PLACEHOLDER_MODELS else name


def read_v1_chat(fields: Fields, model: str) -> GenerationRequest:
    """Decode a chat request, with TGI's own fields. Raises ClientError."""
    fields, output = _split_output_format(fields)
    choice = null_to_none(fields.get("tool_choice"))
    name = None if choice is None else decode_value(choice)
    if isinstance(name, str) and name not in ("none", "auto", "required"):
        named = {"type": "function", "function": {"name": name}}
        fields = {**fields, "tool_choice": Raw(_encode(named))}
    request = read_chat(fields, CHAT_RULES, model=model)
    if output is not None and request.tools:
        raise fail("Grammar and tools are mutually exclusive", "response_format")
    return request if output is None else replace(request, output=output)


def read_v1_completion(fields: Fields, model: str) -> GenerationRequest:
    """Decode a completion request. Raises ClientError."""
    return replace(read_completion(fields, CHAT_RULES, model=model), fills_context=True)


def _split_output_format(fields: Fields) -> tuple[Fields, OutputFormat | None]:
    """The fields without a response format in TGI's notation, and that format."""
    raw = null_to_none(fields.get("response_format"))
    if raw is None:
        return fields, None
    kind = decode_value(as_object(raw, "response_format").get("type", NULL))
    if b'"value"' not in bytes(raw) and kind != "regex":
        return fields, None
    rest = {name: value for name, value in fields.items() if name != "response_format"}
    return rest, read_grammar(raw, "response_format")


# --- embeddings -----------------------------------------------------------------------------------


def read_embedding(fields: Fields, model: str) -> EmbeddingRequest:
    """Decode a request for vectors, which InferenceClient sends to the same path.

    Raises ClientError.
    """
    value: Any = decode_value(fields.get("inputs", NULL))
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(one, str) and one for one in texts):
        raise invalid_type_error("inputs", "a string or array of strings", value)
    if not texts:
        raise fail("`inputs` cannot be empty", "inputs")
    values = params.read_params(EMBEDDING_TABLE, fields)
    known = REQUEST_FIELDS | set(EMBEDDING_TABLE.by_wire)
    extra = {name: raw for name, raw in fields.items() if name not in known and raw != NULL}
    truncate = values.pop("overflow", None)
    if truncate is not None:
        values["overflow"] = "truncate" if truncate else "error"
    return EmbeddingRequest(
        model=model, inputs=tuple(texts), extra=extra, **values.build_request_arguments()
    )


EMBEDDING_TABLE: Final = ParamTable(
    params.Param("normalize", "normalize", "bool"),
    params.Param("truncate", "overflow", "bool"),
)
