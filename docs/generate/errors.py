"""What goes wrong, and how each dialect tells it: the error tree, and what ``refuse`` answers."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gateway.core import errors
from gateway.core.errors import GatewayError
from gateway.core.ports import Call, Dialect, Reply
from gateway.reference.dialects import Spoken
from gateway.reference.markdown import MADE, code, prose, table

_INTRO = """# Errors

Whatever goes wrong is one of these, in the gateway's own words. *retryable*: the same request may
be sent again. Each dialect tells it in its own way: with a status and a body before the first byte
of an answer, as shown here, and as the last thing in a stream that has begun.
"""
_MESSAGE: Final = "MESSAGE"
_GIVEN: Final[Mapping[str, Any]] = {
    "param": "FIELD",
    "model": "MODEL",
    "version": "2",
    "id": "ID",
    "allowed": ("POST",),
    "limit": 1024,
    "missing": True,
    "retry_after": 2.0,
    "method": "POST",
    "path": "/PATH",
}
"""By a parameter's name: what an error's constructor is given."""
_PARAM: Final = re.compile(r"\{(\w+)\}")


def page(spoken: Sequence[Spoken]) -> str:
    """The page."""
    kinds = list(_leaves(GatewayError))
    drawing = (errors.__doc__ or "").split("\n\n")[1]
    told = [MADE, "", _INTRO, "```text", drawing, "```", ""]
    told += [table(("error", "to blame", "retryable", "meaning"), map(_meaning, kinds))]
    for one in spoken:
        told += [f"## {one.name}", "", _before(one.default), _dialect(one.default, kinds)]
    return "\n".join(told)


def _leaves(kind: type[GatewayError]) -> Iterator[type[GatewayError]]:
    """The classes that are raised, parents first: all but those that only gather others."""
    gathers = kind in (GatewayError, errors.ClientError, errors.WorkerError)
    if not gathers:
        yield kind
    for child in kind.__subclasses__():
        yield from _leaves(child)


def _meaning(kind: type[GatewayError]) -> tuple[str, ...]:
    meaning = " ".join(prose(kind).split())
    return code(kind.__name__), kind.blame, "yes" if kind.retryable else "no", meaning


def _before(dialect: Dialect) -> str:
    call = _call(dialect)
    return f"As an answer to {code(f'{call.endpoint.method} {call.endpoint.path}')}:\n"


def _dialect(dialect: Dialect, kinds: Sequence[type[GatewayError]]) -> str:
    replies = {kind: dialect.refuse(_made(kind), _call(dialect)) for kind in kinds}
    shared = set.intersection(*(set(reply.headers) for reply in replies.values()))
    head = ("error", "status", "body", "headers")
    return table(head, (_row(kind, reply, shared) for kind, reply in replies.items()))


def _row(kind: type[GatewayError], reply: Reply, shared: set[tuple[str, str]]) -> tuple[str, ...]:
    headers = ", ".join(code(f"{n}: {v}") for n, v in reply.headers if (n, v) not in shared)
    body = reply.body.decode().replace("\n", " ")
    return code(kind.__name__), str(reply.status), code(body), headers


def _call(dialect: Dialect) -> Call:
    """A call of the first endpoint that generates."""
    endpoint = next(one for one in dialect.endpoints if one.task == "generate")
    params = dict.fromkeys(_PARAM.findall(endpoint.path), "MODEL")
    path = _PARAM.sub("MODEL", endpoint.path)
    return Call(endpoint, params, {}, "", b"{}", path, id="ID")


def _made(kind: type[GatewayError]) -> GatewayError:
    """An error of this class, with whatever it may carry."""
    known = inspect.signature(kind).parameters
    return kind(_MESSAGE, **{name: _GIVEN[name] for name in known if name in _GIVEN})
