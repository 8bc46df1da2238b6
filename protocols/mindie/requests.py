"""Client bodies to the internal request: prompts, token ids, native, TGI and vLLM style.

Sources: MindIE-LLM 0695772, src/server/endpoint/single_req_infer_interface/*.cpp. Where the source
and the published pages differ on requests without a temperature: see ``read_prompt_params``.
The choice between TGI and vLLM style is that of http_handler.cpp.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Raw, Struct

from protocols.chat.params import NULL
from protocols.core.errors import MalformedRequest
from protocols.core.extra import read_extra_fields
from protocols.core.interfaces import ClientRequest
from protocols.core.request import (
    ExtraFields,
    FieldPath,
    GenerationRequest,
    Message,
    ResponseOptions,
    TextPart,
)
from protocols.json_body import decode_value
from protocols.mindie import params
from protocols.mindie.errors import MISSING_INPUT_ERROR
from protocols.mindie.messages import (
    PromptPartKeys,
    check_media,
    has_media,
    read_parts,
)
from protocols.mindie.params import (
    PROMPT_OPTIONS_BY_MODE,
    RAW_PROMPT_OPTIONS,
    MindieConfig,
    MindieParamTable,
    build_param_error,
    check_value,
    collect_extra_fields,
    count_utf16_units,
    get_field,
    read_body_fields,
    read_first_object,
    read_object_field,
    read_params,
)
from protocols.params import ParsedParams

MAX_BEAM_TOKENS = 128
PRIORITY_STEP = 51
"""Map priorities 1 to 5 to 0 to 204; in both, lower values go first."""


def get_invalid_length(text: str | Raw, limit: int) -> int | None:
    """Return the length in UTF-16 units if the text is empty or longer than ``limit``."""
    text = text if isinstance(text, str) else bytes(text).decode()
    if text and len(text) * 2 <= limit:
        return None
    length = count_utf16_units(text)
    return None if 0 < length <= limit else length


# --- number of choices ----------------------------------------------------------------------------


class ChoiceCountErrors(Struct, frozen=True):
    """Error texts for conflicting ``best_of`` (b) and ``n`` values."""

    best_of_below_n: str
    best_of_not_n: str
    """For streams; empty if a stream may have more candidates than choices."""
    no_temperature: str
    """For several choices without a temperature, which would all be equal."""
    null_text: str = "None"


CHAT_COUNT_ERRORS = ChoiceCountErrors(
    "best_of must be greater than or equal to n, but best_of is {b}, n is {n}.",
    "best_of must be equal to n in stream mode, but best_of is {b}, n is {n}.",
    "best_of/n can not greater than 1 without using beam search when temperature is 0 or not set, "
    "but best_of is {b}, n is {n}.",
)
COMPLETION_COUNT_ERRORS = ChoiceCountErrors(
    "Best_of must be greater than or equal to n, but best_of is {b} and n is {n}.",
    "best_of must be equal to n, but best_of is {b} and n is {n}.",
    "Best_of and n shouldn't be greater than 1 when sampling is disabled, but best_of is {b} and "
    "n is {n}.",
    "null",
)
VLLM_STYLE_COUNT_ERRORS = ChoiceCountErrors(
    "best_of should greater than or equal to n, but best_of is {b}, n is {n}.",
    "",
    "Best_of/N can not greater than 1 when temperature is 0 or not set, but best_of is {b}, "
    "n is {n}.",
)


def resolve_choice_count(values: ParsedParams, count_errors: ChoiceCountErrors) -> None:
    """Set ``n`` to the number of candidates. Raises InvalidParameter."""
    n, best_of = values.get("n"), values.get("best_of")
    if values.get("request.beams"):
        _resolve_beam_width(values)
        return
    b = best_of or count_errors.null_text
    if best_of is not None and values.get("stream") and count_errors.best_of_not_n and best_of != n:
        text = CHAT_COUNT_ERRORS.best_of_not_n if n is None else count_errors.best_of_not_n
        raise build_param_error(text.format(b=b, n=n), "best_of", "conflict")
    if best_of is not None and n is not None and best_of < n:
        text = count_errors.best_of_below_n.format(b=b, n=n)
        raise build_param_error(text, "best_of", "conflict")
    choices = best_of or n
    if (choices or 1) > 1 and not values.get("sampling.temperature"):
        text = count_errors.no_temperature.format(b=b, n=n or count_errors.null_text)
        raise build_param_error(text, "n", "conflict")
    values["best_of"] = None
    values["n"] = choices


def _resolve_beam_width(values: ParsedParams) -> None:
    max_tokens = values.get("stopping.max_tokens")
    if max_tokens is None or max_tokens > MAX_BEAM_TOKENS:
        raise build_param_error(
            f"Please set the max_tokens to be not larger than {MAX_BEAM_TOKENS} when the "
            "use_beam_search is on.",
            "max_tokens",
            "conflict",
        )
    n = values.get("n") or 1
    values["sampling.beam_width"] = max(values.get("best_of") or 1, n)
    values["best_of"] = None


# --- the internal request -------------------------------------------------------------------------

EMPTY_FIELDS: Final[Mapping[str, Raw]] = {}


def build_request(
    values: ParsedParams,
    setup: MindieConfig,
    table: MindieParamTable,
    fields: Mapping[str, Raw],
    *,
    read_elsewhere: tuple[str, ...] = (),
    beside: Mapping[str, Raw] = EMPTY_FIELDS,
    **more: Any,
) -> GenerationRequest:
    """Build the request from the values that ``table`` read from ``fields``.

    ``read_elsewhere`` are further wire fields that have been read, ``beside`` those next to
    ``fields`` that nobody knows; ``more`` are fields of the request.
    """
    if (priority := values.get("priority")) is not None:
        values["priority"] = (priority - 1) * PRIORITY_STEP
    if (seconds := values.get("timeout")) is not None:
        values["timeout"] = float(seconds)
    if setup.max_iter_times is not None:
        max_tokens = values.get("stopping.max_tokens") or setup.max_iter_times
        values["stopping.max_tokens"] = min(max_tokens, setup.max_iter_times)
    if beside:
        values_beside: dict[FieldPath, Any] = {
            (name,): decode_value(raw) for name, raw in beside.items()
        }
        more["field_extra"] = (*more.get("field_extra", ()), ExtraFields("", values_beside))
    extra = collect_extra_fields(table, fields, read_elsewhere)
    return GenerationRequest(**{**values.build_request_arguments(), "extra": extra, **more})


def find_fields_beside(fields: Mapping[str, Raw], *known: str) -> dict[str, Raw]:
    """The fields next to ``parameters`` that nobody knows."""
    return {name: raw for name, raw in fields.items() if name not in known and raw != NULL}


def read_prompt_params(
    table: MindieParamTable, fields: Mapping[str, Raw], setup: MindieConfig
) -> ParsedParams:
    """Read the parameters of an endpoint that is not OpenAI-style, and set its defaults.

    A request without sampling is greedy; in the early releases that is every request with neither
    ``do_sample`` nor a temperature (inferred from the published default of ``do_sample``, not
    measured).
    """
    values = read_params(table, fields)
    if values.get("stopping.max_tokens") is None:
        values["stopping.max_tokens"] = params.DEFAULT_MAX_NEW_TOKENS
    do_sample = values.get("sampling.do_sample")
    silent = setup.profile.early and values.get("sampling.temperature") is None
    if do_sample is False or (do_sample is None and silent):
        values["sampling.temperature"] = 0.0
    return values


def build_response_options(
    values: ParsedParams, *, token_ids: bool = False, timing: bool = False
) -> ResponseOptions:
    """Build the response options."""
    details = bool(values.get("request.details") or values.get("request.prefill"))
    return ResponseOptions(details=details, timing=details or timing, token_ids=token_ids)


# generate and generate_stream, and what all prompt endpoints share.
#
# Source: MindIE-LLM 0695772, single_req_triton_text_infer_interface.cpp; in 1.0.RC1 the published
# page of generate_stream.

_REQUIRED_ERROR_SUFFIX: Final = (
    " must be necessary and data type must be string and length in (0, {limit}]"
    ", but the length of inputs is {length}"
)
_REQUEST_ID_PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,256}")
_REQUEST_ID_ERROR = (
    "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 "
    "words in length."
)


class PromptErrorTexts(Struct, frozen=True):
    """An endpoint's error texts for a prompt of a wrong type, an empty list and a wrong length."""

    wrong_type: str
    empty_list: str
    wrong_length: str


def check_request_id(value: Any, *, early: bool = False) -> str:
    """Read the client's request id. Raises InvalidParameter."""
    request_id: str = check_value(value, str, "id", "id must be string type.")
    if not (request_id if early else _REQUEST_ID_PATTERN.fullmatch(request_id)):
        raise build_param_error(_REQUEST_ID_ERROR, "id")
    return request_id


def _read_request_id(fields: Mapping[str, Raw], generated_id: str, *, early: bool = False) -> str:
    """Read the request id of the body, if it has one. Raises InvalidParameter."""
    value = get_field(fields, "id")
    return generated_id if value is None else check_request_id(value, early=early) or generated_id


def read_text_request(
    call: ClientRequest, setup: MindieConfig, *, stream: bool
) -> GenerationRequest:
    """Read a generate request: ``text_input`` and ``parameters``."""
    fields = read_body_fields(call)
    name = setup.get_request_id(call)
    client_id = _read_request_id(fields, name, early=setup.profile.early)
    prompt = _read_text_input(fields, setup, name)
    parameters = read_object_field(fields, "parameters")
    table = setup.profile.text_params
    values = read_prompt_params(table, parameters, setup)
    timing = get_field(parameters, "perf_stat") is True
    return build_request(
        values,
        setup,
        table,
        parameters,
        model=call.path_params["model"],
        stream=stream,
        response_options=build_response_options(values, timing=timing),
        client_id=client_id,
        beside=find_fields_beside(fields, "text_input", "parameters", "id"),
        **prompt,
    )


def _read_text_input(fields: Mapping[str, Raw], setup: MindieConfig, name: str) -> dict[str, Any]:
    error_texts = PromptErrorTexts(
        f"The type of text_input is abnormal. The requestId is {name}",
        "Parameter text_input arr is empty",
        "text_input" + _REQUIRED_ERROR_SUFFIX,
    )
    value = get_field(fields, "text_input")
    if value is None:
        raise build_param_error("The text_input not found", "text_input", "missing")
    if isinstance(value, list) and setup.profile.early:
        raise build_param_error(error_texts.wrong_type, "text_input", "type")
    return read_prompt(fields, "text_input", setup, error_texts)


def read_prompt(
    fields: Mapping[str, Raw], key: str, setup: MindieConfig, error_texts: PromptErrorTexts
) -> dict[str, Any]:
    """Convert a prompt (text or parts) to request fields. Raises InvalidParameter."""
    value, limit = get_field(fields, key), setup.profile.max_text_length
    extra: tuple[ExtraFields, ...] = ()
    if isinstance(value, list):
        if not value:
            raise build_param_error(error_texts.empty_list, key, "empty")
        check_media(value)
    elif not isinstance(value, str):
        raise build_param_error(error_texts.wrong_type, key, "type")
    length = get_invalid_length(value if isinstance(value, str) else fields[key], limit)
    if length is not None:
        text = error_texts.wrong_length.format(limit=limit, length=length)
        raise build_param_error(text, key, "too_long" if length else "empty")
    if isinstance(value, list) and has_media(value):
        # The server places media in the prompt itself, as in a user message.
        message = Message("user", read_parts(value, key))
        templating = PROMPT_OPTIONS_BY_MODE["chat"]
        return {"kind": "chat", "messages": (message,), "templating": templating}
    if isinstance(value, list):
        message = Message("user", read_parts(value, key))
        value = message.text
        extra = _find_unknown_part_keys(message)
    return {
        "kind": "completion",
        "prompts": (value,),
        "templating": setup.templating,
        "field_extra": extra,
    }


def _find_unknown_part_keys(message: Message) -> tuple[PromptPartKeys, ...]:
    texts = tuple([part.text for part in message.parts if isinstance(part, TextPart)])
    return tuple(
        PromptPartKeys(extra.at, extra.values, (f"text_input[{i}]",), texts)
        for i, part in enumerate(message.parts)
        if (extra := part.extra) is not None
    )


_MAX_TOKEN_ID = 1 << 20
_ADAPTER_ID_PATTERN = re.compile(r"[a-zA-Z0-9_./-]{1,256}")
_INPUTS_TYPE_ERROR = "The type of inputs is abnormal"
_INPUTS_EMPTY_ERROR = "Inputs arr is empty"
_NATIVE_ERRORS = PromptErrorTexts(
    _INPUTS_TYPE_ERROR, _INPUTS_EMPTY_ERROR, "Inputs" + _REQUIRED_ERROR_SUFFIX
)
_TGI_STYLE_ERRORS = PromptErrorTexts(
    _INPUTS_TYPE_ERROR,
    _INPUTS_EMPTY_ERROR,
    "Inputs length must be in (0, {limit}], but got {length}",
)
_VLLM_STYLE_ERRORS = PromptErrorTexts(
    "The type of prompt is abnormal", "Prompt arr is empty", "Prompt" + _REQUIRED_ERROR_SUFFIX
)


def detect_generate_style(call: ClientRequest) -> Literal["inputs", "prompt"]:
    """Whether a /generate request is TGI or vLLM style. Raises InvalidParameter for neither."""
    try:
        fields = read_body_fields(call)
        if get_field(fields, "prompt") is not None:
            return "prompt"
        if get_field(fields, "inputs") is not None:
            return "inputs"
    except MalformedRequest:
        pass
    raise build_param_error(MISSING_INPUT_ERROR, "inputs", "missing")


def read_native_request(call: ClientRequest, setup: MindieConfig, model: str) -> GenerationRequest:
    """Read an /infer or /infer_token request: text, or token ids."""
    fields = read_body_fields(call)
    if "inputs" in fields and "input_id" in fields:
        raise build_param_error("Input conflict.", "inputs", "conflict")
    if "inputs" in fields:
        if get_field(fields, "inputs") is None:
            raise build_param_error("Inputs must not be null", "inputs", "missing")
        prompt = read_prompt(fields, "inputs", setup, _NATIVE_ERRORS)
    elif "input_id" in fields:
        ids = _read_token_ids(get_field(fields, "input_id"))
        prompt = {"kind": "completion", "prompts": (ids,), "templating": RAW_PROMPT_OPTIONS}
    else:
        raise build_param_error("Not found inputs.", "inputs", "missing")
    parameters = read_object_field(fields, "parameters")
    values = read_prompt_params(params.NATIVE_PARAMS, parameters, setup)
    stream = _read_stream(fields, "stream must be boolean type.")
    return build_request(
        values,
        setup,
        params.NATIVE_PARAMS,
        parameters,
        model=model,
        stream=stream,
        response_options=build_response_options(values, token_ids=True, timing=stream),
        beside=find_fields_beside(fields, "inputs", "input_id", "parameters", "stream"),
        client_id=setup.get_request_id(call),
        **prompt,
    )


def _read_token_ids(value: Any) -> tuple[int, ...]:
    ids: list[Any] = check_value(
        value,
        list,
        "input_id",
        "Parameter input_id must be an array",
        missing="Input_id should not be empty",
    )
    if not all(type(token) is int for token in ids):
        raise build_param_error("Parameter input_id must be integer", "input_id", "type")
    if not all(0 <= token <= _MAX_TOKEN_ID for token in ids):
        raise build_param_error("Data element in param input_id is invalid", "input_id")
    if not 0 < len(ids) <= _MAX_TOKEN_ID:
        text = f"Inputs token length must be in (0, {_MAX_TOKEN_ID}], but got {len(ids)}"
        raise build_param_error(text, "input_id", "too_long" if ids else "empty")
    return tuple(ids)


def read_stream_flag(call: ClientRequest) -> bool:
    """Whether a request to / is streamed. Raises InvalidParameter or MalformedRequest."""
    return _read_stream(read_body_fields(call), "Stream must be boolean type.")


def _read_stream(fields: Mapping[str, Raw], wrong_type: str) -> bool:
    stream = get_field(fields, "stream")
    return stream is not None and bool(check_value(stream, bool, "stream", wrong_type))


def read_tgi_style_request(
    call: ClientRequest, setup: MindieConfig, model: str, *, stream: bool
) -> GenerationRequest:
    """Read a request of the TGI-style endpoints."""
    fields = read_body_fields(call)
    if get_field(fields, "inputs") is None:
        text = "Request should contain 'inputs' and the type should be string."
        raise build_param_error(text, "inputs", "missing")
    prompt = read_prompt(fields, "inputs", setup, _TGI_STYLE_ERRORS)
    parameters = read_object_field(fields, "parameters")
    values = read_prompt_params(params.TGI_STYLE_PARAMS, parameters, setup)
    if stream and values.get("request.prefill"):
        text = "The decoder_input_details must not be true when stream is true."
        raise build_param_error(text, "decoder_input_details", "conflict")
    return build_request(
        values,
        setup,
        params.TGI_STYLE_PARAMS,
        parameters,
        read_elsewhere=("adapter_id",),
        model=model,
        adapter=_read_adapter(parameters, values),
        stream=stream,
        response_options=build_response_options(
            values, token_ids=stream or bool(values.get("request.details"))
        ),
        beside=find_fields_beside(fields, "inputs", "parameters", "stream"),
        client_id=setup.get_request_id(call),
        **prompt,
    )


def _read_adapter(parameters: Mapping[str, Raw], values: ParsedParams) -> str | None:
    adapter: str | None = get_field(parameters, "adapter_id")
    if adapter is not None:
        check_value(adapter, str, "adapter_id", "adapter_id must be string type.")
        if not _ADAPTER_ID_PATTERN.fullmatch(adapter):
            raise build_param_error("The format of adapter_id is invalid.", "adapter_id")
        values.provided_fields.add("adapter_id")
    return adapter


def read_vllm_style_request(
    call: ClientRequest, setup: MindieConfig, model: str
) -> GenerationRequest:
    """Read a vLLM-style /generate request: its parameters are next to the prompt."""
    fields = read_body_fields(call)
    prompt = read_prompt(fields, "prompt", setup, _VLLM_STYLE_ERRORS)
    values = read_params(params.VLLM_STYLE_PARAMS, fields)
    resolve_choice_count(values, VLLM_STYLE_COUNT_ERRORS)
    return build_request(
        values,
        setup,
        params.VLLM_STYLE_PARAMS,
        fields,
        read_elsewhere=("prompt", "model"),
        model=model,
        client_id=setup.get_request_id(call),
        **prompt,
    )


# infer: token ids in, token ids out.
#
# Source: MindIE-LLM 0695772, single_req_triton_token_infer_interface.cpp; its published examples
# put the parameters next to the tensor, while the source reads them inside it.

MAX_INPUT_TOKENS: Final = 1 << 20


def read_tokens_request(call: ClientRequest, setup: MindieConfig) -> GenerationRequest:
    """Read an infer request: a tensor of token ids, its parameters inside or next to it."""
    fields = read_body_fields(call)
    name = setup.get_request_id(call)
    text = "Req should contain 'inputs' and the type should be array."
    inputs = check_value(get_field(fields, "inputs"), list, "inputs", text)
    if len(inputs) != 1:
        raise build_param_error("Inputs count must be 1.", "inputs")
    tensor = inputs[0] if isinstance(inputs[0], dict) else {}
    ids = _read_token_tensor(tensor)
    client_id = _read_request_id(fields, name)
    outputs = get_field(fields, "outputs")
    read_output_name(outputs)
    unknown = (
        read_extra_fields(tensor, "inputs[0]", _INPUT_KEYS),
        read_extra_fields(outputs[0], "outputs[0]", _OUTPUT_KEYS),
    )
    is_inside = tensor.get("parameters") is not None
    parameters = read_object_field(
        read_first_object(fields["inputs"]) if is_inside else fields, "parameters"
    )
    values = read_prompt_params(params.TOKENS_PARAMS, parameters, setup)
    return build_request(
        values,
        setup,
        params.TOKENS_PARAMS,
        parameters,
        model=call.path_params["model"],
        kind="completion",
        prompts=(ids,),
        templating=RAW_PROMPT_OPTIONS,
        response_options=build_response_options(values, token_ids=True),
        field_extra=tuple([one for one in unknown if one is not None]),
        beside=find_fields_beside(fields, "inputs", "outputs", "parameters", "id"),
        client_id=client_id,
    )


_INPUT_KEYS: Final = dict.fromkeys(("name", "datatype", "shape", "data", "parameters"))
_OUTPUT_KEYS: Final = {"name": None}


def read_output_name(outputs: Any) -> str:
    """Read the name of the output tensor. Raises InvalidParameter."""
    text = "Req should contain 'outputs' and the type should be array."
    check_value(outputs, list, "outputs", text)
    if len(outputs) != 1:
        raise build_param_error(f"Outputs size should be 1, got {len(outputs)}.", "outputs")
    name = outputs[0].get("name") if isinstance(outputs[0], dict) else None
    check_value(name, str, "outputs[0].name", "Outputs name must be non-empty string.")
    return name or "output0"


def _read_token_tensor(tensor: Mapping[str, Any]) -> tuple[int, ...]:
    name = _read_tensor_field(tensor, "name", str)
    if len(name) > 256:  # noqa: PLR2004 - the server's number
        text = "The length of name set in inputs exceeds 256."
        raise build_param_error(text, "inputs[0].name", "too_long")
    length = _read_tensor_length(_read_tensor_field(tensor, "shape", list))
    datatype = _read_tensor_field(tensor, "datatype", str)
    if datatype != "UINT32":
        text = f"Unsupported datatype, got {datatype[:64]}."
        raise build_param_error(text, "inputs[0].datatype")
    data = _read_tensor_field(tensor, "data", list)
    if len(data) != length:
        raise build_param_error(f"Data size should be {length}, got {len(data)}.", "inputs[0].data")
    if not are_unsigned(data):
        raise build_param_error("Data element must be integer type.", "inputs[0].data", "type")
    return tuple(data)


def _read_tensor_field(tensor: Mapping[str, Any], name: str, kind: type) -> Any:
    expected = "string" if kind is str else "array"
    text = f"Cannot find {name} in inputs or its type is not {expected}"
    return check_value(tensor.get(name), kind, f"inputs[0].{name}", text)


def _read_tensor_length(shape: list[Any]) -> int:
    at = "inputs[0].shape"
    if not are_unsigned(shape):
        raise build_param_error("Shape element must be integer type.", at, "type")
    match shape:
        case [length] | [1, length] if 0 < length <= MAX_INPUT_TOKENS:
            return int(length)
        case _:
            raise build_param_error(
                "Shape must be at most two-dimensional, and the last element's value must be in "
                f"(0,{MAX_INPUT_TOKENS}].",
                at,
            )


def are_unsigned(items: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in items)


# --- tools, templates, output ---------------------------------------------------------------------


# --- completions ----------------------------------------------------------------------------------
