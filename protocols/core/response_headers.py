"""Headers of a worker's response that say something to its clients.

``select_passed`` takes them from a worker's head. Clients of the worker's protocol get them in
place of those that the gateway would make up: Claude Code tries again for ever after a 429 without
``anthropic-ratelimit-unified-status``. For any other client they are the state of one worker or of
an account there, and no part of the answer, unless they have a protocol's own prefix and nobody
knows them: then they are a loss (``find_lost``).

What must never happen: a header that concerns one connection, that makes a client or a proxy before
the gateway do something, or that names the machines behind the gateway.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from protocols.core.loss import UnsupportedParameter
from protocols.core.name_cache import NameCache

Headers = tuple[tuple[str, str], ...]

PROTOCOL_PREFIXES: Final = ("openai-", "anthropic-", "azureml-", "apim-", "x-openai-", "x-ms-")
"""Begin the names of headers that belong to a protocol."""
PASSED: Final = (
    *("x-*", "ratelimit*", "request-id", "retry-after*"),
    *(f"{one}*" for one in PROTOCOL_PREFIXES),
)
"""The names that are passed on, but for those below."""
DENIED: Final[Mapping[str, tuple[str, ...]]] = {
    "the gateway's own": ("x-request-id", "x-served-model", "x-interlingua-*"),
    "makes a proxy or a browser act": (
        "x-accel-*", "x-sendfile*", "x-lighttpd-*", "x-frame-options", "x-content-type-options",
        "x-xss-protection", "x-robots-tag", "x-ua-compatible", "x-dns-prefetch-control",
        "x-permitted-cross-domain-policies", "x-download-options", "x-http-method*",
        "x-csrf*", "x-xsrf*", "x-original-*", "x-rewrite-*",
    ),
    "names machines": (
        "x-powered-by", "x-aspnet*", "x-generator", "x-served-by", "x-server*", "x-host*",
        "x-node*", "x-pod*", "x-instance*", "x-worker*", "x-backend*", "x-upstream*", "x-proxy*",
        "x-envoy-*", "x-istio-*", "x-kong-*", "x-nginx*", "x-varnish*", "x-cache*", "x-via",
        "x-timer", "x-internal*", "x-real-ip", "x-client-ip", "x-forwarded-*", "x-amz-*",
        "x-amzn-*", "x-azure-ref*",
    ),
    "traces one connection": ("x-b3-*", "x-datadog-*", "x-cloud-trace-context", "x-trace*"),
    "credentials": ("x-api-key*", "x-auth*", "x-goog-api-key", "x-amz-security-token"),
}  # fmt: skip
"""Names that no client gets, by reason."""
STATE: Final = (
    "openai-organization", "openai-project", "openai-processing-ms", "openai-version",
    "openai-model", "anthropic-organization-id", "anthropic-ratelimit-*", "azureml-model-session",
    "azureml-model-group", "apim-request-id", "x-ms-*",
)  # fmt: skip
"""Names with a protocol's prefix that are no part of an answer: nobody else misses them."""
_OWN_FIRST: Final = frozenset({"retry-after", "retry-after-ms", "x-should-retry"})
"""What the gateway says itself, having asked all workers."""
_VALUE: Final = re.compile(r"[ -~]{0,2048}")
_MAX_SIZE: Final = 8 << 10
"""Bytes of all values: clients and proxies limit the head of a response."""


def _compile(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(one).replace(r"\*", ".*") for one in names))


_passed = _compile(PASSED)
_denied = _compile(name for names in DENIED.values() for name in names)
_state = _compile(STATE)


def _is_passed(name: str) -> bool:
    return _passed.fullmatch(name) is not None and _denied.fullmatch(name) is None


is_passed: Final = NameCache(_is_passed).__getitem__
"""Whether clients may get a header with this name, in lower case."""


def select_passed(headers: Mapping[str, str]) -> Headers:
    """Those of a worker's headers, with names in lower case, that clients may get."""
    names = [*filter(is_passed, headers)]
    if not names:
        return ()
    hops = {one.strip() for one in headers.get("connection", "").lower().split(",")}
    selected: list[tuple[str, str]] = []
    size = 0
    for name in names:
        value = headers[name]
        size += len(name) + len(value)
        if size <= _MAX_SIZE and _VALUE.fullmatch(value) and name not in hops:
            selected.append((name, value))
    return tuple(selected)


def find_lost(headers: Headers) -> tuple[UnsupportedParameter, ...]:
    """Those that clients of other protocols miss."""
    return tuple(
        UnsupportedParameter(f"response.header.{name}", "dropped")
        for name, _ in headers
        if name.startswith(PROTOCOL_PREFIXES) and not _state.fullmatch(name)
    )


def merge_headers(own: Headers, passed: Headers, limits: Headers = ()) -> Headers:
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
