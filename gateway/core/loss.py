"""What a translation could not carry. A loss is never silent.

A target declares what it carries as a mapping from a field's path in the internal request (such as
``sampling.top_k``) to a ``Carry``. ``losses`` holds a request against it: what the client set and
the target does not carry is a loss.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct

from gateway.core.types import (
    EmbedRequest,
    GenerateRequest,
    Request,
    Sampling,
    Stopping,
    Templating,
)

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
    low: float | None = None
    high: float | None = None
    reason: Reason | None = None
    """Set where the target takes the field only in part."""


_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-\[\]]")
_SECTIONS = ("sampling", "stopping", "templating", "reasoning", "logprobs")
_SILENT = {"sampling": Sampling(), "stopping": Stopping(), "templating": Templating()}
_NEVER_LOST = frozenset(
    {"model", "kind", "messages", "prompts", "inputs", "stream", "want", "given", "client_id",
     "labels", "extra", "source", "timeout", "encoding", "templating.mode", "legacy_functions",
     "tool_choice"}
)  # fmt: skip
"""What every target carries in some way, what is ours alone, and what is judged on its own."""


def set_fields(request: Request) -> Iterator[tuple[str, Any]]:
    """The path and value of every field that differs from "the client did not say"."""
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if value is None or value is False or value == ():
            continue
        if name in _SECTIONS:
            if value != _SILENT.get(name):
                yield from _section(name, value)
        elif name not in _NEVER_LOST:
            yield name, value


def _section(name: str, section: Struct) -> Iterator[tuple[str, Any]]:
    for field in section.__struct_fields__:
        value = getattr(section, field)
        if value is not None and value != () and (path := f"{name}.{field}") not in _NEVER_LOST:
            yield path, value


def losses(
    request: GenerateRequest | EmbedRequest,
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
    for path, value in set_fields(request):
        carry = carries.get(path)
        wire = names.get(path, path.rpartition(".")[2])
        if carry is None:
            found.append(Loss(wire, "dropped", path=path))
        elif carry.reason is not None:
            found.append(Loss(wire, carry.reason, path=path))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if carry.low is not None and value < carry.low:
                found.append(Loss(wire, "clamped", f"{value} to {carry.low}", path))
            elif carry.high is not None and value > carry.high:
                found.append(Loss(wire, "clamped", f"{value} to {carry.high}", path))
    return tuple(found)


def header(found: tuple[Loss, ...]) -> str:
    """The value of ``x-interlingua-loss``: ``name=reason,name=reason``, at most 2,000 characters.

    A name may be a client's own invention: what a header may not hold becomes ``_``.
    """
    shown = (f"{_UNSAFE.sub('_', loss.field[:64])}={loss.reason}" for loss in found)
    return ",".join(shown)[:2000]
