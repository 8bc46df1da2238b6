"""Prompts for ``/generate`` and ``/generate_stream``, and what can't be asked there."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.core import loss
from gateway.core.loss import Carry, Loss
from gateway.core.ports import WireRequest
from gateway.core.types import GenerateRequest
from protocols import params
from protocols.rendering import prompt_of
from protocols.tgi import tables
from protocols.tgi.tables import Limits

_encode = msgspec.json.Encoder().encode
_JSON = (("Content-Type", "application/json"),)
_WORTHLESS = ("temperature", "top_p", "top_k", "typical_p")
"""What a greedy choice makes no use of, and what would make it a draw."""


def encode(request: GenerateRequest, limits: Limits) -> WireRequest:
    """The first prompt of a request.

    Only a stream tells how long the prompt was, so a whole answer is asked for as one, too, where
    its usage is wanted. Raises Unsupported for token ids.
    """
    asked = exact(request, limits)
    carried = carries(asked, limits)
    said = {path: got for path, got in asked.said.items() if path in carried}
    parameters: dict[str, Any] = params.write(tables.generate(limits), said)
    parameters |= {"details": True, "return_full_text": False}
    if asked.output is not None and "output" in carried:
        parameters["grammar"] = tables.form(asked.output)
    if asked.logprobs is not None:
        if top := asked.logprobs.top:
            parameters["top_n_tokens"] = min(top, tables.MOST_TOP) if top > 0 else tables.MOST_TOP
        if asked.logprobs.prompt is not None and "logprobs.prompt" in carried:
            parameters["decoder_input_details"] = True
    whole = not request.stream and (
        request.want.usage == "none" or not parameters.keys().isdisjoint(_ONLY_WHOLE)
    )
    body = {"inputs": prompt_of(request, None), "parameters": parameters}
    return WireRequest("/generate" if whole else "/generate_stream", _encode(body), _JSON)


_ONLY_WHOLE = ("best_of", "decoder_input_details")
"""What is refused in a stream."""


def losses(request: GenerateRequest, limits: Limits, names: Mapping[str, str]) -> tuple[Loss, ...]:
    """What can't be asked of a request with prompts."""
    asked = exact(request, limits)
    found = loss.losses(asked, carries(asked, limits), names)
    if len(request.prompts) > 1:
        several = Loss(names.get("prompts", "prompt"), "dropped", path="prompts")
        return (*found, several)
    return found


def exact(request: GenerateRequest, limits: Limits) -> GenerateRequest:
    """The same request, said as it is said here.

    Parameters make a server greedy where they do not say otherwise; without any it draws, and so it
    is to do for a client that says nothing. What means nothing (the whole of the probability, one
    choice, no more stops than are taken) is left out, since it is refused or would be a loss.
    """
    sampling, stopping = request.sampling, request.stopping
    greedy = sampling.do_sample is False or sampling.temperature == 0
    if greedy:
        sampling = replace(sampling, **dict.fromkeys(_WORTHLESS))
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
            top_p=_part(sampling.top_p),
            typical_p=_part(sampling.typical_p),
        ),
        stopping=replace(
            stopping,
            stop=stopping.stop[: limits.max_stop_strings],
            truncate_prompt=truncated,
            overflow=None if told else stopping.overflow,
        ),
    )


def _part(share: float | None) -> float | None:
    """A share of the probability; the whole of it is refused."""
    return None if share is not None and share >= 1 else share


def carries(request: GenerateRequest, limits: Limits) -> Mapping[str, Carry]:
    """What becomes of each field of an ``exact`` request."""
    carried = params.carries(tables.generate(limits))
    carried |= {
        "echo": Carry(""),
        "logprobs.top": Carry("top_n_tokens", 0, tables.MOST_TOP),
        "stopping.skip_special_tokens": Carry(""),
    }
    if not request.stream:
        carried["logprobs.prompt"] = Carry("decoder_input_details")
    if request.output is not None and tables.form(request.output) is not None:
        carried["output"] = Carry("grammar")
    if request.templating.add_special_tokens:
        carried["templating.add_special_tokens"] = Carry("")
    if request.stopping.truncate_prompt == -1:
        del carried["stopping.truncate_prompt"]
    drawn = request.sampling.do_sample and request.sampling.seed is None
    if request.stream or not drawn or limits.max_best_of == 1:
        del carried["best_of"]
    elif request.n is not None:
        carried["best_of"] = Carry("best_of", reason="approximated")
    return carried
