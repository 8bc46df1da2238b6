"""Which of the losses that a backend reports the gateway makes up for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from gateway.core.loss import Loss
from gateway.core.types import Request
from gateway.emulation.affixes import around


class Plan(Struct, frozen=True):
    """What the gateway will do for one request.

    ``does`` holds paths of the internal request; ``losses`` are the backend's, those among them
    with the reason ``emulated``.
    """

    unsupported_parameters: tuple[Loss, ...] = ()
    emulated_fields: frozenset[str] = frozenset()

    @property
    def lost_parameters(self) -> tuple[Loss, ...]:
        """The losses that nobody makes up for: what a strict client is refused for."""
        return tuple(one for one in self.unsupported_parameters if one.reason != "emulated")


_NOTHING: Final = Plan()


def planned(request: Request, found: Sequence[Loss]) -> Plan:
    """The plan for a request, as the client sent it, whose losses are ``found``."""
    if not found:
        return _NOTHING
    taken = _taken(request)
    does = frozenset(one.path for one in found if one.path in taken or _can(one.path, request))
    losses = (replace(one, reason="emulated") if one.path in does else one for one in found)
    return Plan(tuple(losses), does)


def _taken(request: Request) -> frozenset[str]:
    """The fields that no backend ever sees."""
    inner, _ = around(request)
    fields = request.__struct_fields__
    return frozenset(one for one in fields if getattr(inner, one) != getattr(request, one))


def _can(path: str, request: Request) -> bool:
    able = _ABLE.get(path)
    return able is not None and able(request)


def _always(_: Any) -> bool:
    return True


def _strings_only(request: Any) -> bool:
    """Only the worker knows the text of a stop token that is to stay."""
    return not (request.stopping.include_stop and request.stopping.stop_token_ids)


_ABLE: Final[Mapping[str, Callable[[Any], bool]]] = {
    "stopping.stop": _always,
    "stopping.include_stop": _strings_only,
    "n": _always,
    "prompts": _always,
    "inputs": _always,
}
