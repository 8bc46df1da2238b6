"""Triton's endpoints and the adapter: the decoder and encoder of each endpoint."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from msgspec import structs

from protocols import params
from protocols.core.catalog import Catalog, ModelInfo
from protocols.core.errors import (
    GatewayError,
    InvalidParameter,
    MalformedRequest,
    Overloaded,
    PathNotFound,
    UnsupportedEncoding,
    UnsupportedFeature,
)
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Endpoint,
    HttpResponse,
    OpenApiFragment,
    PassthroughRequest,
    PromptRenderer,
    ResponseContext,
    ResponseEncoder,
    RoutingInfo,
    UpstreamRequest,
)
from protocols.core.request import AnyRequest, GenerationRequest
from protocols.core.request_headers import RequestHeaders
from protocols.core.stateful import StatefulField
from protocols.triton import errors, infer_requests, openapi, passthrough, requests
from protocols.triton.errors import StatusMode
from protocols.triton.infer_responses import InferEncoder, NumberEncoder
from protocols.triton.metadata import InfoHandler
from protocols.triton.params import (
    EMBEDDING,
    GUIDE_PARAM_NAMES,
    PROFILES,
    REQUEST_HEADERS,
    RERANK,
    STATEFUL_FIELDS,
    TritonProfile,
    select_profile,
)
from protocols.triton.requests import PromptMode
from protocols.triton.responses import GenerateEncoder
from protocols.triton.upstream import TritonUpstream

_MODEL_PATH = "/v2/models/{model}"
_VERSION_PATH = f"{_MODEL_PATH}/versions/{{version}}"
_MAX_VERSION = 2**63 - 1
_INFERENCE_OPERATIONS = ("generate", "generate_stream", "infer")


def _build_info_endpoint(method: str, path: str, variant: str, *, open_: bool = False) -> Endpoint:
    return Endpoint(method, path, "inform", variant, open_, strict_slash=True)


def _build_model_endpoints(root: str) -> tuple[Endpoint, ...]:
    return (
        Endpoint("POST", f"{root}/generate", operation="generate", strict_slash=True),
        Endpoint("POST", f"{root}/generate_stream", operation="generate_stream", strict_slash=True),
        Endpoint("POST", f"{root}/infer", operation="infer", strict_slash=True),
        _build_info_endpoint("GET", root, "model"),
        _build_info_endpoint("GET", f"{root}/ready", "model_ready"),
        _build_info_endpoint("GET", f"{root}/config", "config"),
        _build_info_endpoint("GET", f"{root}/stats", "model_stats"),
    )


_JSON_LENGTH = re.compile("[0-9]{1,18}")


class Triton(TritonUpstream):
    """Triton Inference Server's HTTP protocol: generate, generate_stream, and infer for text.

    ``profile`` is the model family that clients expect. ``status``: error statuses as in Triton
    (``strict``) or by HTTP semantics (``sane``). ``prompts``: a prompt goes to the model unchanged
    (``raw``), or as a user message (``chat``).

    Towards workers, ``profile`` is the family of their models, and ``fields`` are their own names,
    such as ``{text_input: PROMPT}``. ``max_tokens`` is sent to models that require it if the
    client sent none. ``renderer`` renders messages to prompts. A worker's model is ``NAME``, or
    ``NAME/versions/2`` for a version.
    """

    profiles: ClassVar[tuple[str, ...]] = tuple(PROFILES)
    model_options: ClassVar[Mapping[str, Any]] = {}
    name: str = "triton"
    applies_model_settings: ClassVar[bool] = True
    stateful_fields: Sequence[StatefulField] = STATEFUL_FIELDS
    request_headers: RequestHeaders = REQUEST_HEADERS
    path_prefixes: tuple[str, ...] = ("/v2",)
    endpoints: tuple[Endpoint, ...] = (
        _build_info_endpoint("GET", "/v2", "server"),
        _build_info_endpoint("GET", "/v2/health/live", "live", open_=True),
        _build_info_endpoint("GET", "/v2/health/ready", "ready", open_=True),
        _build_info_endpoint("GET", "/v2/models/stats", "stats"),
        *_build_model_endpoints(_MODEL_PATH),
        *_build_model_endpoints(_VERSION_PATH),
        _build_info_endpoint("POST", "/v2/repository/index", "index"),
        _build_info_endpoint("POST", "/v2/repository/models/{model}/load", "load"),
        _build_info_endpoint("POST", "/v2/repository/models/{model}/unload", "unload"),
        _build_info_endpoint("POST", "/v2/repository/{repository}/index", "index"),
        _build_info_endpoint(
            "POST", "/v2/repository/{repository}/models/{model}/load", "elsewhere"
        ),
        _build_info_endpoint(
            "POST", "/v2/repository/{repository}/models/{model}/unload", "elsewhere"
        ),
        _build_info_endpoint("GET", "/v2/systemsharedmemory/status", "memory"),
        _build_info_endpoint("GET", "/v2/cudasharedmemory/status", "memory"),
    )

    def __init__(
        self,
        profile: str | None = None,
        *,
        status: StatusMode = "strict",
        prompts: PromptMode = "raw",
        fields: Mapping[str, str] | None = None,
        max_tokens: int = 512,
        renderer: PromptRenderer | None = None,
    ) -> None:
        name = profile or self.profiles[0]
        if name not in PROFILES:
            known = ", ".join(self.profiles)
            raise ValueError(f"there is no profile {name!r} of triton; accepted: {known}")
        if status not in {"strict", "sane"}:
            raise ValueError(f"the status of triton is strict or sane, not {status!r}")
        if prompts not in requests.TEMPLATING_MODES:
            raise ValueError(f"the prompts of triton are raw or chat, not {prompts!r}")
        super().__init__(
            PROFILES[name], fields=fields or {}, max_tokens=max_tokens, renderer=renderer
        )
        self._status_mode: StatusMode = status
        self._templating_mode = requests.TEMPLATING_MODES[prompts]
        self._has_custom_fields = bool(fields)
        self._info_handler = InfoHandler(self._profile, status)
        self._field_names = {
            streamed: _build_field_names(self._profile, streamed=streamed)
            for streamed in (False, True)
        }
        self.health_request = UpstreamRequest("/v2/health/ready", b"", method="GET")
        self.param_tables: Mapping[str, tuple[params.Param, ...]] = dict.fromkeys(
            _INFERENCE_OPERATIONS, self._profile.parameters
        )

    def get_json_size(self, endpoint: Endpoint, headers: Mapping[str, str], size: int) -> int:
        """See ``protocols.core.interfaces.HasBinaryData``. A wrong header is refused later."""
        length = headers.get(errors.JSON_LENGTH_HEADER, "")
        if endpoint.operation != "infer" or _JSON_LENGTH.fullmatch(length) is None:
            return size
        return min(int(length), size)

    def read_routing_info(self, call: ClientRequest) -> RoutingInfo:
        """Read the model from the path, and from the body whether generate_stream streams.

        Raises PathNotFound, and InvalidParameter for an invalid version.
        """
        stream = requests.read_stream_flag(call, self._profile)
        return RoutingInfo(call.path_params["model"], _read_version(call), stream)

    def decode_request(self, call: ClientRequest, model: ModelInfo | None = None) -> AnyRequest:
        """Decode the request. Raises MalformedRequest, InvalidParameter and UnsupportedFeature."""
        is_infer = call.endpoint.operation == "infer"
        read = infer_requests.read_infer_request if is_infer else requests.read_generate_request
        profile = select_profile(model, self._profile)
        request = read(call, profile)
        if profile is EMBEDDING:
            return requests.build_embedding_request(request)
        if profile is RERANK:
            return requests.build_rerank_request(request)
        stream = requests.is_streamed(call, self._profile, flag=request.streaming)
        return requests.build_request(request, self._profile, self._templating_mode, stream=stream)

    def create_encoder(
        self, call: ClientRequest, request: AnyRequest, about: ResponseContext
    ) -> ResponseEncoder:
        """Create the encoder of the response."""
        is_infer = call.endpoint.operation == "infer"
        outputs = infer_requests.read_requested_outputs(call) if is_infer else None
        framed = call.endpoint.operation == "generate_stream"
        if not isinstance(request, GenerationRequest):
            return NumberEncoder(request.client_id, about, outputs, framed=framed)
        if outputs is not None:
            return InferEncoder(request, about, self._profile, outputs)
        return GenerateEncoder(request, about, self._profile, framed=framed)

    def encode_error(self, error: GatewayError, call: ClientRequest | None) -> HttpResponse:
        """Encode the error in this protocol."""
        request_id = None
        if call is not None:
            error = _explain_decompression_error(error, call)
            if isinstance(error, Overloaded):  # only this text names the request
                request_id = requests.find_request_id(call)
        return errors.build_error_response(error, call, self._status_mode, request_id)

    def handle_info_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """Build a response about the server and its models. Raises ClientError."""
        version = _read_version(call)
        if version is not None:
            call = _set_version(call, version)
        return self._info_handler.handle_request(call, catalog)

    def field_names(self, call: ClientRequest) -> Mapping[str, str]:
        """Return the profile's field names, without prompt echo for streams."""
        return self._field_names[call.endpoint.operation == "generate_stream"]

    def openapi_fragment(self) -> OpenApiFragment:
        """Return the OpenAPI fragment of generate, generate_stream and infer."""
        return openapi.describe_api(self._profile, self._status_mode)

    # --- towards workers --------------------------------------------------------------------------

    def prepare_passthrough(
        self, client: ClientAdapter, call: ClientRequest, about: ResponseContext
    ) -> PassthroughRequest | None:
        """See ``protocols.core.interfaces.SupportsPassthrough``.

        Any generate or generate_stream body is passed on if client and worker have one profile: the
        worker itself knows best what its model accepts.
        """
        alike = isinstance(client, Triton) and client._can_pass_to(self._profile)  # noqa: SLF001
        collects = call.endpoint.operation == "generate" and self.streams_always(
            about.backend_model
        )
        return (
            passthrough.build_passthrough(call, about, self._profile, collects=collects)
            if alike and not self._has_custom_fields
            else None
        )

    def _can_pass_to(self, profile: TritonProfile) -> bool:
        return (
            self._profile is profile and self._templating_mode == requests.TEMPLATING_MODES["raw"]
        )


def _explain_decompression_error(error: GatewayError, call: ClientRequest) -> GatewayError:
    """Replace the error of a body that can't be decompressed, as the server does."""
    is_encoding_error = isinstance(error, MalformedRequest) and error.problem == "encoding"
    is_inference = call.endpoint.operation in _INFERENCE_OPERATIONS
    if is_inference and (is_encoding_error or isinstance(error, UnsupportedEncoding)):
        try:
            requests.check_encoding(call)
        except (InvalidParameter, UnsupportedFeature) as encoding_error:
            return encoding_error
    return error


def _build_field_names(profile: TritonProfile, *, streamed: bool) -> Mapping[str, str]:
    names = params.map_field_names(profile.parameters)
    if profile.exclude_prompt_flags and not streamed:
        names["echo"] = profile.exclude_prompt_flags[0]
    if wires := GUIDE_PARAM_NAMES[profile.guide_style]:
        names["output"] = wires[0]
    return names


def _read_version(call: ClientRequest) -> str | None:
    """Return the version without leading zeros. Raises PathNotFound unless it is a number."""
    if "version" not in call.path_params:
        return None
    version = call.path_params["version"]
    if not (version.isascii() and version.isdigit()):
        raise PathNotFound("a version is a number")
    if len(version.lstrip("0")) > len(str(_MAX_VERSION)) or int(version) > _MAX_VERSION:
        text = f"failed to get model version from specified version string '{version}' (details:"
        raise errors.build_value_error(
            "version", f"{text} stol), version should be an integral value > 0"
        )
    return str(int(version))


def _set_version(call: ClientRequest, version: str) -> ClientRequest:
    return structs.replace(call, path_params={**call.path_params, "version": version})
