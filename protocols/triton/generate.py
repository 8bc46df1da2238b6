"""Reading a body of generate and generate_stream."""

from typing import Final

from gateway.core.errors import InvalidParameter, Malformed
from gateway.core.ports import Call
from protocols.triton import document, faults, tensors
from protocols.triton.document import Fields
from protocols.triton.tensors import Sent
from protocols.triton.vocabulary import Profile

_NESTED = "parameters"
_STREAM = "generate_stream"
_SCALARS: Final = (str, int, float, bool)
"""What a parameter that is no tensor may be."""


def read(call: Call, profile: Profile) -> Sent:
    """Tensors and parameters, checked in the order in which they were sent.

    Raises Malformed and InvalidParameter.
    """
    if encoded(call):
        raise faults.encoded()
    fields = document.fields_of(call)
    sent = Sent(call.path_params["model"], request_id(fields), streaming=_flag(fields, profile))
    for name in fields.names:
        if name == _NESTED:
            _nested(sent, fields, profile)
        else:
            _take(sent, fields, name, profile)
    tensors.complete(sent, profile)
    return sent


def encoded(call: Call) -> bool:
    """Whether the body is compressed, which infer takes and generate does not."""
    return faults.ENCODING in call.headers and call.headers[faults.ENCODING] != "identity"


def streams(call: Call, profile: Profile) -> bool:
    """Whether generate_stream answers in pieces; what is wrong with a body, ``read`` says."""
    if call.endpoint.operation != _STREAM:
        return False
    try:
        return streamed(call, profile, flag=_flag(document.fields_of(call), profile))
    except Malformed:
        return True


def streamed(call: Call, profile: Profile, *, flag: bool | None) -> bool:
    """Whether the answer comes in pieces, by the body's flag, where it was sent."""
    asked = profile.streams_by_default if flag is None else flag
    return asked and call.endpoint.operation == _STREAM


def _flag(fields: Fields, profile: Profile) -> bool | None:
    """The flag that asks for a stream, where it was sent."""
    holders = [fields]
    if _NESTED in fields and bytes(fields[_NESTED]).startswith(b"{"):
        holders.append(document.fields(bytes(fields[_NESTED])))
    for holder in holders:
        for name in profile.stream_flags:
            match tensors.flat(document.value(holder[name])) if name in holder else None:
                case [bool() as flag]:
                    return flag
                case _:
                    continue
    return None


def request_id(fields: Fields) -> str | None:
    """The client's name for the request, up to a NUL. Raises InvalidParameter."""
    if "id" not in fields:
        return None
    found = document.value(fields["id"])
    if not isinstance(found, str):
        text = "Unable to parse 'id': attempt to access JSON non-string as string"
        raise faults.wrong_type("id", text)
    return found.partition("\0")[0] or None


def _nested(sent: Sent, fields: Fields, profile: Profile) -> None:
    raw = bytes(fields[_NESTED])
    if not raw.startswith(b"{"):
        text = f"Expected JSON object for keyword: '{_NESTED}': attempt to access JSON non-object"
        raise faults.wrong_type(_NESTED, f"{text} as object")
    try:
        inner = document.fields(raw)
        for name in inner.names:
            _take(sent, inner, name, profile)
    except InvalidParameter as e:
        raise InvalidParameter(
            f"Converting keyword: '{_NESTED}': {e.message}",
            param=f"{_NESTED}.{e.param}",
            problem=e.problem,
        ) from None


def _take(sent: Sent, fields: Fields, name: str, profile: Profile) -> None:
    raw = fields[name]
    what = document.value(raw)
    if name in profile.inputs:
        sent.add_input(tensors.schematic(profile.inputs[name], what, profile))
    elif type(what) in _SCALARS:
        sent.parameters.setdefault(name, raw)
    else:
        raise faults.not_parameter(name)
