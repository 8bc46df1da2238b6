"""Anthropic's endpoints and the adapter for clients and workers."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, Literal
from urllib.parse import parse_qs

import msgspec
from msgspec.structs import replace

from protocols.anthropic import errors, openapi, upstream
from protocols.anthropic.decoder import MessageDecoder
from protocols.anthropic.params import (
    FIELD_NAMES,
    MESSAGE_PARAMS,
    REQUEST_HEADERS,
    RESPONSE_HEADERS,
    STATEFUL_FIELDS,
    THINKING_FIELD_NAMES,
    VERSION_HEADER,
    decode_fields,
    field_error,
    invalid_type_error,
    select_present_fields,
)
from protocols.anthropic.requests import (
    RequestRules,
    is_changed,
    read_display,
    read_model,
    read_request,
)
from protocols.anthropic.responses import MessageEncoder, MessageOptions, TokenCountEncoder
from protocols.core.catalog import Catalog, ModelInfo
from protocols.core.errors import ClientError, GatewayError, UnsupportedFeature
from protocols.core.interfaces import (
    GENERATION_KINDS,
    ClientAdapter,
    ClientRequest,
    Endpoint,
    Headers,
    HttpResponse,
    OpenApiFragment,
    PassthroughRequest,
    RateLimitStatus,
    ResponseContext,
    ResponseDecoder,
    ResponseEncoder,
    RoutingInfo,
    UpstreamRequest,
)
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AnyRequest,
    GenerationRequest,
    KeptKeys,
    Request,
    RequestKind,
    TokenizeRequest,
    build_tokenize_request,
)
from protocols.core.request_headers import RequestHeaders
from protocols.core.response_headers import ResponseHeaders
from protocols.core.stateful import StatefulField
from protocols.json_body import decode_value, read_fields, read_object, read_unchecked_fields
from protocols.prompt import require_generation

_encode = msgspec.json.Encoder().encode

# --- models ---------------------------------------------------------------------------------------

_DEFAULT_PAGE_SIZE: Final = 20
_MAX_PAGE_SIZE: Final = 1000


def _build_model_item(info: ModelInfo, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(info.created, UTC)
    item: dict[str, Any] = {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": info.context_length,
        "max_tokens": info.max_tokens,
    }
    return {key: value for key, value in item.items() if value is not None}


def _build_model_page(query: str, catalog: Catalog) -> dict[str, Any]:
    """A page of the models and their aliases. Raises InvalidParameter."""
    wanted = {name: values[-1] for name, values in parse_qs(query).items()}
    limit = wanted.get("limit", str(_DEFAULT_PAGE_SIZE))
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MAX_PAGE_SIZE):
        text = f"Input should be an integer from 1 to {_MAX_PAGE_SIZE}"
        raise field_error("limit", text, got=limit[:32])
    items = [
        _build_model_item(info, name)
        for info in catalog.list_models()
        for name in info.listed_names
    ]
    names = [item["id"] for item in items]
    before, after = wanted.get("before_id"), wanted.get("after_id")
    end = names.index(before) if before in names else len(items)
    start = names.index(after) + 1 if after in names else 0
    size = int(limit)
    if before in names and after is None:
        start = max(end - size, 0)
        has_more = start > 0
    else:
        has_more = start + size < end
    page = items[start : min(start + size, end)]
    return {
        "data": page,
        "has_more": has_more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


_MIN_INTERVAL: Final = 0.1
"""Seconds."""

# --- the adapter ----------------------------------------------------------------------------------

_ENDPOINTS: Final = (
    Endpoint("POST", "/v1/messages", operation="messages"),
    Endpoint("POST", "/v1/messages/count_tokens", "tokenize", "count_tokens"),
    Endpoint("GET", "/v1/models", "inform", "models"),
    Endpoint("GET", "/v1/models/{model}", "inform", "model", takes_slashes=True),
    Endpoint("HEAD", "/", "inform", "root", public=True),
)


class Anthropic:
    """Anthropic's Messages API.

    ``unknown`` says what happens to fields that the protocol does not have. ``strict_version``
    rejects fields that the version in a request's ``anthropic-version`` header does not have.
    ``server_tools`` says what happens to tools that only the vendor's service runs.
    ``over_limit`` says what happens to a ``max_tokens`` that the model can't generate.
    ``mid_system`` says whether messages of the system between others keep their place, or become
    part of the user's message before, for chat templates that take them only at the head.
    ``heartbeat_interval`` is the seconds of a worker's silence until a ping; a stream starts after
    two of them, and every fourth is an empty delta, since some clients ignore pings.
    """

    name: str = "anthropic"
    profiles: ClassVar[tuple[str, ...]] = ("2023-06-01",)
    model_options: ClassVar[Mapping[str, Any]] = {}
    stateful_fields: Sequence[StatefulField] = STATEFUL_FIELDS
    request_headers: RequestHeaders = REQUEST_HEADERS
    response_headers: ResponseHeaders = RESPONSE_HEADERS
    request_kinds: frozenset[RequestKind] = GENERATION_KINDS
    version_header: ClassVar[str] = VERSION_HEADER
    query_parameters: ClassVar[frozenset[str]] = frozenset({"beta"})
    """It marks requests with fields of a beta, which the header names."""
    own_headers: ClassVar[frozenset[str]] = REQUEST_HEADERS.forwarded | {VERSION_HEADER}
    applies_model_settings: ClassVar[bool] = True

    def __init__(
        self,
        profile: str | None = None,
        *,
        unknown: Literal["ignore", "reject"] = "ignore",
        strict_version: bool = False,
        server_tools: Literal["reject", "drop"] = "reject",
        over_limit: Literal["clamp", "error"] = "clamp",
        mid_system: Literal["keep", "fold"] = "keep",
        heartbeat_interval: float = 15.0,
    ) -> None:
        if profile not in (None, *self.profiles):
            names = ", ".join(self.profiles)
            raise ValueError(f"{self.name} has no profile {profile!r}; it has {names}")
        self.path_prefixes: tuple[str, ...] = ("/v1/messages",)
        self.health_request = UpstreamRequest(
            "/v1/models", b"", upstream.WORKER_HEADERS[1:], method="GET"
        )
        self.endpoints: tuple[Endpoint, ...] = _ENDPOINTS
        self.param_tables = {"messages": MESSAGE_PARAMS}
        if heartbeat_interval < _MIN_INTERVAL:
            raise ValueError(f"heartbeat_interval of {self.name} must be at least {_MIN_INTERVAL}")
        self._options = MessageOptions(heartbeat_interval=heartbeat_interval)
        self._rules = RequestRules(
            unknown=unknown,
            strict_version=strict_version,
            server_tools=server_tools,
            over_limit=over_limit,
            mid_system=mid_system,
        )

    # --- towards clients --------------------------------------------------------------------------

    def read_routing_info(self, call: ClientRequest) -> RoutingInfo:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        fields = read_unchecked_fields(call)
        if fields is None:
            fields = read_object(call.body)  # which raises the error
        fields = select_present_fields(fields)
        model = read_model(fields)
        stream = decode_value(fields["stream"]) if "stream" in fields else False
        if not isinstance(stream, bool):
            raise invalid_type_error("stream", "a valid boolean", stream)
        return RoutingInfo(model, stream=stream)

    def decode_request(self, call: ClientRequest, model: ModelInfo | None = None) -> AnyRequest:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        request = read_request(call, self._rules, model)
        if call.endpoint.operation != "count_tokens":
            return request
        return build_tokenize_request(request, request.extra)

    def create_encoder(
        self, call: ClientRequest, request: AnyRequest, context: ResponseContext
    ) -> ResponseEncoder:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        if isinstance(request, TokenizeRequest):
            return TokenCountEncoder(context)
        assert isinstance(request, GenerationRequest)  # noqa: S101 - no endpoint has another kind
        options = self._options
        thinks = request.reasoning is not None and request.reasoning.include is True
        if thinks or request.stopping.max_tokens == 1:
            fields = read_fields(call)
            options = replace(
                options,
                thinking=read_display(fields) if thinks else "none",
                discards=decode_value(fields["max_tokens"]) == 0,
            )
        return MessageEncoder(request, context, options)

    def encode_error(self, error: GatewayError, call: ClientRequest | None) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        return errors.build_error_response(error, call.id if call else None)

    def encode_token_count(self, call: ClientRequest, count: int) -> HttpResponse:
        """See ``protocols.core.interfaces.SupportsTokenEstimate``."""
        return _build_response(call, {"input_tokens": count})

    def handle_info_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        match call.endpoint.operation:
            case "models":
                return _build_response(call, _build_model_page(call.query, catalog))
            case "model":
                name = call.path_params["model"]
                return _build_response(call, _build_model_item(catalog.find_model(name), name))
            case _:
                return HttpResponse(200, headers=())

    def field_names(self, call: ClientRequest) -> Mapping[str, str]:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        if b'"effort"' not in call.body:  # most requests, without a second parse
            return THINKING_FIELD_NAMES
        config = decode_fields(select_present_fields(read_object(call.body)), "output_config")
        return FIELD_NAMES if "effort" in config else THINKING_FIELD_NAMES

    def rate_limit_headers(
        self, requests: RateLimitStatus | None, tokens: RateLimitStatus | None
    ) -> Headers:
        """See ``protocols.core.interfaces.RateLimitHeaders``."""
        headers: Headers = ()
        for name, one in (("requests", requests), ("tokens", tokens)):
            if one is not None:
                prefix = f"anthropic-ratelimit-{name}"
                headers += (
                    (f"{prefix}-limit", str(one.limit)),
                    (f"{prefix}-remaining", str(one.remaining)),
                )
        return headers

    def openapi_fragment(self) -> OpenApiFragment:
        """See ``protocols.core.interfaces.OpenApiProvider``."""
        return openapi.describe_api()

    # --- towards workers --------------------------------------------------------------------------

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return upstream.find_unsupported_parameters(request, names, self.name)

    def get_kept_keys(self, request: AnyRequest) -> KeptKeys | None:
        """See ``protocols.core.interfaces.KeepsExtraFields``."""
        del request
        return upstream.KEPT_KEYS

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return upstream.encode_request(request, self.name)

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return MessageDecoder(require_generation(request))

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return errors.read_worker_error(status, headers, body)

    def prepare_passthrough(
        self, client: ClientAdapter, call: ClientRequest, context: ResponseContext
    ) -> PassthroughRequest | None:
        """See ``protocols.core.interfaces.SupportsPassthrough``."""
        if not isinstance(client, Anthropic):
            return None
        rules = client._rules  # noqa: SLF001
        may_change = (rules.server_tools, rules.mid_system) != ("reject", "keep")
        if call.endpoint.operation == "count_tokens":
            is_checked = may_change or rules.unknown == "reject" or rules.strict_version
            return None if is_checked else upstream.build_count_passthrough(call, context)
        try:
            request = read_request(call, rules)
            if may_change and is_changed(call, rules):
                return None
        except UnsupportedFeature:  # the worker may support it
            if may_change:
                return None
            info = client.read_routing_info(call)
            request = GenerationRequest(model=info.model, kind="chat", stream=info.stream)
        except ClientError:
            return None
        request = request.bind_target(context.backend_model, self.name, context.context_length)
        encoder = MessageEncoder(request, context, MessageOptions())
        return upstream.build_passthrough(
            call, context, request, encoder, clamps=rules.over_limit == "clamp"
        )


def _build_response(call: ClientRequest, body: dict[str, Any]) -> HttpResponse:
    headers = (
        ("Content-Type", "application/json"),
        ("request-id", errors.format_request_id(call.id)),
    )
    return HttpResponse(200, _encode(body), headers)
