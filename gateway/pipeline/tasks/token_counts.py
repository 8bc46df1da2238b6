"""Requests for the tokens of a text, which the gateway estimates where no worker counts them."""

from typing import Final

from gateway.pipeline.responder import send_reply
from gateway.pipeline.state import RequestState
from gateway.pipeline.strategies import find_lost_arguments, get_loss_rule
from gateway.pipeline.tasks.generation import GenerationHandler
from protocols.core.errors import GatewayError, UnsupportedFeature
from protocols.core.extra import remove_extra_fields
from protocols.core.interfaces import HttpResponse, SupportsTokenEstimate
from protocols.core.loss import UnsupportedParameter, build_loss_headers, limit_losses
from protocols.core.request import TokenizeRequest
from protocols.core.token_counts import estimate_prompt_tokens

_ESTIMATED: Final = UnsupportedParameter("input_tokens", "approximated")


class TokenCountHandler:
    """Lets a worker count, or estimates.

    An estimate is a loss: it is reported together with what it leaves out of account, and a model
    that rejects losses gets none.
    """

    reads_body = True

    def __init__(self, generation: GenerationHandler) -> None:
        self._generation = generation

    async def answer(self, request: RequestState) -> None:
        """See ``gateway.pipeline.tasks.registry.EndpointHandler``."""
        try:
            await self._generation.answer(request)
        except GatewayError as error:
            estimate = _estimate(request) if _can_estimate(request, error) else None
            if estimate is None:
                raise
            failure = f"{request.route.target_name} {type(error).__name__}"
            request.record.failed_attempts += (failure,)
            send_reply(request.writer, estimate, request.record, request.headers)


def _can_estimate(request: RequestState, error: GatewayError) -> bool:
    """Whether the target can't count a valid request now, and its model accepts an estimate."""
    is_targets = isinstance(error, UnsupportedFeature) or error.origin != "client"
    if request.writer.started or not is_targets or not hasattr(request, "route"):
        return False
    return get_loss_rule(request.route.model, request.client_request.headers) != "reject"


def _estimate(request: RequestState) -> HttpResponse | None:
    """The response with the estimate; None if the endpoint has no such response."""
    adapter, call, model = request.adapter, request.client_request, request.route.model
    if not isinstance(adapter, SupportsTokenEstimate):
        return None
    try:
        decoded = adapter.decode_request(call, model.info)
    except GatewayError:
        return None
    if not isinstance(decoded, TokenizeRequest):
        return None
    response = adapter.encode_token_count(call, estimate_prompt_tokens(decoded))
    if response is None or get_loss_rule(model, call.headers) == "ignore":
        return response
    lost = (
        _ESTIMATED,
        *(UnsupportedParameter(name, "dropped") for name in decoded.extra),
        *remove_extra_fields(decoded)[1],
        *find_lost_arguments(adapter, call, (), model),
    )
    request.record.unsupported_parameters = limit_losses(lost)
    headers = response.headers + build_loss_headers(request.record.unsupported_parameters)
    return HttpResponse(response.status, response.body, headers)
