"""A question from the little that somebody says of a request: the rest is made up."""

from collections.abc import Iterator

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.explaining.dry import ServersByListener, find_endpoint, select_servers
from gateway.explaining.sample import build_sample_request
from gateway.routing.paths import AdapterMount
from gateway.watching.question import ExplainRequest
from protocols.core.errors import MalformedRequest
from protocols.core.interfaces import UpstreamRequest
from protocols.json_body import read_object


class PartialRequest(Struct, frozen=True):
    """What is said of a request's form; None where it is to be made up."""

    model: str | None = None
    path: str | None = None
    protocol: str | None = None
    body: bytes | None = None
    stream: bool = False


def complete_request(
    question: ExplainRequest, wish: PartialRequest, servers: ServersByListener
) -> ExplainRequest:
    """The question, with a path and a body. Raises LookupError with what has to be said."""
    if wish.path is None:
        return _build_from_sample(question, wish, servers)
    question = replace(question, path=wish.path)
    _, _, found = find_endpoint(question, servers)
    if found is None or found.endpoint.task != "generate":
        return replace(question, base64=wish.body or b"")
    found = found.select_protocol([wish.protocol or ""])
    model = wish.model or next(iter(found.params.values()), None) or _read_model_name(wish.body)
    made = build_sample_request(
        found.mount, model or "", found.endpoint.operation, stream=wish.stream
    )
    if wish.body is None and (made is None or model is None):
        raise LookupError("nothing can be made up for this path: give --model, or a --body")
    return replace(question, base64=_build_body(wish, made))


def _build_from_sample(
    question: ExplainRequest, wish: PartialRequest, servers: ServersByListener
) -> ExplainRequest:
    """The same where the dialect says which path."""
    model = wish.model or _read_model_name(wish.body)
    if model is None:
        raise LookupError("give the --model that is asked for")
    for address, mount in _list_mounts(question, servers):
        made = build_sample_request(mount, model, None, stream=wish.stream)
        if made is not None and wish.protocol in (None, mount.adapter.name):
            return replace(
                question, listener=address, path=made.path, base64=_build_body(wish, made)
            )
    raise LookupError(f"no path of {wish.protocol or 'a dialect'} can be made up: give --path")


def _list_mounts(
    question: ExplainRequest, servers: ServersByListener
) -> Iterator[tuple[str, AdapterMount]]:
    for address, server in select_servers(question, servers).items():
        yield from ((address, mount) for mount in server.path_router.mounts)


def _build_body(wish: PartialRequest, made: UpstreamRequest | None) -> bytes:
    """The body that is given, with the model and the stream that are asked for; or what was made.

    Where the dialect has the two elsewhere, the body is left as it is.
    """
    if wish.body is None:
        return made.body if made is not None else b""
    try:
        fields = read_object(wish.body)
    except MalformedRequest:
        return wish.body
    have = read_object(made.body) if made is not None else {}
    said = {"model": wish.model is not None, "stream": wish.stream}
    changed = {name: have[name] for name, one in said.items() if one and name in have}
    return msgspec.json.encode(fields | changed) if changed else wish.body


def _read_model_name(body: bytes | None) -> str | None:
    """The model that a body names."""
    try:
        named = read_object(body or b"").get("model")
        return None if named is None else msgspec.json.decode(named, type=str)
    except (MalformedRequest, msgspec.DecodeError):
        return None
