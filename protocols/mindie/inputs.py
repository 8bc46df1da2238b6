"""Requests of the endpoints that name no model: the server's own, and those after TGI and vLLM.

Source: MindIE-LLM 0695772, single_req_self_develop_infer_interface.cpp,
single_req_tgi_text_infer_interface.cpp, single_req_vllm_infer_interface.cpp, and the choice between
the last two in http_handler.cpp.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Raw

from gateway.core.errors import Malformed
from gateway.core.ports import Call
from gateway.core.types import GenerateRequest
from protocols.mindie import tables
from protocols.mindie.checks import body, get, inner, read, wrong
from protocols.mindie.profiles import RAW, Setup
from protocols.mindie.prompts import LENGTH, Words, read_prompt
from protocols.mindie.requests import PROMPT_COUNTING, build, count, sampling, want
from protocols.params import Values

_MOST_TOKEN = 1 << 20
_ADAPTER = re.compile(r"[a-zA-Z0-9_./-]{1,256}")
_ABNORMAL = "The type of inputs is abnormal"
_EMPTY = "Inputs arr is empty"
_NECESSARY = " must be necessary and data type must be string and length in (0, {limit}]" + LENGTH
_NATIVE = Words(_ABNORMAL, _EMPTY, "Inputs" + _NECESSARY)
_INPUTS = Words(_ABNORMAL, _EMPTY, "Inputs length must be in (0, {limit}], but got {length}")
_PROMPT = Words("The type of prompt is abnormal", "Prompt arr is empty", "Prompt" + _NECESSARY)
NEITHER: Final = (
    '{"Error": "`inputs` or `prompt` must be necessary and data type must be string. Additionally, '
    'the request body must be valid json", "error_type": "validation"}'
)
"""Said as a string that is JSON once more."""


def manner(call: Call) -> Literal["inputs", "prompt"]:
    """Whose manner a request to /generate follows. Raises InvalidParameter for neither."""
    try:
        fields = body(call)
        if get(fields, "prompt") is not None:
            return "prompt"
        if get(fields, "inputs") is not None:
            return "inputs"
    except Malformed:
        pass
    raise wrong(NEITHER, "inputs", "missing")


def read_native(call: Call, setup: Setup, model: str) -> GenerateRequest:
    """/infer and /infer_token: text, or token ids."""
    fields = body(call)
    if "inputs" in fields and "input_id" in fields:
        raise wrong("Input conflict.", "inputs", "conflict")
    if "inputs" in fields:
        if get(fields, "inputs") is None:
            raise wrong("Inputs must not be null", "inputs", "missing")
        prompt = read_prompt(fields, "inputs", setup, _NATIVE)
    elif "input_id" in fields:
        ids = _token_ids(get(fields, "input_id"))
        prompt = {"kind": "completion", "prompts": (ids,), "templating": RAW}
    else:
        raise wrong("Not found inputs.", "inputs", "missing")
    parameters = inner(fields, "parameters")
    values = read(tables.NATIVE, parameters)
    if (stream := get(fields, "stream")) is not None and not isinstance(stream, bool):
        raise wrong("stream must be boolean type.", "stream", "type")
    sampling(values, setup, tokens=tables.DEFAULT_NEW_TOKENS)
    return build(
        values,
        setup,
        tables.NATIVE,
        parameters,
        model=model,
        stream=bool(stream),
        want=want(values, token_ids=True, timing=bool(stream)),
        client_id=setup.get_request_id(call),
        **prompt,
    )


def _token_ids(got: Any) -> tuple[int, ...]:
    if got is None:
        raise wrong("Input_id should not be empty", "input_id", "missing")
    if not isinstance(got, list):
        raise wrong("Parameter input_id must be an array", "input_id", "type")
    if not all(type(one) is int for one in got):
        raise wrong("Parameter input_id must be integer", "input_id", "type")
    if not all(0 <= one <= _MOST_TOKEN for one in got):
        raise wrong("Data element in param input_id is invalid", "input_id")
    if not 0 < len(got) <= _MOST_TOKEN:
        text = f"Inputs token length must be in (0, {_MOST_TOKEN}], but got {len(got)}"
        raise wrong(text, "input_id", "too_long" if got else "empty")
    return tuple(got)


def stream_of(call: Call) -> bool:
    """Whether a request to / wants a stream. Raises InvalidParameter or Malformed."""
    stream = get(body(call), "stream")
    if stream is not None and not isinstance(stream, bool):
        raise wrong("Stream must be boolean type.", "stream", "type")
    return bool(stream)


def read_inputs(call: Call, setup: Setup, model: str, *, stream: bool) -> GenerateRequest:
    """The endpoints after TGI."""
    fields = body(call)
    if get(fields, "inputs") is None:
        text = "Request should contain 'inputs' and the type should be string."
        raise wrong(text, "inputs", "missing")
    prompt = read_prompt(fields, "inputs", setup, _INPUTS)
    parameters = inner(fields, "parameters")
    values = read(tables.INPUTS, parameters)
    if stream and values.get("asked.prefill"):
        text = "The decoder_input_details must not be true when stream is true."
        raise wrong(text, "decoder_input_details", "conflict")
    sampling(values, setup, tokens=tables.DEFAULT_NEW_TOKENS)
    return build(
        values,
        setup,
        tables.INPUTS,
        parameters,
        known=("adapter_id",),
        model=model,
        adapter=_adapter(parameters, values),
        stream=stream,
        want=want(values, token_ids=stream or bool(values.get("asked.details"))),
        client_id=setup.get_request_id(call),
        **prompt,
    )


def _adapter(parameters: Mapping[str, Raw], values: Values) -> str | None:
    got = get(parameters, "adapter_id")
    if got is None:
        return None
    if not isinstance(got, str):
        raise wrong("adapter_id must be string type.", "adapter_id", "type")
    if not _ADAPTER.fullmatch(got):
        raise wrong("The format of adapter_id is invalid.", "adapter_id")
    values.given.add("adapter_id")
    return got


def read_vllm(call: Call, setup: Setup, model: str) -> GenerateRequest:
    """/generate after vLLM: its parameters stand beside the prompt."""
    fields = body(call)
    prompt = read_prompt(fields, "prompt", setup, _PROMPT)
    values = read(tables.PROMPT, fields)
    count(values, PROMPT_COUNTING)
    return build(
        values,
        setup,
        tables.PROMPT,
        fields,
        known=("prompt", "model"),
        model=model,
        client_id=setup.get_request_id(call),
        **prompt,
    )
