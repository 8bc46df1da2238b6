"""Requests for dry runs: samples in any protocol, and partly described ones that are completed."""

from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.explain.dry_run import ServersByListener, find_endpoint, select_servers
from gateway.explain.report import ExplainRequest
from gateway.routing.paths import AdapterMount, EndpointMatch, PathRouter
from protocols.core.errors import ClientError, MalformedRequest
from protocols.core.interfaces import ClientRequest, UpstreamAdapter, UpstreamRequest
from protocols.core.json_text import decode_json
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    Message,
    Request,
    StopConditions,
    TextPart,
)
from protocols.json_body import read_object

_SAMPLE_TEXT: Final = "Hello"


def build_sample_request(
    mount: AdapterMount, model: str, operation: str | None, *, stream: bool
) -> UpstreamRequest | None:
    """A small request for ``model`` to an endpoint of this variant, or to the first that fits.

    None if the protocol has no adapter for workers, or no endpoint fits.
    """
    adapter = mount.adapter
    if not isinstance(adapter, UpstreamAdapter):
        return None
    paths = PathRouter([mount])
    for request in _list_sample_requests(model, stream=stream):
        try:
            upstream_request = adapter.encode_request(request)
            upstream_request = replace(upstream_request, path=mount.prefix + upstream_request.path)
            path, _, _ = upstream_request.path.partition("?")
            match = paths.find_endpoint(upstream_request.method, path)
            if operation in (match.endpoint.operation, None):
                # An endpoint may take several kinds, depending on the model: text is the usual one.
                mount.adapter.decode_request(_make_client_request(match, upstream_request))
                return upstream_request
        except ClientError:
            continue
    return None


def _make_client_request(match: EndpointMatch, sample: UpstreamRequest) -> ClientRequest:
    headers = {name.lower(): value for name, value in sample.headers}
    path, _, query = sample.path.partition("?")
    return ClientRequest(match.endpoint, match.params, headers, query, sample.body, path)


def _list_sample_requests(model: str, *, stream: bool) -> Iterator[Request]:
    conversation = (Message("user", (TextPart(_SAMPLE_TEXT),)),)
    yield GenerationRequest(kind="chat", model=model, messages=conversation, stream=stream)
    stopping = StopConditions(max_tokens=16)
    yield GenerationRequest(
        kind="completion", model=model, prompts=(_SAMPLE_TEXT,), stopping=stopping, stream=stream
    )
    yield EmbeddingRequest(model=model, inputs=(_SAMPLE_TEXT,))


class PartialRequest(Struct, frozen=True):
    """The known parts of a request; None for a part that is to be generated."""

    model: str | None = None
    path: str | None = None
    protocol: str | None = None
    body: bytes | None = None
    stream: bool = False


def complete_request(
    request: ExplainRequest, partial: PartialRequest, handlers: ServersByListener
) -> ExplainRequest:
    """The question with a path and a body. Raises LookupError, which names the missing option."""
    if partial.path is None:
        return _build_from_sample(request, partial, handlers)
    request = replace(request, path=partial.path)
    _, _, match = find_endpoint(request, handlers)
    if match is None or match.endpoint.task != "generate":
        return replace(request, base64=partial.body or b"")
    match = match.select_protocol([partial.protocol or ""])
    model = (
        partial.model or next(iter(match.params.values()), None) or _read_model_name(partial.body)
    )
    sample = build_sample_request(
        match.mount, model or "", match.endpoint.operation, stream=partial.stream
    )
    if partial.body is None and (sample is None or model is None):
        raise LookupError("no sample body exists for this path: give --model, or a --body")
    return replace(request, base64=_build_body(partial, sample))


def _build_from_sample(
    request: ExplainRequest, partial: PartialRequest, handlers: ServersByListener
) -> ExplainRequest:
    """The question with the path of a sample request."""
    model = partial.model or _read_model_name(partial.body)
    if model is None:
        raise LookupError("give the --model of the request")
    for address, mount in _list_mounts(request, handlers):
        sample = build_sample_request(mount, model, None, stream=partial.stream)
        if sample is not None and partial.protocol in (None, mount.adapter.name):
            return replace(
                request, listener=address, path=sample.path, base64=_build_body(partial, sample)
            )
    raise LookupError(f"no sample path of {partial.protocol or 'any protocol'} exists: give --path")


def _list_mounts(
    request: ExplainRequest, handlers: ServersByListener
) -> Iterator[tuple[str, AdapterMount]]:
    for address, handler in select_servers(request, handlers).items():
        yield from ((address, mount) for mount in handler.path_router.mounts)


def _build_body(partial: PartialRequest, sample: UpstreamRequest | None) -> bytes:
    """The given body with the given model and stream flag; or the body of the sample request.

    If the protocol has these two outside the body, the given body is unchanged.
    """
    if partial.body is None:
        return sample.body if sample is not None else b""
    try:
        fields = read_object(partial.body)
    except MalformedRequest:
        return partial.body
    sample_fields = read_object(sample.body) if sample is not None else {}
    overridden = {"model": partial.model is not None, "stream": partial.stream}
    changed = {
        name: sample_fields[name]
        for name, is_set in overridden.items()
        if is_set and name in sample_fields
    }
    return msgspec.json.encode(fields | changed) if changed else partial.body


def _read_model_name(body: bytes | None) -> str | None:
    """The model named in a body."""
    try:
        name = read_object(body or b"").get("model")
        return None if name is None else decode_json(name, kind=str)
    except (MalformedRequest, msgspec.DecodeError):
        return None
