"""Databricks' endpoints and the adapter for clients and workers."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from msgspec import Raw, json

from protocols.chat.params import invalid_type_error, null_to_none
from protocols.chat.requests import read_model
from protocols.chat.stateful import CHAT_STATEFUL_FIELDS
from protocols.core.catalog import Catalog, ModelInfo
from protocols.core.errors import ClientError, GatewayError
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Endpoint,
    HttpResponse,
    OpenApiFragment,
    PassthroughRequest,
    ResponseContext,
    ResponseEncoder,
    RoutingInfo,
    UpstreamRequest,
)
from protocols.core.request import EmbeddingRequest, Request
from protocols.core.request_headers import RequestHeaders
from protocols.core.stateful import StatefulField
from protocols.databricks import errors, listing, openapi, requests, responses, upstream
from protocols.databricks.params import PARAM_TABLES, REQUEST_HEADERS
from protocols.databricks.requests import RequestTask
from protocols.databricks.upstream import DatabricksUpstream
from protocols.json_body import decode_value, read_object
from protocols.params import Param

_encode = json.Encoder().encode
_CompletionIndex = Literal["prompt", "flat"]
_PATH_PREFIXES = ("/serving-endpoints", "/ai-gateway/mlflow/v1")
_LIST_PATH = "/api/2.0/serving-endpoints"

_ENDPOINTS = (
    Endpoint("POST", "/serving-endpoints/{name}/invocations", operation="invocations"),
    Endpoint(
        "POST",
        "/serving-endpoints/{name}/served-models/{served}/invocations",
        operation="invocations",
    ),
    *(
        endpoint
        for root in _PATH_PREFIXES
        for endpoint in (
            Endpoint("POST", f"{root}/chat/completions", operation="chat"),
            Endpoint("POST", f"{root}/completions", operation="completion"),
            Endpoint("POST", f"{root}/embeddings", operation="embedding"),
            Endpoint("GET", f"{root}/models", "inform", "models", lists_models=True),
        )
    ),
    Endpoint("GET", _LIST_PATH, "inform", "endpoints"),
    Endpoint("GET", f"{_LIST_PATH}/{{name}}", "inform", "endpoint"),
    Endpoint("GET", "/.well-known/databricks-config", "inform", "config", public=True),
)


class Databricks(DatabricksUpstream):
    """Foundation Model APIs and model serving.

    ``stream_default`` is the default of ``stream``: the reference says true, the service's own SDK
    expects false. ``role_rules`` says whether the order of roles is checked. ``completion_index``
    numbers the choices if there are several prompts and several choices each: ``prompt`` gives all
    choices of a prompt the same index, as in the reference, and ``flat`` gives each its own, by
    which OpenAI's clients sort.

    For workers, ``pay_per_token`` marks endpoints that return one choice at a time and accept
    ``error_behavior``. With ``extra_params``, fields that the reference lacks are sent in the field
    of that name, also for clients of other protocols.
    """

    name = "databricks"
    profiles: ClassVar[tuple[str, ...]] = ("2026",)
    model_options: ClassVar[Mapping[str, Any]] = {"pay_per_token": bool}
    applies_model_settings: ClassVar[bool] = True
    stateful_fields: Sequence[StatefulField] = CHAT_STATEFUL_FIELDS
    request_headers: RequestHeaders = REQUEST_HEADERS
    path_prefixes: tuple[str, ...] = (
        "/serving-endpoints",
        "/api/2.0",
        "/ai-gateway",
        "/.well-known",
    )
    endpoints: tuple[Endpoint, ...] = _ENDPOINTS
    param_tables: Mapping[str, tuple[Param, ...]] = PARAM_TABLES
    health_request = UpstreamRequest(_LIST_PATH, b"", method="GET")

    def __init__(
        self,
        profile: str | None = None,
        *,
        stream_default: bool = False,
        role_rules: requests.RoleRules = "lenient",
        completion_index: _CompletionIndex = "flat",
        pay_per_token: bool = False,
        extra_params: bool = False,
    ) -> None:
        if profile not in (None, *self.profiles):
            names = ", ".join(self.profiles)
            raise ValueError(f"databricks has no profile {profile!r}; it has {names}")
        if role_rules not in get_args(requests.RoleRules):
            raise ValueError(f"role_rules is strict or lenient, not {role_rules!r}")
        if completion_index not in get_args(_CompletionIndex):
            raise ValueError(f"completion_index is prompt or flat, not {completion_index!r}")
        self._stream_default = stream_default
        self._role_rules = role_rules
        self._indexes_by_prompt = completion_index == "prompt"
        super().__init__(self.name, pay_per_token=pay_per_token, extra_params=extra_params)
        self._passthrough_rules = upstream.build_passthrough_rules()

    # --- towards clients --------------------------------------------------------------------------

    def read_routing_info(self, call: ClientRequest) -> RoutingInfo:
        """The endpoint's name, from the path or from ``model``, and ``stream``.

        A path with the name of a served entity pins that version. Source: Databricks'
        documentation, "Query individual models behind an endpoint".
        """
        fields = read_object(call.body)
        name, served = _read_endpoint_name(call, fields), call.path_params.get("served")
        return RoutingInfo(name, served, self._is_stream(call, fields))

    def decode_request(self, call: ClientRequest, model: ModelInfo | None = None) -> Request:
        """Decode and check the request."""
        fields = read_object(call.body)
        task = _read_task(call, fields)
        strict = call.endpoint.operation == "invocations"
        if strict:
            requests.check_known_fields(fields, task)
        if self._is_stream(call, fields) and task != "embedding":
            fields["stream"] = Raw(b"true")
        name = _read_endpoint_name(call, fields)
        request = requests.read_request(fields, task, name, order=self._role_rules, wrapped=strict)
        if model is not None:
            requests.check_endpoint_rules(request, pay_per_token=listing.is_pay_per_token(model))
        return request

    def create_encoder(
        self, call: ClientRequest, request: Request, context: ResponseContext
    ) -> ResponseEncoder:
        """Create the encoder of the response."""
        del call
        if isinstance(request, EmbeddingRequest):
            return responses.create_embedding_encoder(request, context)
        return responses.create_generation_encoder(
            request, context, by_prompt=self._indexes_by_prompt
        )

    def encode_error(self, error: GatewayError, call: ClientRequest | None) -> HttpResponse:
        """Encode the error as a response."""
        del call
        return errors.build_error_response(error)

    def handle_info_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """Endpoints, models and the host's metadata. Raises ModelNotFound."""
        match call.endpoint.operation:
            case "endpoints":
                return HttpResponse(
                    200, _encode(listing.build_endpoint_list(catalog.list_models()))
                )
            case "endpoint":
                return HttpResponse(
                    200,
                    _encode(
                        listing.build_endpoint_details(catalog.find_model(call.path_params["name"]))
                    ),
                )
            case "models":
                return HttpResponse(200, _encode(listing.build_model_list(catalog.list_models())))
            case _:  # the host's metadata: each field is optional, and none is true of a gateway
                return HttpResponse(200, b"{}")

    def field_names(self, call: ClientRequest) -> Mapping[str, str]:
        """The wire name of each field path."""
        del call
        return requests.FIELD_NAMES

    def openapi_fragment(self) -> OpenApiFragment:
        """The OpenAPI description of the endpoints."""
        return openapi.describe_api()

    def _is_stream(self, call: ClientRequest, fields: Mapping[str, Raw]) -> bool:
        """Whether to stream; embeddings never do. Raises InvalidParameter."""
        raw = null_to_none(fields.get("stream"))
        value = self._stream_default if raw is None else decode_value(raw)
        if not isinstance(value, bool):
            raise invalid_type_error("stream", "a boolean", value)
        embeds = call.endpoint.operation == "embedding" or (
            call.endpoint.operation == "invocations"
            and "input" in fields
            and "messages" not in fields
        )
        return value and not embeds

    # --- towards workers --------------------------------------------------------------------------

    def prepare_passthrough(
        self, client: ClientAdapter, call: ClientRequest, about: ResponseContext
    ) -> PassthroughRequest | None:
        """See ``SupportsPassthrough``. Only for clients whose order of roles is not checked."""
        if not isinstance(client, Databricks) or client._role_rules == "strict":  # noqa: SLF001
            return None
        try:
            fields = read_object(call.body)
            task, stream = _read_task(call, fields), client._is_stream(call, fields)  # noqa: SLF001
        except ClientError:
            return None
        return upstream.build_passthrough(
            self._passthrough_rules,
            call,
            about,
            task,
            stream=stream,
            by_prompt=client._indexes_by_prompt,  # noqa: SLF001
        )


def _read_endpoint_name(call: ClientRequest, fields: Mapping[str, Raw]) -> str:
    """The endpoint's name; one in the path overrides ``model`` in the body."""
    return call.path_params.get("name") or read_model(fields)


def _read_task(call: ClientRequest, fields: dict[str, Raw]) -> RequestTask:
    match call.endpoint.operation:
        case "chat" | "completion" | "embedding" as task:
            return task
        case _:
            return requests.find_task(fields)
