"""Decides which of a backend's unsupported parameters the gateway emulates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from gateway.emulation.prompt_echo import strip_echo_and_suffix
from protocols.core.loss import LostHeader, UnsupportedParameter, limit_losses
from protocols.core.request import AnyRequest


class EmulationPlan(Struct, frozen=True):
    """What the gateway emulates for one request.

    ``emulated_fields`` are paths of the internal request; ``unsupported_parameters`` are the
    backend's, of which those in ``emulated_fields`` have the reason ``emulated``.
    """

    unsupported_parameters: tuple[UnsupportedParameter, ...] = ()
    emulated_fields: frozenset[str] = frozenset()

    @property
    def lost_parameters(self) -> tuple[UnsupportedParameter, ...]:
        """The parameters that are not emulated either; a strict request is rejected for them."""
        return tuple(
            one
            for one in self.unsupported_parameters
            if one.reason != "emulated" and not isinstance(one, LostHeader)
        )


NO_EMULATION: Final = EmulationPlan()


def plan_emulation(
    request: AnyRequest, unsupported: Sequence[UnsupportedParameter]
) -> EmulationPlan:
    """The plan for a client's request with these unsupported parameters."""
    if not unsupported:
        return NO_EMULATION
    gateway_fields = _list_gateway_fields(request)
    emulated = frozenset(
        one.path
        for one in unsupported
        if one.path in gateway_fields or _can_emulate(one.path, request)
    )
    losses = (
        replace(one, reason="emulated") if one.path in emulated else one for one in unsupported
    )
    return EmulationPlan(limit_losses(losses), emulated)


def plan_passthrough(changed: Sequence[UnsupportedParameter]) -> EmulationPlan:
    """The plan for a client's own request, of which a worker does not get all."""
    return EmulationPlan(limit_losses(changed)) if changed else NO_EMULATION


def _list_gateway_fields(request: AnyRequest) -> frozenset[str]:
    """The fields that no backend ever gets, since the gateway serves them itself."""
    inner, _ = strip_echo_and_suffix(request)
    if inner is request:
        return frozenset()
    fields = request.__struct_fields__
    return frozenset(one for one in fields if getattr(inner, one) != getattr(request, one))


def _can_emulate(path: str, request: AnyRequest) -> bool:
    check = _EMULATION_CHECKS.get(path)
    return check is not None and check(request)


def _is_always_possible(_: Any) -> bool:
    return True


def _has_only_stop_strings(request: Any) -> bool:
    """Whether no stop token has to be included: only the worker knows its text."""
    return not (request.stopping.include_stop and request.stopping.stop_token_ids)


_EMULATION_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "stopping.stop": _is_always_possible,
    "stopping.include_stop": _has_only_stop_strings,
    "n": _is_always_possible,
    "prompts": _is_always_possible,
    "inputs": _is_always_possible,
}
