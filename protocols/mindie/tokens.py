"""infer: token ids in, token ids out.

Source: MindIE-LLM 0695772, single_req_triton_token_infer_interface.cpp; its published examples put
the parameters beside the tensor, where the source looks inside it.
"""

from collections.abc import Mapping
from typing import Any, Final

from protocols.core.interfaces import ClientRequest
from protocols.core.request import GenerationRequest
from protocols.mindie import tables
from protocols.mindie.checks import (
    build_param_error,
    get_field,
    read_body_fields,
    read_first_object,
    read_object_field,
    read_params,
)
from protocols.mindie.profiles import RAW_PROMPT_OPTIONS, MindieConfig
from protocols.mindie.prompts import check_request_id
from protocols.mindie.requests import apply_sampling_defaults, build_request, build_response_options

MAX_INPUT_TOKENS: Final = 1 << 20


def read_tokens_request(call: ClientRequest, setup: MindieConfig) -> GenerationRequest:
    """infer: one tensor of token ids. Its parameters stand in the tensor, or beside it."""
    fields = read_body_fields(call)
    name = setup.get_request_id(call)
    inputs = get_field(fields, "inputs")
    if not isinstance(inputs, list):
        raise build_param_error(
            "Req should contain 'inputs' and the type should be array.", "inputs", "type"
        )
    if len(inputs) != 1:
        raise build_param_error("Inputs count must be 1.", "inputs")
    tensor = inputs[0] if isinstance(inputs[0], dict) else {}
    ids = _read_token_tensor(tensor)
    client_id = None if (got := get_field(fields, "id")) is None else check_request_id(got)
    read_output_name(get_field(fields, "outputs"))
    holder = fields if tensor.get("parameters") is None else read_first_object(fields["inputs"])
    parameters = read_object_field(holder, "parameters")
    values = read_params(tables.TOKENS_PARAMS, parameters)
    apply_sampling_defaults(values, setup, tokens=tables.DEFAULT_MAX_NEW_TOKENS)
    return build_request(
        values,
        setup,
        tables.TOKENS_PARAMS,
        parameters,
        model=call.path_params["model"],
        kind="completion",
        prompts=(ids,),
        templating=RAW_PROMPT_OPTIONS,
        want=build_response_options(values, token_ids=True),
        client_id=client_id or name,
    )


def read_output_name(outputs: Any) -> str:
    """What the answer's tensor is to be called. Raises InvalidParameter."""
    if not isinstance(outputs, list):
        raise build_param_error(
            "Req should contain 'outputs' and the type should be array.", "outputs", "type"
        )
    if len(outputs) != 1:
        raise build_param_error(f"Outputs size should be 1, got {len(outputs)}.", "outputs")
    name = outputs[0].get("name") if isinstance(outputs[0], dict) else None
    if not isinstance(name, str):
        raise build_param_error("Outputs name must be non-empty string.", "outputs[0].name", "type")
    return name or "output0"


def _read_token_tensor(tensor: Mapping[str, Any]) -> tuple[int, ...]:
    name, shape = tensor.get("name"), tensor.get("shape")
    kind, data = tensor.get("datatype"), tensor.get("data")
    if not isinstance(name, str):
        text = "Cannot find name in inputs or its type is not string"
        raise build_param_error(text, "inputs[0].name", "type")
    if len(name) > 256:  # noqa: PLR2004 - the server's number
        raise build_param_error(
            "The length of name set in inputs exceeds 256.", "inputs[0].name", "too_long"
        )
    length = _read_tensor_length(shape)
    if not isinstance(kind, str):
        text = "Cannot find datatype in inputs or its type is not string"
        raise build_param_error(text, "inputs[0].datatype", "type")
    if kind != "UINT32":
        raise build_param_error(f"Unsupported datatype, got {kind[:64]}.", "inputs[0].datatype")
    if not isinstance(data, list):
        text = "Cannot find data in inputs or its type is not array"
        raise build_param_error(text, "inputs[0].data", "type")
    if len(data) != length:
        raise build_param_error(f"Data size should be {length}, got {len(data)}.", "inputs[0].data")
    if not all(type(one) is int and one >= 0 for one in data):
        raise build_param_error("Data element must be integer type.", "inputs[0].data", "type")
    return tuple(data)


def _read_tensor_length(shape: Any) -> int:
    at = "inputs[0].shape"
    if not isinstance(shape, list):
        raise build_param_error("Cannot find shape in inputs or its type is not array", at, "type")
    if not all(type(one) is int and one >= 0 for one in shape):
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
