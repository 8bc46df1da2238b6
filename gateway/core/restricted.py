"""A worker dialect for workers that do less than it says: some fields are kept from them.

Which these are, ``interlingua conform URL --worker --write FILE`` finds out, and a pool's
``capabilities`` names. What is kept back is reported as lost, so that the gateway does it itself
where it can.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields, replace

from gateway.core.errors import GatewayError
from gateway.core.loss import Loss
from gateway.core.ports import (
    About,
    Call,
    Cancelling,
    Decoder,
    Dialect,
    Learning,
    Relay,
    Relaying,
    WireRequest,
    WorkerDialect,
)
from gateway.core.types import (
    Logprobs,
    Reasoning,
    Request,
    Sampling,
    Stopping,
    Templating,
)

_SECTIONS: Final[Mapping[str, type[Struct]]] = {
    "sampling": Sampling,
    "stopping": Stopping,
    "templating": Templating,
    "logprobs": Logprobs,
    "reasoning": Reasoning,
}
_ALONE: Final = frozenset(
    {"n", "best_of", "tools", "parallel_tools", "output", "logprobs", "reasoning", "suffix",
     "insert_before", "adapter", "priority", "prompts", "inputs", "instruction", "dimensions",
     "normalize", "truncate", "overflow", "encoding"}
)  # fmt: skip
PATHS: Final = frozenset(
    {f"{name}.{one.name}" for name, kind in _SECTIONS.items() for one in fields(kind)} | _ALONE
) - {"templating.mode"}
"""The fields of a request that can be kept from workers."""
_ONE_OF: Final = frozenset({"prompts", "inputs"})
"""Of these a worker is given one at a time."""
_WITH_IT: Final[Mapping[str, tuple[str, ...]]] = {"tools": ("tool_choice", "parallel_tools")}
"""What means nothing without it."""
_UNTOLD: Final = frozenset({"encoding"})
"""What the gateway writes from anything that comes: nothing is lost."""


class Sparing:
    """``dialect``, but for the fields at ``paths``. It learns, cancels and relays if that does."""

    def __init__(self, dialect: WorkerDialect, paths: Collection[str]) -> None:
        self._dialect = dialect
        self._paths = tuple(sorted(paths))
        self.name = dialect.name
        self.probe = dialect.probe
        self.read_error = dialect.read_error
        # What it may also be shows in what it has, as ports are told by that.
        if isinstance(dialect, Learning):
            self.questions, self.learn = dialect.questions, dialect.learn
        if isinstance(dialect, Cancelling):
            self.cancel = dialect.cancel
        if isinstance(dialect, Relaying):
            self.relay = partial(self._relay, dialect)

    def losses(self, request: Request, names: Mapping[str, str]) -> tuple[Loss, ...]:
        """See ``gateway.core.ports.WorkerDialect``."""
        kept = tuple(self._kept(request))
        mine = [
            Loss(names.get(path, path.rpartition(".")[2]), "dropped", path=path)
            for path in kept
            if path not in _UNTOLD
        ]
        return (*self._dialect.losses(without(request, kept), names), *mine)

    def encode(self, request: Request) -> WireRequest:
        """See ``gateway.core.ports.WorkerDialect``."""
        return self._dialect.encode(self._spared(request))

    def decoder(self, request: Request) -> Decoder:
        """See ``gateway.core.ports.WorkerDialect``."""
        return self._dialect.decoder(self._spared(request))

    def _relay(self, relaying: Relaying, client: Dialect, call: Call, about: About) -> Relay | None:
        """See ``gateway.core.ports.Relaying``. What is to be kept back has to be translated."""
        relay = relaying.relay(client, call, about)
        if relay is None:
            return None
        try:
            decoded = client.decode(call)
        except GatewayError:
            return None
        return None if any(True for _ in self._kept(decoded)) else relay

    def _spared(self, request: Request) -> Request:
        return without(request, tuple(self._kept(request)))

    def _kept(self, request: Request) -> Iterator[str]:
        """The paths at which ``request`` says what a worker is not to be told."""
        return (path for path in self._paths if _says(request, path))


def without(request: Request, paths: Collection[str]) -> Request:
    """``request`` without what it says at ``paths``; of several prompts the first is left."""
    for path in paths:
        section, _, name = path.rpartition(".")
        if section:
            holder = getattr(request, section)
            if holder is None:
                continue
            emptied = replace(holder, **{name: _unsaid(holder, name)})
            request = replace(request, **{section: emptied})
        elif name in _ONE_OF:
            request = replace(request, **{name: getattr(request, name)[:1]})
        else:
            gone = (name, *_WITH_IT.get(name, ()))
            request = replace(request, **{one: _unsaid(request, one) for one in gone})
    return request


def _says(request: Request, path: str) -> bool:
    section, _, name = path.rpartition(".")
    holder = getattr(request, section, None) if section else request
    value: Any = getattr(holder, name, None)
    if name in _ONE_OF:
        return value is not None and len(value) > 1
    if path == "n":
        return (value or 1) > 1
    return value is not None and value != _unsaid(holder, name)


def _unsaid(holder: Any, name: str) -> Any:
    """The value of a field of which nothing is said."""
    return next(one.default for one in fields(holder) if one.name == name)
