"""Headers of a worker's response that say something to its clients.

Each protocol of workers has a ``ResponseHeaders``. Clients of the worker's protocol get what it
selects in place of what the gateway would make up: some try again for ever after a 429 whose limits
they do not see. For any other client they are the state of one worker or of an account there, and
no part of the answer, unless they have the protocol's own prefix and nobody knows them: then they
are a loss.

What must never happen: a header that concerns one connection, that makes a client or a proxy before
the gateway do something, or that names the machines behind the gateway.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from protocols.core.loss import UnsupportedParameter
from protocols.core.name_cache import NameCache

_Headers = tuple[tuple[str, str], ...]

PASSED: Final = ("x-*", "ratelimit*", "retry-after*")
"""The names that clients of every protocol get, but for those below."""
DENIED: Final[Mapping[str, tuple[str, ...]]] = {
    "the gateway's own": ("x-request-id", "x-served-model", "x-interlingua-*"),
    "makes a proxy or a browser act": (
        "x-accel-*", "x-sendfile*", "x-lighttpd-*", "x-frame-options", "x-content-type-options",
        "x-xss-protection", "x-robots-tag", "x-ua-compatible", "x-dns-prefetch-control",
        "x-permitted-cross-domain-policies", "x-download-options", "x-http-method*",
        "x-csrf*", "x-xsrf*", "x-original-*", "x-rewrite-*", "x-litespeed-*", "x-reproxy-*",
        "x-middleware-*", "x-nextjs-*", "x-*-location", "x-*-redirect*", "x-*-security-policy",
        "x-webkit-csp*", "x-pingback",
    ),
    "names machines": (
        "x-powered-by", "x-aspnet*", "x-generator", "x-served-by", "x-server*", "x-host*",
        "x-node*", "x-pod*", "x-instance*", "x-worker*", "x-backend*", "x-upstream*", "x-proxy*",
        "x-envoy-*", "x-istio-*", "x-kong-*", "x-nginx*", "x-varnish*", "x-cache*", "x-via",
        "x-timer", "x-internal*", "x-real-ip", "x-client-ip", "x-forwarded-*", "x-amz-*",
        "x-amzn-*", "x-azure-ref*", "x-machine*", "x-container*", "x-cluster*", "x-gateway*",
        "x-k8s-*", "x-kubernetes-*", "x-remote-*", "x-origin-*", "x-ip", "x-*-ip", "x-*-addr*",
        "x-*-host*", "x-*-node*", "x-*-pod*",
    ),
    "traces one connection": ("x-b3-*", "x-datadog-*", "x-cloud-trace-context", "x-trace*"),
    "credentials": ("x-api-key*", "x-auth*", "x-goog-api-key", "x-amz-security-token"),
}  # fmt: skip
"""Names that no client gets, by reason."""
_OWN_FIRST: Final = frozenset({"retry-after", "retry-after-ms", "x-should-retry"})
"""What the gateway says itself, having asked all workers."""
_VALUE: Final = re.compile(r"[ -~]{0,2048}")
_MAX_SIZE: Final = 8 << 10
"""Bytes of all headers: clients and proxies limit the head of a response."""
_MAX_COUNT: Final = 64
"""Headers: those of Python's ``http.client`` may be 100 with the gateway's own."""


def _compile(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(one).replace(r"\*", ".*") for one in names))


_denied = _compile(name for names in DENIED.values() for name in names)


class ResponseHeaders:
    """The headers of the responses of one protocol's workers.

    ``prefixes`` begin all names that belong to the protocol, ``names`` are others that it has.
    Of those with a prefix, ``state`` are no part of an answer; a name may end with ``*``.
    """

    def __init__(
        self,
        prefixes: tuple[str, ...] = (),
        names: tuple[str, ...] = (),
        state: tuple[str, ...] = (),
    ) -> None:
        self.passed = (*(f"{one}*" for one in prefixes), *names)
        """The names that clients of the protocol get beside ``PASSED``."""
        self.state = state
        self._prefixes = prefixes
        self._passed = _compile((*PASSED, *self.passed))
        self._state = _compile(state)
        self.is_passed = NameCache(self._is_passed).__getitem__
        """Whether clients may get a header with this name, in lower case."""

    def select(self, headers: Mapping[str, str]) -> _Headers:
        """Those of a worker's headers, with names in lower case, that clients may get."""
        names = [*filter(self.is_passed, headers)]
        if not names:
            return ()
        hops = {one.strip() for one in headers.get("connection", "").lower().split(",")}
        selected: list[tuple[str, str]] = []
        size = 0
        for name in names:
            value = headers[name]
            needed = size + len(name) + len(value)
            if needed <= _MAX_SIZE and _VALUE.fullmatch(value) and name not in hops:
                selected.append((name, value))
                size = needed
            if len(selected) == _MAX_COUNT:
                break
        return tuple(selected)

    def find_lost(self, selected: _Headers) -> tuple[UnsupportedParameter, ...]:
        """Those that clients of other protocols miss."""
        return tuple(
            UnsupportedParameter(f"response.header.{name}", "dropped")
            for name, _ in selected
            if name.startswith(self._prefixes) and not self._state.fullmatch(name)
        )

    def _is_passed(self, name: str) -> bool:
        return self._passed.fullmatch(name) is not None and _denied.fullmatch(name) is None


COMMON_RESPONSE_HEADERS: Final = ResponseHeaders()


def merge_headers(own: _Headers, passed: _Headers, limits: _Headers = ()) -> _Headers:
    """The headers of a response for a client of the worker's protocol.

    ``own`` are the gateway's, of which the worker's replace those that it says better. ``limits``
    are those of the client's key, which are written beside them.
    """
    known = {name.lower() for name, _ in (*own, *limits)}
    kept = known & _OWN_FIRST | {name.lower() for name, _ in limits}
    if "retry-after" in kept:
        kept.add("retry-after-ms")
    given = tuple([one for one in passed if one[0] not in kept])
    replaced = {name for name, _ in given}
    return (*[one for one in own if one[0].lower() not in replaced], *given)
