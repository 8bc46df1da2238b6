"""The model's name, defaults and limits, applied to a client's request."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from msgspec.structs import replace

from gateway.routing.router import Route
from protocols.core.errors import InvalidParameter
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import AnyRequest, GenerationRequest, SamplingParams, StopConditions
from protocols.params import Param, build_limit_error

SectionT = TypeVar("SectionT", SamplingParams, StopConditions)
ParamFinder = Callable[[str, Collection[str]], Param | None]
"""See ``protocols.params.find_sent_param``, of an adapter and an operation."""
MAX_CHOICES = 8192
"""The maximum number of choices or samples of a request, over all its prompts. Each costs memory
before its first token, and no protocol promises more."""
MAX_TOP_LOGPROBS = 1000
"""The maximum number of alternatives per token. Each has to be found, written and read."""


def apply_model_settings(
    request: AnyRequest,
    route: Route,
    names: Mapping[str, str],
    source: str,
    find_param: ParamFinder | None = None,
) -> AnyRequest:
    """The request for the route's target.

    ``names`` maps field paths to the client's wire names, ``source`` is its protocol, and
    ``find_param`` finds the row of a field that it sent. Raises InvalidParameter if a parameter
    exceeds the model's limit or one of the gateway's.
    """
    context_length = route.model.info.context_length
    if not isinstance(request, GenerationRequest):
        return request.bind_target(route.target.backend_model, source, context_length)
    if request.sample_count > MAX_CHOICES:
        _raise_choice_limit_error(request, names, find_param)
    if request.logprobs is not None and (top := request.logprobs.top) > MAX_TOP_LOGPROBS:
        for path in ("logprobs.top", "request.top_logprobs"):
            if row := find_param and find_param(path, request.provided_fields):
                raise build_limit_error(row, MAX_TOP_LOGPROBS, top)
        name = names.get("logprobs.top", "logprobs")
        raise _build_limit_error(name, MAX_TOP_LOGPROBS, top, "here")
    fitted = request.bind_target(
        route.target.backend_model, request.source or source, context_length
    )
    defaults = route.model.defaults
    if defaults.sampling or defaults.stopping:
        sampling = _fill_defaults(request.sampling, defaults.sampling)
        stopping = _fill_defaults(request.stopping, defaults.stopping)
        fitted = replace(fitted, sampling=sampling, stopping=stopping)
    limit = route.model.info.max_tokens
    return fitted if limit is None else _limit_max_tokens(fitted, limit, names, find_param)


def select_unset_defaults(
    section: SamplingParams | StopConditions, defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The defaults that apply to ``section``: those of fields that the client did not set."""
    return {
        name: default for name, default in defaults.items() if getattr(section, name) in (None, ())
    }


def _fill_defaults(section: SectionT, defaults: Mapping[str, Any]) -> SectionT:
    unset = select_unset_defaults(section, defaults)
    return replace(section, **unset) if unset else section


def _limit_max_tokens(
    request: GenerationRequest,
    limit: int,
    names: Mapping[str, str],
    find_param: ParamFinder | None,
) -> GenerationRequest:
    requested = request.stopping.max_tokens
    if requested is None:
        return replace(request, stopping=replace(request.stopping, max_tokens=limit))
    if requested >= limit:
        row = find_param and find_param("stopping.max_tokens", request.provided_fields)
        if row and row.exceeds_limit(requested, limit):
            raise build_limit_error(row, limit, requested)
    if requested > limit:
        param = names.get("stopping.max_tokens", "max_tokens")
        raise _build_limit_error(param, limit, requested, "for this model")
    return request


def _raise_choice_limit_error(
    request: GenerationRequest, names: Mapping[str, str], find_param: ParamFinder | None
) -> NoReturn:
    """Raise the error for too many choices, samples or beams: of the field that asks for most."""
    widths = {
        "n": request.n or 1,
        "best_of": request.best_of or 1,
        "sampling.beam_width": request.sampling.beam_width or 1,
    }
    path = max(widths, key=widths.__getitem__)
    most = MAX_CHOICES // (len(request.prompts) or 1)
    row = find_param and most and find_param(path, request.provided_fields)
    if row:
        raise build_limit_error(row, most, widths[path])
    name = names.get(path, path.rpartition(".")[2])
    raise _build_limit_error(name, MAX_CHOICES, request.sample_count, "in all")


def _build_limit_error(param: str, limit: int, value: int, scope: str) -> InvalidParameter:
    text = f"'{param}' must be at most {limit} {scope}, got {value}"
    return InvalidParameter(text, param=param, problem="above", got=value)


def list_clamped_fields(clamped: Mapping[str, str]) -> Iterator[UnsupportedParameter]:
    """The fields that the client's protocol changed to fit the target, as translation loss."""
    for name, detail in clamped.items():
        yield UnsupportedParameter(name, "clamped", detail)
