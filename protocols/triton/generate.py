"""Reading a body of generate and generate_stream."""

from typing import Final

from protocols.core.errors import InvalidParameter, MalformedRequest
from protocols.core.interfaces import ClientRequest
from protocols.triton import document, faults, tensors
from protocols.triton.document import OrderedFields
from protocols.triton.tensors import TritonRequest
from protocols.triton.vocabulary import TritonProfile

_PARAMETERS_KEY = "parameters"
_STREAM = "generate_stream"
_SCALAR_TYPES: Final = (str, int, float, bool)
"""What a parameter that is no tensor may be."""


def read_generate_request(call: ClientRequest, profile: TritonProfile) -> TritonRequest:
    """Tensors and parameters, checked in the order in which they were sent.

    Raises Malformed and InvalidParameter.
    """
    if is_compressed(call):
        raise faults.build_encoding_error()
    fields = document.fields_of(call)
    sent = TritonRequest(
        call.path_params["model"],
        read_request_id(fields),
        streaming=_find_stream_flag(fields, profile),
    )
    for name in fields.names:
        if name == _PARAMETERS_KEY:
            _read_nested_parameters(sent, fields, profile)
        else:
            _read_field(sent, fields, name, profile)
    tensors.check_inputs(sent, profile)
    return sent


def is_compressed(call: ClientRequest) -> bool:
    """Whether the body is compressed, which infer takes and generate does not."""
    return (
        faults.CONTENT_ENCODING_HEADER in call.headers
        and call.headers[faults.CONTENT_ENCODING_HEADER] != "identity"
    )


def read_stream_flag(call: ClientRequest, profile: TritonProfile) -> bool:
    """Whether generate_stream answers in pieces; what is wrong with a body, ``read`` says."""
    if call.endpoint.operation != _STREAM:
        return False
    try:
        return is_streamed(call, profile, flag=_find_stream_flag(document.fields_of(call), profile))
    except MalformedRequest:
        return True


def is_streamed(call: ClientRequest, profile: TritonProfile, *, flag: bool | None) -> bool:
    """Whether the answer comes in pieces, by the body's flag, where it was sent."""
    asked = profile.streams_by_default if flag is None else flag
    return asked and call.endpoint.operation == _STREAM


def _find_stream_flag(fields: OrderedFields, profile: TritonProfile) -> bool | None:
    """The flag that asks for a stream, where it was sent."""
    holders = [fields]
    if _PARAMETERS_KEY in fields and bytes(fields[_PARAMETERS_KEY]).startswith(b"{"):
        holders.append(document.parse_fields(bytes(fields[_PARAMETERS_KEY])))
    for holder in holders:
        for name in profile.stream_flags:
            match (
                tensors.flatten_values(document.parse_value(holder[name]))
                if name in holder
                else None
            ):
                case [bool() as flag]:
                    return flag
                case _:
                    continue
    return None


def read_request_id(fields: OrderedFields) -> str | None:
    """The client's name for the request, up to a NUL. Raises InvalidParameter."""
    if "id" not in fields:
        return None
    found = document.parse_value(fields["id"])
    if not isinstance(found, str):
        text = "Unable to parse 'id': attempt to access JSON non-string as string"
        raise faults.build_type_error("id", text)
    return found.partition("\0")[0] or None


def _read_nested_parameters(
    sent: TritonRequest, fields: OrderedFields, profile: TritonProfile
) -> None:
    raw = bytes(fields[_PARAMETERS_KEY])
    if not raw.startswith(b"{"):
        text = f"Expected JSON object for keyword: '{_PARAMETERS_KEY}': attempt to access JSON non-object"
        raise faults.build_type_error(_PARAMETERS_KEY, f"{text} as object")
    try:
        inner = document.parse_fields(raw)
        for name in inner.names:
            _read_field(sent, inner, name, profile)
    except InvalidParameter as e:
        raise InvalidParameter(
            f"Converting keyword: '{_PARAMETERS_KEY}': {e.message}",
            param=f"{_PARAMETERS_KEY}.{e.param}",
            problem=e.problem,
        ) from None


def _read_field(
    sent: TritonRequest, fields: OrderedFields, name: str, profile: TritonProfile
) -> None:
    raw = fields[name]
    what = document.parse_value(raw)
    if name in profile.inputs:
        sent.add_input(tensors.build_tensor(profile.inputs[name], what, profile))
    elif type(what) in _SCALAR_TYPES:
        sent.parameters.setdefault(name, raw)
    else:
        raise faults.build_parameter_type_error(name)
