"""A client's request as the model takes it: the model's name, its defaults, its limits."""

from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec.structs import replace

from gateway.routing.router import Route
from protocols.core.errors import InvalidParameter
from protocols.core.request import GenerationRequest, Request, SamplingParams, StopConditions

SectionT = TypeVar("SectionT", SamplingParams, StopConditions)

MAX_CHOICES = 8192
"""The most answers to one request, over all its prompts. Each costs memory before it says a word,
and no dialect promises more."""

MAX_TOP_LOGPROBS = 1000
"""The most alternatives told of beside each token. Each has to be found, written and read."""


def apply_model_settings(
    request: Request, route: Route, names: Mapping[str, str], source: str
) -> Request:
    """The request for the route's target.

    ``names`` gives the client's wire names of field paths, ``source`` is its dialect. Raises
    InvalidParameter when the client asks for more than the model's limit, or for more answers than
    anybody may.
    """
    if not isinstance(request, GenerationRequest):
        return request.bind_target(route.target.backend_model, source)
    if request.choice_count > MAX_CHOICES:
        raise _build_limit_error(names.get("n", "n"), MAX_CHOICES, request.choice_count, "in all")
    if request.logprobs is not None and request.logprobs.top > MAX_TOP_LOGPROBS:
        name = names.get("logprobs.top", "logprobs")
        raise _build_limit_error(name, MAX_TOP_LOGPROBS, request.logprobs.top, "here")
    fitted = request.bind_target(route.target.backend_model, source)
    defaults = route.model.defaults
    if defaults.sampling or defaults.stopping:
        sampling = _fill_defaults(request.sampling, defaults.sampling)
        stopping = _fill_defaults(request.stopping, defaults.stopping)
        fitted = replace(fitted, sampling=sampling, stopping=stopping)
    most = route.model.info.max_tokens
    return fitted if most is None else _limit_max_tokens(fitted, most, names)


def select_unset_defaults(
    section: SamplingParams | StopConditions, defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The defaults that hold for ``section``: those of fields of which the client was silent."""
    return {
        name: default for name, default in defaults.items() if getattr(section, name) in (None, ())
    }


def _fill_defaults(section: SectionT, defaults: Mapping[str, Any]) -> SectionT:
    silent = select_unset_defaults(section, defaults)
    return replace(section, **silent) if silent else section


def _limit_max_tokens(
    request: GenerationRequest, most: int, names: Mapping[str, str]
) -> GenerationRequest:
    asked = request.stopping.max_tokens
    if asked is None:
        return replace(request, stopping=replace(request.stopping, max_tokens=most))
    if asked > most:
        param = names.get("stopping.max_tokens", "max_tokens")
        raise _build_limit_error(param, most, asked, "for this model")
    return request


def _build_limit_error(param: str, most: int, asked: int, where: str) -> InvalidParameter:
    text = f"'{param}' must be at most {most} {where}, got {asked}"
    return InvalidParameter(text, param=param, problem="above", got=asked)
