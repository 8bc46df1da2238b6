"""What a translation could not carry. A loss is never silent.

A target declares what it carries as a mapping from a field's path in the internal request (such as
``sampling.top_k``) to a ``Carry``. ``losses`` holds a request against it: what the client set and
the target does not carry is a loss.
"""

import re
from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

from protocols.core.request import Request, ResponseOptions

LossReason = Literal["renamed", "clamped", "defaulted", "approximated", "emulated", "dropped"]
"""``emulated``: the gateway did it in the target's stead; only ``renamed`` loses nothing."""


class UnsupportedParameter(Struct, frozen=True):
    """One thing that did not come through as it was sent.

    ``field`` is the client's wire name, ``path`` the one in the internal request, where it has one.
    """

    field: str
    reason: LossReason
    detail: str = ""
    path: str = ""


class ParameterSupport(Struct, frozen=True):
    """How a target takes one field: its wire name there, and the range it takes."""

    wire: str
    minimum: float | None = None
    maximum: float | None = None
    reason: LossReason | None = None
    """Set where the target takes the field only in part."""


_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.\-\[\]]")
_ALWAYS_SUPPORTED = frozenset(
    {"model", "kind", "messages", "prompts", "inputs", "stream", "provided_fields", "client_id",
     "labels", "extra", "source", "timeout", "encoding", "templating.mode", "legacy_functions",
     "tool_choice", *(f"response_options.{name}" for name in ResponseOptions.__struct_fields__)}
)  # fmt: skip
"""What every target carries in some way, what is ours alone, and what is judged on its own."""
_NUMBER_TYPES: Final = (int, float)
_NOT_SUPPORTED: Final = ParameterSupport("", reason="dropped")


def find_unsupported_parameters(
    request: Request,
    carries: Mapping[str, ParameterSupport],
    names: Mapping[str, str],
    *,
    extra: bool = False,
) -> tuple[UnsupportedParameter, ...]:
    """What ``request`` asks that a target of these ``carries`` does not do.

    ``names`` gives the client's wire name of a path, for the report. ``extra``: the target is given
    the fields that the gateway does not know.
    """
    found = [] if extra else [UnsupportedParameter(name, "dropped") for name in request.extra]
    for path, value in request.set_fields.items():
        if path in _ALWAYS_SUPPORTED:
            continue
        carry = carries.get(path, _NOT_SUPPORTED)
        reason, low, high, detail = carry.reason, carry.minimum, carry.maximum, ""
        if reason is None:
            if type(value) not in _NUMBER_TYPES:
                continue
            if low is not None and value < low:
                reason, detail = "clamped", f"{value} to {low}"
            elif high is not None and value > high:
                reason, detail = "clamped", f"{value} to {high}"
            else:
                continue
        elif value is False and "." not in path:
            continue
        found.append(
            UnsupportedParameter(names.get(path, path.rpartition(".")[2]), reason, detail, path)
        )
    return tuple(found)


def format_loss_header(found: tuple[UnsupportedParameter, ...]) -> str:
    """The value of ``x-interlingua-loss``: ``name=reason,name=reason``, at most 2,000 characters.

    A name may be a client's own invention: what a header may not hold becomes ``_``.
    """
    shown = (f"{_UNSAFE_CHARACTERS.sub('_', loss.field[:64])}={loss.reason}" for loss in found)
    return ",".join(shown)[:2000]
