"""What a translation could not carry. A loss is never silent.

A target declares what it carries as a mapping from a field's path in the internal request (such as
``sampling.top_k``) to a ``Carry``. ``losses`` holds a request against it: what the client set and
the target does not carry is a loss.
"""

import re
from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

from gateway.core.types import Request, Want

Reason = Literal["renamed", "clamped", "defaulted", "approximated", "emulated", "dropped"]
"""``emulated``: the gateway did it in the target's stead; only ``renamed`` loses nothing."""


class Loss(Struct, frozen=True):
    """One thing that did not come through as it was sent.

    ``field`` is the client's wire name, ``path`` the one in the internal request, where it has one.
    """

    field: str
    reason: Reason
    detail: str = ""
    path: str = ""


class Carry(Struct, frozen=True):
    """How a target takes one field: its wire name there, and the range it takes."""

    wire: str
    minimum: float | None = None
    maximum: float | None = None
    reason: Reason | None = None
    """Set where the target takes the field only in part."""


_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-\[\]]")
_NEVER_LOST = frozenset(
    {"model", "kind", "messages", "prompts", "inputs", "stream", "given", "client_id", "labels",
     "extra", "source", "timeout", "encoding", "templating.mode", "legacy_functions",
     "tool_choice", *(f"want.{name}" for name in Want.__struct_fields__)}
)  # fmt: skip
"""What every target carries in some way, what is ours alone, and what is judged on its own."""
_NUMBERS: Final = (int, float)
_NOWHERE: Final = Carry("", reason="dropped")


def losses(
    request: Request,
    carries: Mapping[str, Carry],
    names: Mapping[str, str],
    *,
    extra: bool = False,
) -> tuple[Loss, ...]:
    """What ``request`` asks that a target of these ``carries`` does not do.

    ``names`` gives the client's wire name of a path, for the report. ``extra``: the target is given
    the fields that the gateway does not know.
    """
    found = [] if extra else [Loss(name, "dropped") for name in request.extra]
    for path, value in request.said.items():
        if path in _NEVER_LOST:
            continue
        carry = carries.get(path, _NOWHERE)
        reason, low, high, detail = carry.reason, carry.minimum, carry.maximum, ""
        if reason is None:
            if type(value) not in _NUMBERS:
                continue
            if low is not None and value < low:
                reason, detail = "clamped", f"{value} to {low}"
            elif high is not None and value > high:
                reason, detail = "clamped", f"{value} to {high}"
            else:
                continue
        elif value is False and "." not in path:
            continue
        found.append(Loss(names.get(path, path.rpartition(".")[2]), reason, detail, path))
    return tuple(found)


def header(found: tuple[Loss, ...]) -> str:
    """The value of ``x-interlingua-loss``: ``name=reason,name=reason``, at most 2,000 characters.

    A name may be a client's own invention: what a header may not hold becomes ``_``.
    """
    shown = (f"{_UNSAFE.sub('_', loss.field[:64])}={loss.reason}" for loss in found)
    return ",".join(shown)[:2000]
