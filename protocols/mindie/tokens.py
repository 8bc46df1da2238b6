"""infer: token ids in, token ids out.

Source: MindIE-LLM 0695772, single_req_triton_token_infer_interface.cpp; its published examples put
the parameters beside the tensor, where the source looks inside it.
"""

from collections.abc import Mapping
from typing import Any, Final

from gateway.core.ports import Call
from gateway.core.types import GenerateRequest
from protocols.mindie import tables
from protocols.mindie.checks import body, first, get, inner, read, wrong
from protocols.mindie.profiles import RAW, Setup
from protocols.mindie.prompts import check_id
from protocols.mindie.requests import build, sampling, want

MOST_TOKENS: Final = 1 << 20


def read_tokens(call: Call, setup: Setup) -> GenerateRequest:
    """infer: one tensor of token ids. Its parameters stand in the tensor, or beside it."""
    fields = body(call)
    name = setup.get_request_id(call)
    inputs = get(fields, "inputs")
    if not isinstance(inputs, list):
        raise wrong("Req should contain 'inputs' and the type should be array.", "inputs", "type")
    if len(inputs) != 1:
        raise wrong("Inputs count must be 1.", "inputs")
    tensor = inputs[0] if isinstance(inputs[0], dict) else {}
    ids = _tensor(tensor)
    client_id = None if (got := get(fields, "id")) is None else check_id(got)
    output_name(get(fields, "outputs"))
    holder = fields if tensor.get("parameters") is None else first(fields["inputs"])
    parameters = inner(holder, "parameters")
    values = read(tables.TOKENS, parameters)
    sampling(values, setup, tokens=tables.DEFAULT_NEW_TOKENS)
    return build(
        values,
        setup,
        tables.TOKENS,
        parameters,
        model=call.path_params["model"],
        kind="completion",
        prompts=(ids,),
        templating=RAW,
        want=want(values, token_ids=True),
        client_id=client_id or name,
    )


def output_name(outputs: Any) -> str:
    """What the answer's tensor is to be called. Raises InvalidParameter."""
    if not isinstance(outputs, list):
        raise wrong("Req should contain 'outputs' and the type should be array.", "outputs", "type")
    if len(outputs) != 1:
        raise wrong(f"Outputs size should be 1, got {len(outputs)}.", "outputs")
    name = outputs[0].get("name") if isinstance(outputs[0], dict) else None
    if not isinstance(name, str):
        raise wrong("Outputs name must be non-empty string.", "outputs[0].name", "type")
    return name or "output0"


def _tensor(tensor: Mapping[str, Any]) -> tuple[int, ...]:
    name, shape = tensor.get("name"), tensor.get("shape")
    kind, data = tensor.get("datatype"), tensor.get("data")
    if not isinstance(name, str):
        text = "Cannot find name in inputs or its type is not string"
        raise wrong(text, "inputs[0].name", "type")
    if len(name) > 256:  # noqa: PLR2004 - the server's number
        raise wrong("The length of name set in inputs exceeds 256.", "inputs[0].name", "too_long")
    length = _length(shape)
    if not isinstance(kind, str):
        text = "Cannot find datatype in inputs or its type is not string"
        raise wrong(text, "inputs[0].datatype", "type")
    if kind != "UINT32":
        raise wrong(f"Unsupported datatype, got {kind[:64]}.", "inputs[0].datatype")
    if not isinstance(data, list):
        text = "Cannot find data in inputs or its type is not array"
        raise wrong(text, "inputs[0].data", "type")
    if len(data) != length:
        raise wrong(f"Data size should be {length}, got {len(data)}.", "inputs[0].data")
    if not all(type(one) is int and one >= 0 for one in data):
        raise wrong("Data element must be integer type.", "inputs[0].data", "type")
    return tuple(data)


def _length(shape: Any) -> int:
    at = "inputs[0].shape"
    if not isinstance(shape, list):
        raise wrong("Cannot find shape in inputs or its type is not array", at, "type")
    if not all(type(one) is int and one >= 0 for one in shape):
        raise wrong("Shape element must be integer type.", at, "type")
    match shape:
        case [length] | [1, length] if 0 < length <= MOST_TOKENS:
            return int(length)
        case _:
            raise wrong(
                "Shape must be at most two-dimensional, and the last element's value must be in "
                f"(0,{MOST_TOKENS}].",
                at,
            )
