"""Prompts for ``/generate`` and ``/generate_stream``, and what can't be asked there."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from protocols import params
from protocols.core import loss
from protocols.core.interfaces import UpstreamRequest
from protocols.core.loss import ParameterSupport, UnsupportedParameter
from protocols.core.request import GenerationRequest
from protocols.rendering import build_prompt
from protocols.tgi import tables
from protocols.tgi.tables import TgiLimits

_encode = msgspec.json.Encoder().encode
_JSON_HEADERS = (("Content-Type", "application/json"),)
_SAMPLING_ONLY_FIELDS = ("temperature", "top_p", "top_k", "typical_p")
"""What a greedy choice makes no use of, and what would make it a draw."""


def encode_generate_request(request: GenerationRequest, limits: TgiLimits) -> UpstreamRequest:
    """The first prompt of a request.

    Only a stream tells how long the prompt was, so a whole answer is asked for as one, too, where
    its usage is wanted. Raises Unsupported for token ids.
    """
    asked = adapt_generate_request(request, limits)
    carried = build_parameter_support(asked, limits)
    said = {path: got for path, got in asked.said.items() if path in carried}
    parameters: dict[str, Any] = params.write_params(tables.build_generate_table(limits), said)
    parameters |= {"details": True, "return_full_text": False}
    if asked.output is not None and "output" in carried:
        parameters["grammar"] = tables.write_output_format(asked.output)
    if asked.logprobs is not None:
        if top := asked.logprobs.top:
            parameters["top_n_tokens"] = (
                min(top, tables.MAX_TOP_TOKENS) if top > 0 else tables.MAX_TOP_TOKENS
            )
        if asked.logprobs.prompt is not None and "logprobs.prompt" in carried:
            parameters["decoder_input_details"] = True
    whole = not request.stream and (
        request.want.usage == "none" or not parameters.keys().isdisjoint(_UNARY_ONLY_PARAMS)
    )
    body = {"inputs": build_prompt(request, None), "parameters": parameters}
    return UpstreamRequest(
        "/generate" if whole else "/generate_stream", _encode(body), _JSON_HEADERS
    )


_UNARY_ONLY_PARAMS = ("best_of", "decoder_input_details")
"""What is refused in a stream."""


def find_unsupported_generate_parameters(
    request: GenerationRequest, limits: TgiLimits, names: Mapping[str, str]
) -> tuple[UnsupportedParameter, ...]:
    """What can't be asked of a request with prompts."""
    asked = adapt_generate_request(request, limits)
    found = loss.find_unsupported_parameters(asked, build_parameter_support(asked, limits), names)
    if len(request.prompts) > 1:
        several = UnsupportedParameter(names.get("prompts", "prompt"), "dropped", path="prompts")
        return (*found, several)
    return found


def adapt_generate_request(request: GenerationRequest, limits: TgiLimits) -> GenerationRequest:
    """The same request, said as it is said here.

    Parameters make a server greedy where they do not say otherwise; without any it draws, and so it
    is to do for a client that says nothing. What means nothing (the whole of the probability, one
    choice, no more stops than are taken) is left out, since it is refused or would be a loss.
    """
    sampling, stopping = request.sampling, request.stopping
    greedy = sampling.do_sample is False or sampling.temperature == 0
    if greedy:
        sampling = replace(sampling, **dict.fromkeys(_SAMPLING_ONLY_FIELDS))
    truncated = stopping.truncate_prompt
    if truncated == -1 or (truncated is None and stopping.overflow == "truncate"):
        truncated = limits.max_prompt_tokens or truncated
    told = stopping.overflow == "error" or truncated is not None
    return replace(
        request,
        n=None if request.n == 1 else request.n,
        best_of=None if request.best_of == 1 else request.best_of,
        sampling=replace(
            sampling,
            do_sample=not greedy,
            top_p=_drop_full_probability(sampling.top_p),
            typical_p=_drop_full_probability(sampling.typical_p),
        ),
        stopping=replace(
            stopping,
            stop=stopping.stop[: limits.max_stop_strings],
            truncate_prompt=truncated,
            overflow=None if told else stopping.overflow,
        ),
    )


def _drop_full_probability(share: float | None) -> float | None:
    """A share of the probability; the whole of it is refused."""
    return None if share is not None and share >= 1 else share


def build_parameter_support(
    request: GenerationRequest, limits: TgiLimits
) -> Mapping[str, ParameterSupport]:
    """What becomes of each field of an ``exact`` request."""
    carried = params.build_parameter_support(tables.build_generate_table(limits))
    carried |= {
        "echo": ParameterSupport(""),
        "logprobs.top": ParameterSupport("top_n_tokens", 0, tables.MAX_TOP_TOKENS),
        "stopping.skip_special_tokens": ParameterSupport(""),
    }
    if not request.stream:
        carried["logprobs.prompt"] = ParameterSupport("decoder_input_details")
    if request.output is not None and tables.write_output_format(request.output) is not None:
        carried["output"] = ParameterSupport("grammar")
    if request.templating.add_special_tokens:
        carried["templating.add_special_tokens"] = ParameterSupport("")
    if request.stopping.truncate_prompt == -1:
        del carried["stopping.truncate_prompt"]
    drawn = request.sampling.do_sample and request.sampling.seed is None
    if request.stream or not drawn or limits.max_best_of == 1:
        del carried["best_of"]
    elif request.n is not None:
        carried["best_of"] = ParameterSupport("best_of", reason="approximated")
    return carried
