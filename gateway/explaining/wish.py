"""A question from the little that somebody says of a request: the rest is made up."""

from collections.abc import Iterator

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.core.errors import Malformed
from gateway.core.ports import WireRequest
from gateway.explaining.dry import Servers, entrance, meant
from gateway.explaining.sample import sample
from gateway.paths import Mount
from gateway.watching.question import Question
from protocols.body import read_object


class Wish(Struct, frozen=True):
    """What is said of a request's form; None where it is to be made up."""

    model: str | None = None
    path: str | None = None
    protocol: str | None = None
    body: bytes | None = None
    stream: bool = False


def complete(question: Question, wish: Wish, servers: Servers) -> Question:
    """The question, with a path and a body. Raises LookupError with what has to be said."""
    if wish.path is None:
        return _made_up(question, wish, servers)
    question = replace(question, path=wish.path)
    _, _, found = entrance(question, servers)
    if found is None or found.endpoint.task != "generate":
        return replace(question, base64=wish.body or b"")
    found = found.select_protocol([wish.protocol or ""])
    model = wish.model or next(iter(found.params.values()), None) or _model_of(wish.body)
    made = sample(found.mount, model or "", found.endpoint.operation, stream=wish.stream)
    if wish.body is None and (made is None or model is None):
        raise LookupError("nothing can be made up for this path: give --model, or a --body")
    return replace(question, base64=_body(wish, made))


def _made_up(question: Question, wish: Wish, servers: Servers) -> Question:
    """The same where the dialect says which path."""
    model = wish.model or _model_of(wish.body)
    if model is None:
        raise LookupError("give the --model that is asked for")
    for address, mount in _mounts(question, servers):
        made = sample(mount, model, None, stream=wish.stream)
        if made is not None and wish.protocol in (None, mount.adapter.name):
            return replace(question, listener=address, path=made.path, base64=_body(wish, made))
    raise LookupError(f"no path of {wish.protocol or 'a dialect'} can be made up: give --path")


def _mounts(question: Question, servers: Servers) -> Iterator[tuple[str, Mount]]:
    for address, server in meant(question, servers).items():
        yield from ((address, mount) for mount in server.path_router.mounts)


def _body(wish: Wish, made: WireRequest | None) -> bytes:
    """The body that is given, with the model and the stream that are asked for; or what was made.

    Where the dialect has the two elsewhere, the body is left as it is.
    """
    if wish.body is None:
        return made.body if made is not None else b""
    try:
        fields = read_object(wish.body)
    except Malformed:
        return wish.body
    have = read_object(made.body) if made is not None else {}
    said = {"model": wish.model is not None, "stream": wish.stream}
    changed = {name: have[name] for name, one in said.items() if one and name in have}
    return msgspec.json.encode(fields | changed) if changed else wish.body


def _model_of(body: bytes | None) -> str | None:
    """The model that a body names."""
    try:
        named = read_object(body or b"").get("model")
        return None if named is None else msgspec.json.decode(named, type=str)
    except (Malformed, msgspec.DecodeError):
        return None
