"""Requests of the endpoints that name no model: the server's own, and those after TGI and vLLM.

Source: MindIE-LLM 0695772, single_req_self_develop_infer_interface.cpp,
single_req_tgi_text_infer_interface.cpp, single_req_vllm_infer_interface.cpp, and the choice between
the last two in http_handler.cpp.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Raw

from protocols.core.errors import MalformedRequest
from protocols.core.interfaces import ClientRequest
from protocols.core.request import GenerationRequest
from protocols.mindie import tables
from protocols.mindie.checks import (
    build_param_error,
    get_field,
    read_body_fields,
    read_object_field,
    read_params,
)
from protocols.mindie.profiles import RAW_PROMPT_OPTIONS, MindieConfig
from protocols.mindie.prompts import LENGTH_ERROR_SUFFIX, PromptErrorTexts, read_prompt
from protocols.mindie.requests import (
    VLLM_STYLE_COUNT_ERRORS,
    apply_sampling_defaults,
    build_request,
    build_response_options,
    resolve_choice_count,
)
from protocols.params import ParsedParams

_MAX_TOKEN_ID = 1 << 20
_ADAPTER_ID_PATTERN = re.compile(r"[a-zA-Z0-9_./-]{1,256}")
_INPUTS_TYPE_ERROR = "The type of inputs is abnormal"
_INPUTS_EMPTY_ERROR = "Inputs arr is empty"
_REQUIRED_ERROR_SUFFIX = (
    " must be necessary and data type must be string and length in (0, {limit}]"
    + LENGTH_ERROR_SUFFIX
)
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
MISSING_INPUT_ERROR: Final = (
    '{"Error": "`inputs` or `prompt` must be necessary and data type must be string. Additionally, '
    'the request body must be valid json", "error_type": "validation"}'
)
"""Said as a string that is JSON once more."""


def detect_generate_style(call: ClientRequest) -> Literal["inputs", "prompt"]:
    """Whose manner a request to /generate follows. Raises InvalidParameter for neither."""
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
    """/infer and /infer_token: text, or token ids."""
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
    values = read_params(tables.NATIVE_PARAMS, parameters)
    if (stream := get_field(fields, "stream")) is not None and not isinstance(stream, bool):
        raise build_param_error("stream must be boolean type.", "stream", "type")
    apply_sampling_defaults(values, setup, tokens=tables.DEFAULT_MAX_NEW_TOKENS)
    return build_request(
        values,
        setup,
        tables.NATIVE_PARAMS,
        parameters,
        model=model,
        stream=bool(stream),
        want=build_response_options(values, token_ids=True, timing=bool(stream)),
        client_id=setup.get_request_id(call),
        **prompt,
    )


def _read_token_ids(got: Any) -> tuple[int, ...]:
    if got is None:
        raise build_param_error("Input_id should not be empty", "input_id", "missing")
    if not isinstance(got, list):
        raise build_param_error("Parameter input_id must be an array", "input_id", "type")
    if not all(type(one) is int for one in got):
        raise build_param_error("Parameter input_id must be integer", "input_id", "type")
    if not all(0 <= one <= _MAX_TOKEN_ID for one in got):
        raise build_param_error("Data element in param input_id is invalid", "input_id")
    if not 0 < len(got) <= _MAX_TOKEN_ID:
        text = f"Inputs token length must be in (0, {_MAX_TOKEN_ID}], but got {len(got)}"
        raise build_param_error(text, "input_id", "too_long" if got else "empty")
    return tuple(got)


def read_stream_flag(call: ClientRequest) -> bool:
    """Whether a request to / wants a stream. Raises InvalidParameter or Malformed."""
    stream = get_field(read_body_fields(call), "stream")
    if stream is not None and not isinstance(stream, bool):
        raise build_param_error("Stream must be boolean type.", "stream", "type")
    return bool(stream)


def read_tgi_style_request(
    call: ClientRequest, setup: MindieConfig, model: str, *, stream: bool
) -> GenerationRequest:
    """The endpoints after TGI."""
    fields = read_body_fields(call)
    if get_field(fields, "inputs") is None:
        text = "Request should contain 'inputs' and the type should be string."
        raise build_param_error(text, "inputs", "missing")
    prompt = read_prompt(fields, "inputs", setup, _TGI_STYLE_ERRORS)
    parameters = read_object_field(fields, "parameters")
    values = read_params(tables.TGI_STYLE_PARAMS, parameters)
    if stream and values.get("asked.prefill"):
        text = "The decoder_input_details must not be true when stream is true."
        raise build_param_error(text, "decoder_input_details", "conflict")
    apply_sampling_defaults(values, setup, tokens=tables.DEFAULT_MAX_NEW_TOKENS)
    return build_request(
        values,
        setup,
        tables.TGI_STYLE_PARAMS,
        parameters,
        known=("adapter_id",),
        model=model,
        adapter=_read_adapter(parameters, values),
        stream=stream,
        want=build_response_options(values, token_ids=stream or bool(values.get("asked.details"))),
        client_id=setup.get_request_id(call),
        **prompt,
    )


def _read_adapter(parameters: Mapping[str, Raw], values: ParsedParams) -> str | None:
    got = get_field(parameters, "adapter_id")
    if got is None:
        return None
    if not isinstance(got, str):
        raise build_param_error("adapter_id must be string type.", "adapter_id", "type")
    if not _ADAPTER_ID_PATTERN.fullmatch(got):
        raise build_param_error("The format of adapter_id is invalid.", "adapter_id")
    values.given.add("adapter_id")
    return got


def read_vllm_style_request(
    call: ClientRequest, setup: MindieConfig, model: str
) -> GenerationRequest:
    """/generate after vLLM: its parameters stand beside the prompt."""
    fields = read_body_fields(call)
    prompt = read_prompt(fields, "prompt", setup, _VLLM_STYLE_ERRORS)
    values = read_params(tables.VLLM_STYLE_PARAMS, fields)
    resolve_choice_count(values, VLLM_STYLE_COUNT_ERRORS)
    return build_request(
        values,
        setup,
        tables.VLLM_STYLE_PARAMS,
        fields,
        known=("prompt", "model"),
        model=model,
        client_id=setup.get_request_id(call),
        **prompt,
    )
