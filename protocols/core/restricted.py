"""An adapter for workers that support less than their protocol: some parameters are not sent.

Which parameters these are, a pool's ``unsupported_parameters`` says. What is not sent is reported
as lost, so that the gateway emulates it where it can.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields, replace

from protocols.core.errors import GatewayError
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    HasOwnHeaders,
    HasResponseHeaders,
    KeepsExtraFields,
    LearnsFromErrors,
    ModelMetadataReader,
    PassthroughRequest,
    ResponseContext,
    ResponseDecoder,
    SupportsCancel,
    SupportsPassthrough,
    SupportsProxy,
    SupportsRequestKinds,
    UpstreamAdapter,
    UpstreamRequest,
)
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AnyRequest,
    LogprobsOptions,
    PromptOptions,
    ReasoningOptions,
    Request,
    SamplingParams,
    StopConditions,
)

_SECTIONS: Final[Mapping[str, type[Struct]]] = {
    "sampling": SamplingParams,
    "stopping": StopConditions,
    "templating": PromptOptions,
    "logprobs": LogprobsOptions,
    "reasoning": ReasoningOptions,
}
_TOP_LEVEL: Final = frozenset(
    {"n", "best_of", "tools", "parallel_tools", "output", "logprobs", "reasoning", "suffix",
     "insert_before", "adapter", "priority", "prompts", "inputs", "instruction", "dimensions",
     "normalize", "truncate", "overflow", "encoding"}
)  # fmt: skip
PARAMETERS: Final = frozenset(
    {f"{name}.{one.name}" for name, kind in _SECTIONS.items() for one in fields(kind)} | _TOP_LEVEL
) - {"templating.mode"}
"""The fields of an internal request that need not be sent to workers."""
_LISTS: Final = frozenset({"prompts", "inputs"})
"""A worker that does not support one of these gets the first item of it."""
_DEPENDENT: Final[Mapping[str, tuple[str, ...]]] = {"tools": ("tool_choice", "parallel_tools")}
"""Fields that have no meaning without another field."""
_NOT_REPORTED: Final = frozenset({"encoding"})
"""Nothing is lost: the gateway writes this encoding itself from any other."""


class RestrictedAdapter:
    """``adapter`` without ``parameters``. It discovers, cancels and passes through if that does."""

    def __init__(self, adapter: UpstreamAdapter, parameters: Collection[str]) -> None:
        self._adapter = adapter
        self._parameters = tuple(sorted(parameters))
        self.name = adapter.name
        self.health_request = adapter.health_request
        self.read_error = adapter.read_error
        # Optional capabilities are recognised by their methods, so only those of adapter are set.
        if isinstance(adapter, ModelMetadataReader):
            self.metadata_requests, self.load_metadata = (
                adapter.metadata_requests,
                adapter.load_metadata,
            )
        if isinstance(adapter, SupportsRequestKinds):
            self.request_kinds = adapter.request_kinds
        if isinstance(adapter, HasOwnHeaders):
            self.own_headers = adapter.own_headers
        if isinstance(adapter, HasResponseHeaders):
            self.response_headers = adapter.response_headers
        if isinstance(adapter, KeepsExtraFields):
            self.get_kept_keys = adapter.get_kept_keys
        if isinstance(adapter, LearnsFromErrors):
            self.learn_from_error = adapter.learn_from_error
        if isinstance(adapter, SupportsCancel):
            self.encode_cancel = adapter.encode_cancel
        if isinstance(adapter, SupportsProxy):
            self.find_proxied_model, self.get_proxied_path, self.read_proxied_usage = (
                adapter.find_proxied_model,
                adapter.get_proxied_path,
                adapter.read_proxied_usage,
            )
        if isinstance(adapter, SupportsPassthrough):
            self.prepare_passthrough = partial(self._prepare_passthrough, adapter)

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        unsupported = self._unsupported(request)
        dropped = [
            UnsupportedParameter(names.get(path, path.rpartition(".")[2]), "dropped", path=path)
            for path in unsupported
            if path not in _NOT_REPORTED
        ]
        return (
            *self._adapter.unsupported_parameters(remove_parameters(request, unsupported), names),
            *dropped,
        )

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return self._adapter.encode_request(self._restrict(request))

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return self._adapter.create_decoder(self._restrict(request))

    def _prepare_passthrough(
        self,
        adapter: SupportsPassthrough,
        client: ClientAdapter,
        call: ClientRequest,
        about: ResponseContext,
    ) -> PassthroughRequest | None:
        """See ``SupportsPassthrough``. A request with unsupported parameters is translated."""
        passthrough = adapter.prepare_passthrough(client, call, about)
        if passthrough is None:
            return None
        try:
            request = client.decode_request(call)
        except GatewayError:
            return None
        return None if self._unsupported(request) else passthrough

    def _restrict(self, request: Request) -> Request:
        return remove_parameters(request, self._unsupported(request))

    def _unsupported(self, request: AnyRequest) -> Sequence[str]:
        """The parameters of ``request`` that workers do not support."""
        return [path for path in self._parameters if _is_set(request, path)]


def remove_parameters(request: Request, paths: Collection[str]) -> Request:
    """``request`` without these parameters; of several prompts or inputs the first is left."""
    for path in paths:
        section, _, name = path.rpartition(".")
        if section:
            options = getattr(request, section)
            if options is None:
                continue
            cleared = replace(options, **{name: _default(options, name)})
            request = replace(request, **{section: cleared})
        elif name in _LISTS:
            request = replace(request, **{name: getattr(request, name)[:1]})
        else:
            removed = (name, *_DEPENDENT.get(name, ()))
            request = replace(request, **{one: _default(request, one) for one in removed})
    return request


def _is_set(request: AnyRequest, path: str) -> bool:
    section, _, name = path.rpartition(".")
    options = getattr(request, section, None) if section else request
    value: Any = getattr(options, name, None)
    if name in _LISTS:
        return value is not None and len(value) > 1
    if path == "n":
        return (value or 1) > 1
    return value is not None and value != _default(options, name)


def _default(options: Any, name: str) -> Any:
    """The value of a field that the client did not set."""
    return next(one.default for one in fields(options) if one.name == name)
