"""Decodes chat, completion and embeddings requests.

Each protocol has its own ``RequestRules`` and adds its own checks::

    RULES = RequestRules(chat=TABLE, message_rules=MESSAGE_RULES, max_tools=32)
    request = read_chat(fields, RULES, model=name_from_the_path)
"""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, Literal

from msgspec import Raw, Struct

from protocols import params
from protocols.chat.field_keys import read_field_extra
from protocols.chat.messages import DEFAULT_MESSAGE_RULES, MessageRules, read_messages
from protocols.chat.params import (
    CHAT_EXTENSION_PARAMS,
    CHAT_PARAMS,
    COMPLETION_PARAMS,
    EMBEDDING_EXTENSION_PARAMS,
    EMBEDDING_PARAMS,
    EXTENSION_PARAMS,
    NULL,
    as_object,
    as_optional_bool,
    as_text,
    conflict_error,
    empty_value_error,
    invalid_type_error,
    invalid_value_error,
    missing_error,
    too_long_error,
)
from protocols.chat.response_format import read_structured_outputs
from protocols.chat.tools import read_functions, read_response_format, read_tool_choice, read_tools
from protocols.core.errors import InvalidParameter, UnknownParameter
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    OutputFormat,
    Prompt,
    Tool,
    ToolChoice,
)
from protocols.json_body import decode_value
from protocols.params import ParamTable, ParsedParams

STRUCTURED_OUTPUT_FIELDS = frozenset(
    {"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)
CHAT_FIELDS = STRUCTURED_OUTPUT_FIELDS | {
    "model", "messages", "tools", "tool_choice", "functions", "function_call", "response_format",
    "logit_bias", "stream_options", "metadata", "chat_template_kwargs",
}  # fmt: skip
COMPLETION_FIELDS = STRUCTURED_OUTPUT_FIELDS | {
    "model",
    "prompt",
    "logit_bias",
    "stream_options",
    "response_format",
}
EMBEDDING_FIELDS = frozenset({"model", "input"})
"""Fields that have their own function instead of a table row."""
_OUTPUT_FIELDS = STRUCTURED_OUTPUT_FIELDS | {"response_format"}
_TOOL_FIELDS = frozenset({"tools", "tool_choice", "functions", "function_call"})

METADATA_LIMITS = 16, 64, 512
MAX_IDENTIFIER_LENGTH = 64
MAX_INPUTS = 2048


FIELD_NAMES: Final[Mapping[str, str]] = {
    "tools": "tools",
    "tool_choice": "tool_choice",
    "parallel_tools": "parallel_tool_calls",
    "output": "response_format",
    "stopping.max_tokens": "max_tokens",
    "sampling.logit_bias": "logit_bias",
    "sampling.beam_width": "use_beam_search",
    "templating.arguments": "chat_template_kwargs",
    "logprobs.top": "top_logprobs",
    "logprobs.prompt": "logprobs",
}
"""The wire names of fields that are no scalar parameters."""


class RequestRules(Struct, frozen=True, kw_only=True, dict=True):
    """The parameters that a protocol accepts, and how strictly."""

    chat: ParamTable = ParamTable(*CHAT_PARAMS, *CHAT_EXTENSION_PARAMS)
    completion: ParamTable = ParamTable(*COMPLETION_PARAMS, *EXTENSION_PARAMS)
    embedding: ParamTable = ParamTable(*EMBEDDING_PARAMS, *EMBEDDING_EXTENSION_PARAMS)
    message_rules: MessageRules = DEFAULT_MESSAGE_RULES
    max_tools: int | None = None
    """The largest number of tools; that of the service is its own business."""
    unknown_fields: Literal["forward", "ignore", "reject"] = "forward"
    """What happens to fields that are in no table."""
    default_completion_tokens: int | None = 16
    """The default of ``max_tokens`` of completions."""

    @cached_property
    def plain_chat_fields(self) -> frozenset[str]:
        """The fields of a chat that need no more than their row, as most requests have."""
        return _PLAIN_FIELDS | {
            row.wire
            for row in self.chat
            if row.wire not in _DEPENDENT_FIELDS
            and not row.field.startswith(("request.", "labels."))
        }


_PLAIN_FIELDS = frozenset({"model", "messages", "stream_options", "logit_bias"})
_DEPENDENT_FIELDS = frozenset(
    {"parallel_tool_calls", "continue_final_message", "add_generation_prompt"}
)
"""Fields that are checked together with others."""
DEFAULT_REQUEST_RULES = RequestRules()


def read_model(fields: Mapping[str, Raw]) -> str:
    """The model's name. Raises InvalidParameter."""
    model = as_text(fields, "model", "")
    if not model:
        raise missing_error("model")
    return model


# --- conversations --------------------------------------------------------------------------------


def read_chat(
    fields: Mapping[str, Raw],
    rules: RequestRules = DEFAULT_REQUEST_RULES,
    *,
    model: str | None = None,
    client_id: str | None = None,
    timeout: float | None = None,
) -> GenerationRequest:
    """Decode a chat request. ``model``: if the body does not name it. Raises ClientError."""
    name = read_model(fields) if model is None else model
    messages = read_messages(fields.get("messages"), rules.message_rules)
    values = params.read_params(rules.chat, fields)
    _read_shared_fields(values, fields, client_id, timeout)
    if values.provided_fields <= rules.plain_chat_fields:
        return GenerationRequest(
            model=name,
            kind="chat",
            messages=messages,
            field_extra=read_field_extra(fields),
            **values.build_request_arguments(),
        )
    _merge_logprobs(values)
    if "modalities" in values.provided_fields:
        _check_modalities(fields["modalities"])
    tools, choice, legacy = _read_tools_and_choice(values, fields, rules)
    if not tools and values.get("parallel_tools") is not None:
        text = "'parallel_tool_calls' is only allowed when 'tools' are specified."
        raise conflict_error("parallel_tool_calls", text)
    if "chat_template_kwargs" in values.provided_fields:
        raw = fields["chat_template_kwargs"]
        values["templating.arguments"] = as_object(raw, "chat_template_kwargs")
    if values.get("templating.continue_final") and values.get("templating.add_generation_prompt"):
        text = "'continue_final_message' and 'add_generation_prompt' can't both be true."
        raise conflict_error("continue_final_message", text)
    return GenerationRequest(
        model=name,
        kind="chat",
        messages=messages,
        tools=tools,
        tool_choice=choice,
        legacy_functions=legacy,
        output=_read_output_format(values, fields),
        labels=_read_labels(values, fields, rules.chat),
        extra=collect_extra(values, fields, rules.chat, CHAT_FIELDS, rules.unknown_fields),
        field_extra=read_field_extra(fields),
        **values.build_request_arguments(),
    )


def _read_tools_and_choice(
    values: ParsedParams, fields: Mapping[str, Raw], rules: RequestRules
) -> tuple[tuple[Tool, ...], ToolChoice | None, bool]:
    if values.provided_fields.isdisjoint(_TOOL_FIELDS):
        return (), None, False
    tools = read_tools(fields, most=rules.max_tools)
    choice = read_tool_choice(fields, tools)
    functions, called = read_functions(fields)
    if tools and functions:
        raise conflict_error("functions", "'functions' and 'tools' can't be given together.")
    return (functions, called, True) if functions else (tools, choice, False)


def _merge_logprobs(values: ParsedParams) -> None:
    """Combine ``logprobs`` and ``top_logprobs``."""
    has_logprobs, top = values.get("request.logprobs"), values.get("request.top_logprobs")
    if top is not None and not has_logprobs:
        text = "'top_logprobs' is only allowed when 'logprobs' is true."
        raise conflict_error("top_logprobs", text)
    if has_logprobs:
        values["logprobs.top"] = top or 0


def _check_modalities(raw: Raw) -> None:
    """Check the type; the words are the worker's business, see ``CHAT_STATEFUL_FIELDS``."""
    value = decode_value(raw)
    if not isinstance(value, list):
        raise invalid_type_error("modalities", "an array of strings", value)
    for i, one in enumerate(value):
        if not isinstance(one, str):
            raise invalid_type_error(f"modalities[{i}]", "a string", one)


# --- completions ----------------------------------------------------------------------------------


def read_completion(
    fields: Mapping[str, Raw],
    rules: RequestRules = DEFAULT_REQUEST_RULES,
    *,
    model: str | None = None,
    client_id: str | None = None,
    timeout: float | None = None,
) -> GenerationRequest:
    """Decode a completion request with one or more prompts. Raises ClientError."""
    name = read_model(fields) if model is None else model
    prompts = read_prompts(fields.get("prompt"), "prompt")
    values = params.read_params(rules.completion, fields)
    _read_shared_fields(values, fields, client_id, timeout)
    n, best_of = values.get("n") or 1, values.get("best_of")
    if best_of is not None and best_of < n:
        raise conflict_error("best_of", f"'best_of' ({best_of}) must be at least 'n' ({n}).")
    if best_of is not None and best_of > n and values.get("stream"):
        raise conflict_error("best_of", "'best_of' greater than 'n' can't be streamed.")
    if values.get("stopping.max_tokens") is None and rules.default_completion_tokens is not None:
        values["stopping.max_tokens"] = rules.default_completion_tokens
    if values.get("echo") and (top := values.get("logprobs.top")) is not None:
        values["logprobs.prompt"] = top
    values["templating.mode"] = "raw"
    return GenerationRequest(
        model=name,
        kind="completion",
        prompts=prompts,
        output=_read_output_format(values, fields),
        labels=_read_labels(values, {}, rules.completion),
        extra=collect_extra(
            values, fields, rules.completion, COMPLETION_FIELDS, rules.unknown_fields
        ),
        field_extra=read_field_extra(fields),
        **values.build_request_arguments(),
    )


def read_prompts(
    raw: Raw | None, at: str, *, most: int | None = None, blank: bool = True
) -> tuple[Prompt, ...]:
    """One or more prompts: a string, token ids, or a list of either.

    ``most`` is their largest number; ``blank`` allows an empty string.
    """
    value = None if raw is None else decode_value(raw)
    match value:
        case None:
            raise missing_error(at)
        case []:
            raise empty_value_error(at, value)
        case str() | [int(), *_]:
            return (_read_prompt(value, at, blank=blank),)
        case list():
            if most is not None and len(value) > most:
                raise too_long_error(at, most, value)
            if {type(one) for one in value} not in ({str}, {list}):
                raise invalid_type_error(at, _PROMPT_TYPES, value)
            return tuple(
                _read_prompt(one, f"{at}[{i}]", blank=blank) for i, one in enumerate(value)
            )
        case _:
            raise invalid_type_error(at, _PROMPT_TYPES, value)


_PROMPT_TYPES = "a string, array of strings, array of tokens, or array of token arrays"


def _read_prompt(value: Any, at: str, *, blank: bool) -> Prompt:
    if isinstance(value, str):
        if not value and not blank:
            raise empty_value_error(at, value)
        return value
    if not value:
        raise empty_value_error(at, value)
    for i, token in enumerate(value):
        if type(token) is not int:
            raise invalid_type_error(f"{at}[{i}]", "an integer", token)
        if token < 0:
            text = f"Invalid '{at}[{i}]': a token id can't be negative."
            raise InvalidParameter(text, param=f"{at}[{i}]", problem="below", got=token)
    return tuple(value)


# --- embeddings -----------------------------------------------------------------------------------


def read_embedding(
    fields: Mapping[str, Raw],
    rules: RequestRules = DEFAULT_REQUEST_RULES,
    *,
    model: str | None = None,
    client_id: str | None = None,
    timeout: float | None = None,
) -> EmbeddingRequest:
    """Decode an embeddings request. Raises ClientError."""
    name = read_model(fields) if model is None else model
    inputs = read_inputs(fields)
    values = params.read_params(rules.embedding, fields)
    set_request_info(values, fields, client_id, timeout)
    return EmbeddingRequest(
        model=name,
        inputs=inputs,
        labels=_read_labels(values, {}, rules.embedding),
        extra=collect_extra(
            values, fields, rules.embedding, EMBEDDING_FIELDS, rules.unknown_fields
        ),
        **values.build_request_arguments(),
    )


def read_inputs(fields: Mapping[str, Raw]) -> tuple[Prompt, ...]:
    """``input``: one or more texts that are not empty, or their tokens. Raises InvalidParameter."""
    inputs = read_prompts(fields.get("input"), "input", most=MAX_INPUTS, blank=False)
    for i, one in enumerate(inputs):
        if len(one) > MAX_INPUTS and not isinstance(one, str):
            raise too_long_error("input" if len(inputs) == 1 else f"input[{i}]", MAX_INPUTS, one)
    return inputs


# --- shared by all requests -----------------------------------------------------------------------


def set_request_info(
    values: ParsedParams, fields: Mapping[str, Raw], client_id: str | None, timeout: float | None
) -> None:
    """Set the names of the client's fields, its id of the request and its timeout."""
    values.provided_fields = {name for name, raw in fields.items() if raw != NULL}
    if client_id is not None:
        values["client_id"] = client_id
    if timeout is not None:
        values["timeout"] = timeout


def _read_shared_fields(
    values: ParsedParams, fields: Mapping[str, Raw], client_id: str | None, timeout: float | None
) -> None:
    set_request_info(values, fields, client_id, timeout)
    for stop in values.get("stopping.stop", ()):
        if not stop:
            raise empty_value_error("stop", stop)
    if "logit_bias" in values.provided_fields:
        values["sampling.logit_bias"] = _read_logit_bias(fields["logit_bias"])
    if values.get("request.beam_search"):
        width = values.get("sampling.beam_width") or values.get("n") or 1
        values["sampling.beam_width"] = width
    stream = bool(values.get("stream"))
    if "stream_options" in values.provided_fields:
        values["response_options.usage"] = _read_usage_mode(fields["stream_options"], stream=stream)
    elif stream:
        values["response_options.usage"] = "none"


def _read_usage_mode(raw: Raw, *, stream: bool) -> Literal["none", "final", "each"]:
    if not stream:
        text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise conflict_error("stream_options", text)
    options = as_object(raw, "stream_options")
    include_usage = as_optional_bool(options, "include_usage", "stream_options")
    continuous = as_optional_bool(options, "continuous_usage_stats", "stream_options")
    as_optional_bool(options, "include_obfuscation", "stream_options")
    if not include_usage:
        return "none"
    return "each" if continuous else "final"


def _read_logit_bias(raw: Raw) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token, bias_raw in as_object(raw, "logit_bias").items():
        at, bias = f"logit_bias.{token[:32]}", decode_value(bias_raw)
        if not token.isascii() or not token.isdecimal():
            raise invalid_value_error("logit_bias", token, ("token ids",))
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise invalid_type_error(at, "a number", bias)
        if not -100 <= bias <= 100 or math.isnan(bias):  # noqa: PLR2004 - the specification's
            text = f"Invalid '{at}': expected a value between -100 and 100, but got {bias} instead."
            raise InvalidParameter(text, param="logit_bias", problem="value", got=bias)
        biases[int(token)] = float(bias)
    return biases


def _read_output_format(values: ParsedParams, fields: Mapping[str, Raw]) -> OutputFormat | None:
    if values.provided_fields.isdisjoint(_OUTPUT_FIELDS):
        return None
    output, guide = read_response_format(fields), read_structured_outputs(fields)
    if output is not None and guide is not None:
        text = "'structured_outputs' and 'response_format' can't be given together."
        raise conflict_error("structured_outputs", text)
    return output or guide


def _read_labels(
    values: ParsedParams, fields: Mapping[str, Raw], table: ParamTable
) -> dict[str, str]:
    labels = {}
    if not table.label_fields.isdisjoint(values.provided_fields):
        labels = values.get_section("labels")
        identifier = labels.get("safety_identifier", "")
        if len(identifier) > MAX_IDENTIFIER_LENGTH:
            raise too_long_error("safety_identifier", MAX_IDENTIFIER_LENGTH, identifier)
    if "metadata" in fields and "metadata" in values.provided_fields:
        labels |= read_metadata(fields["metadata"])
    return labels


def read_metadata(raw: Raw) -> dict[str, str]:
    """``metadata`` as labels. Raises InvalidParameter."""
    most, longest_key, longest = METADATA_LIMITS
    items = as_object(raw, "metadata")
    if len(items) > most:
        text = f"Invalid 'metadata': too many properties. Expected at most {most}."
        raise InvalidParameter(text, param="metadata", problem="value", got=len(items))
    labels = {}
    for key in items:
        at = f"metadata.{key[:longest_key]}"
        if len(key) > longest_key:
            raise too_long_error(at, longest_key, key)
        text = as_text(items, key, "metadata")
        if len(text) > longest:
            raise too_long_error(at, longest, text)
        labels[f"metadata.{key}"] = text
    return labels


def collect_extra(
    values: ParsedParams,
    fields: Mapping[str, Raw],
    table: ParamTable,
    known_fields: frozenset[str],
    unknown: str,
) -> dict[str, Raw]:
    """The fields in neither ``table`` nor ``known_fields``.

    Raises UnknownParameter if ``unknown`` is ``reject``.
    """
    extra = {
        name: raw
        for name, raw in fields.items()
        if name not in table.by_wire and name not in known_fields and name in values.provided_fields
    }
    if extra and unknown == "reject":
        name = next(iter(extra))
        raise UnknownParameter(f"Unknown parameter: '{name[:64]}'.", param=name[:64])
    return extra if unknown == "forward" else {}
