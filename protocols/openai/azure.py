"""Azure OpenAI: a profile of OpenAI's API with paths, errors and content-filter fields of its own.

The model is a deployment in the path, and the query has an ``api-version``. Below ``/openai/v1``
all is as in OpenAI's API. Sources: Azure's data-plane specifications of 2024-10-21 and v1; the
paths that openai-python's AzureOpenAI calls.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs, quote

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from protocols import json_body
from protocols.chat import errors
from protocols.chat.params import invalid_type_error, null_to_none
from protocols.core.aggregate import UnaryResponse
from protocols.core.catalog import Catalog
from protocols.core.errors import (
    ContentFiltered,
    DeadlineExceeded,
    GatewayError,
    InternalError,
    InvalidParameter,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    PathNotFound,
    QuotaExceeded,
    RateLimitExceeded,
    Unauthorized,
    UnsupportedFeature,
    WorkerError,
    WorkerUnreachable,
)
from protocols.core.events import Event
from protocols.core.interfaces import (
    ClientRequest,
    Endpoint,
    Headers,
    HttpResponse,
    PassthroughReader,
    ResponseContext,
    ResponseDecoder,
    ResponseEncoder,
    UpstreamRequest,
)
from protocols.core.json_text import JsonDecoder
from protocols.core.request import Request
from protocols.core.token_counts import has_implausible_counts
from protocols.json_body import decode_value, read_object, read_unchecked_fields
from protocols.openai.proxied import DEPLOYMENT_OPERATIONS, PATHS
from protocols.passthrough_readers import NameReplacer, VerbatimStreamReader

PROFILE: Final = "azure"
ROOT: Final = "/openai"
V1_ROOT: Final = f"{ROOT}/v1"
DEFAULT_API_VERSION: Final = "2024-10-21"
_VERSION_PATTERN: Final = re.compile(r"\d{4}-\d\d-\d\d(-preview)?", re.ASCII)
_encode = msgspec.json.Encoder().encode
_decode = JsonDecoder().decode
_decode_chunk = JsonDecoder(dict[str, Any]).decode

_DEPLOYMENT_CALLS: Final = (
    ("chat/completions", "chat"),
    ("completions", "completion"),
    ("embeddings", "embedding"),
)


def _build_deployment_endpoints(root: str) -> tuple[Endpoint, ...]:
    deployment = f"{root}/deployments/{{deployment}}"
    return (
        *(
            Endpoint("POST", f"{deployment}/{path}", operation=operation)
            for path, operation in _DEPLOYMENT_CALLS
        ),
        *(
            Endpoint("POST", deployment + PATHS[operation], "proxy", operation)
            for operation in DEPLOYMENT_OPERATIONS
        ),
    )


ENDPOINTS: Final = (
    *_build_deployment_endpoints(ROOT),
    *_build_deployment_endpoints(V1_ROOT),  # AzureOpenAI with such a base URL adds the deployment
    Endpoint("GET", f"{ROOT}/models", "inform", "models"),
    Endpoint("GET", f"{ROOT}/models/{{model}}", "inform", "model"),
    Endpoint("GET", f"{ROOT}/deployments", "inform", "deployments"),
)
"""Those of Azure alone; those below ``/openai/v1`` are OpenAI's."""


def check_request(call: ClientRequest) -> None:
    """Check the query's ``api-version``, which ``/openai/v1`` does not need.

    Raises PathNotFound if it is missing, and InvalidParameter if it is no date.
    """
    if _is_v1(call):
        return
    versions = parse_qs(call.query).get("api-version")
    if not versions:
        raise PathNotFound("Resource not found", method=call.endpoint.method, path=call.path)
    if not _VERSION_PATTERN.fullmatch(versions[0]):
        text = "The api-version must be a date, such as 2024-10-21 or 2025-01-01-preview."
        raise InvalidParameter(text, param="api-version", got=versions[0])


def read_fields(call: ClientRequest) -> Mapping[str, Raw]:
    """The fields of the body, with the deployment of the path as the model. Raises ClientError."""
    fields = json_body.read_fields(call)
    if "data_sources" in fields:
        raise UnsupportedFeature("'data_sources' is not supported.", param="data_sources")
    deployment = get_deployment(call)
    return fields if deployment is None else {**fields, "model": Raw(_encode(deployment))}


def get_deployment(call: ClientRequest) -> str | None:
    """The deployment in the path, whose name counts instead of the body's model."""
    return call.path_params.get("deployment")


def read_stream(call: ClientRequest) -> bool:
    """Whether to stream. Raises MalformedRequest and InvalidParameter."""
    fields = read_unchecked_fields(call)
    if fields is None:
        fields = read_object(call.body)  # which raises the error
    raw = null_to_none(fields.get("stream"))
    value = False if raw is None else decode_value(raw)
    if not isinstance(value, bool):
        raise invalid_type_error("stream", "a boolean", value)
    return value


def list_deployments(catalog: Catalog) -> Any:
    """The response of the listing."""
    cards = [
        {"id": name, "model": model.name, "object": "deployment", "status": "succeeded"}
        for model in catalog.list_models()
        for name in model.listed_names
    ]
    return {"object": "list", "data": cards}


def _is_v1(call: ClientRequest) -> bool:
    return call.endpoint.path.startswith(V1_ROOT)


# --- errors ---------------------------------------------------------------------------------------

_CODES: Final[Mapping[type[GatewayError], str]] = {
    ModelNotFound: "DeploymentNotFound",
    PathNotFound: "404",
    MethodNotAllowed: "405",
    Unauthorized: "401",
    RateLimitExceeded: "429",
    QuotaExceeded: "429",
    Overloaded: "503",
    WorkerUnreachable: "503",
    DeadlineExceeded: "Timeout",
    WorkerError: "InternalServerError",
    InternalError: "InternalServerError",
}
"""The codes of errors that are no errors of a field."""


def build_error_response(error: GatewayError, call: ClientRequest | None) -> HttpResponse:
    """The response to ``error``; below ``/openai/v1`` it is OpenAI's."""
    reply = errors.build_error_response(error)
    if call is not None and _is_v1(call):
        return reply
    _, openai_body = errors.build_error_body(error)
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), None)
    body: dict[str, Any]
    if code is not None:
        body = {"code": code, "message": _get_message(error, openai_body.message, call)}
    elif isinstance(error, InvalidParameter) and error.param == "api-version":
        body = {"code": "BadRequest", "message": error.message}
    else:
        body = msgspec.to_builtins(openai_body)
    if isinstance(error, ContentFiltered):
        inner = {
            "code": "ResponsibleAIPolicyViolation",
            "content_filter_result": error.filter_results or {},
        }
        body |= {"param": "prompt", "type": None, "status": 400, "innererror": inner}
    return replace(reply, body=_encode({"error": body}))


def _get_message(error: GatewayError, message: str, call: ClientRequest | None) -> str:
    match error:
        case ModelNotFound():
            return (
                "The API deployment for this resource does not exist. If you created the "
                "deployment within the last 5 minutes, please wait a moment and try again."
            )
        case PathNotFound():
            return "Resource not found"
        case Unauthorized():
            return (
                "Access denied due to invalid subscription key or wrong API endpoint. Make sure "
                "to provide a valid key for an active subscription and use a correct regional API "
                "endpoint for your resource."
            )
        case RateLimitExceeded() | QuotaExceeded():
            name = "this operation" if call is None else f"the {call.endpoint.operation} operation"
            wait = max(1, round(error.retry_after or 1))
            return f"Requests to {name} have exceeded the limit. Please retry after {wait} seconds."
        case _:
            return message


def read_filter_results(body: bytes) -> Mapping[str, Any] | None:
    """The categories in a worker's error for a filtered prompt, which is JSON, if it has them."""
    match _decode(body):
        case {"error": {"innererror": {"content_filter_result": dict() as results}}}:
            return results
        case _:
            return None


# --- workers --------------------------------------------------------------------------------------


def build_health_request(api_version: str) -> UpstreamRequest:
    """The listing of models."""
    path = f"{V1_ROOT}/models" if api_version == "v1" else f"{ROOT}/models?{_query(api_version)}"
    return UpstreamRequest(path, b"", method="GET")


def create_path_builder(api_version: str) -> Callable[[str], str]:
    """Builds a worker's path from that below ``/v1``; ``{model}`` stands for the deployment."""
    if api_version == "v1":
        return f"{V1_ROOT}/{{}}".format
    return lambda path: f"{ROOT}/deployments/{{model}}/{path}?{_query(api_version)}"


def build_proxied_path(operation: str, model: str, api_version: str) -> str | None:
    """The path of a deployment for an operation that is forwarded; None if Azure has none."""
    if api_version != "v1" and operation not in DEPLOYMENT_OPERATIONS:
        return None
    path = create_path_builder(api_version)(PATHS[operation].removeprefix("/"))
    return path.replace("{model}", quote(model, safe=""))


def has_custom_tools(api_version: str) -> bool:
    """Whether chat completions of this version have custom tools: those with a date have not.

    Source: Microsoft's reference of the v1 API (``tools``), and of 2024-10-21.
    """
    return api_version == "v1"


def change_path(request: UpstreamRequest, model: str, api_version: str) -> UpstreamRequest:
    """The same request at the path of a deployment."""
    path = create_path_builder(api_version)(request.path.removeprefix("/v1/"))
    return replace(request, path=path.replace("{model}", quote(model, safe="")))


def _query(api_version: str) -> str:
    return f"api-version={quote(api_version, safe='')}"


# --- content-filter fields ------------------------------------------------------------------------


def create_stream_reader(
    create_decoder: Callable[[Request], ResponseDecoder], request: Request, about: ResponseContext
) -> PassthroughReader:
    """A reader that forwards a worker's chunks with their content-filter fields.

    Implausible usage is null.
    """

    def correct_usage(data: bytes, events: Sequence[Event]) -> bytes:
        del events
        if b'"usage"' not in data:
            return data
        chunk = _decode_chunk(data.removeprefix(b"data:"))
        if chunk.get("usage") is None or not has_implausible_counts(chunk["usage"], request):
            return data
        return b"data: %b" % _encode({**chunk, "usage": None})

    names = NameReplacer({"model": about.model})
    return VerbatimStreamReader(create_decoder(request), names, correct_usage)


_SAFE: Final = {
    category: {"filtered": False, "severity": "safe"}
    for category in ("hate", "self_harm", "sexual", "violence")
}
_PROMPT_RESULTS: Final = [{"prompt_index": 0, "content_filter_results": _SAFE}]
_FIRST_CHUNK: Final = b"data: %b\n\n" % _encode(
    {
        "id": "",
        "object": "",
        "created": 0,
        "model": "",
        "choices": [],
        "prompt_filter_results": _PROMPT_RESULTS,
    }
)


class FilterResultsEncoder:
    """Adds results of a content filter that found nothing, for clients that require the fields."""

    def __init__(self, inner: ResponseEncoder) -> None:
        self._inner = inner
        self.content_type = inner.content_type
        self._is_started = False

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._inner.headers()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        wire = self._inner.encode_events(events)
        if not wire:
            return b""
        start = b"" if self._is_started else _FIRST_CHUNK
        self._is_started = True
        return start + b"".join(map(_add_chunk_results, wire.split(b"\n\n")[:-1]))

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._inner.encode_error_event(error)

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        reply = self._inner.encode_unary(response)
        body = {**_decode(reply.body), "prompt_filter_results": _PROMPT_RESULTS}
        for choice in body["choices"]:
            choice["content_filter_results"] = _SAFE
        return replace(reply, body=_encode(body))


def _add_chunk_results(event: bytes) -> bytes:
    data = event.removeprefix(b"data: ")
    if data.startswith(b"{"):
        chunk = _decode(data)
        for choice in chunk["choices"]:
            choice["content_filter_results"] = _SAFE
        data = _encode(chunk)
    return b"data: %b\n\n" % data
