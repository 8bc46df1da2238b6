"""Headers of requests that have a meaning for the servers of a protocol.

Each client adapter has a ``RequestHeaders``. A header that neither its table nor ``SILENT`` lists
is reported, so a new one is never dropped silently. No worker gets it: a name that the gateway does
not know may be one by which a proxy before the worker knows its users or selects a machine, and the
gateway's connection to it has more rights than the client.
"""

import re
from collections.abc import Mapping
from typing import Final, Literal

from protocols.core.name_cache import NameCache

HeaderDecision = Literal["forwarded", "reported", "handled"]
"""``forwarded``: workers of the same protocol get it, and it is reported for others. ``reported``:
no worker gets it. ``handled``: the gateway does what it asks for, or it says nothing to a model."""

SILENT: Final[Mapping[str, tuple[str, ...]]] = {
    "framing of the message and its connection": (
        "host", "connection", "content-*", "transfer-encoding", "te", "trailer", "upgrade*",
        "keep-alive", "expect", "date", "proxy-*", "http2-settings", "accept*", "mime-version",
        "inference-header-content-length",
    ),
    "caches and conditions": (
        "cache-control", "pragma", "if-*", "range", "age", "max-forwards", "prefer", "priority",
        "early-data", "save-data", "x-no-cache",
    ),
    "credentials, which end at the gateway": (
        "authorization", "api-key", "x-api-key", "x-goog-api-key", "x-auth-*", "cookie*",
        "ocp-apim-subscription-key", "x-csrf*", "x-xsrf*",
    ),
    "browsers": (
        "origin", "referer", "sec-*", "dnt", "x-requested-with", "access-control-*", "downlink",
        "device-memory", "dpr", "ect", "rtt", "viewport-width", "width", "purpose", "x-purpose",
        "x-moz", "alt-used", "service-worker*", "last-event-id",
    ),
    "names of the client's software and session": (
        "user-agent", "from", "x-stainless-*", "x-fern-*", "x-app", "x-app-*", "x-client-*",
        "x-sdk-*", "x-title", "http-referer", "x-goog-api-client", "x-ms-useragent",
        "x-ms-client-request-id", "x-user-agent", "x-session-*", "session*", "thread-id",
        "thread_id", "conversation_id", "originator", "version", "editor-*", "vscode-*",
        "copilot-*", "x-initiator", "x-interaction-*", "x-codex-*", "x-claude-*", "x-source",
        "chatgpt-account-id", "x-*-subagent", "x-oai-*", "semantic-kernel-version",
        "x-openwebui-*", "x-opencode-*", "x-cline-*", "x-task-id",
    ),
    "proxies": (
        "forwarded", "via", "x-forwarded*", "x-real-ip", "x-original-*", "x-rewrite-*", "cf-*",
        "cdn-*", "true-client-ip", "fastly-*", "akamai-*", "x-akamai-*", "x-envoy-*", "x-amz*",
        "x-arr-*", "x-azure-*", "x-fd-*", "x-appengine-*", "x-cloud-*", "x-kong-*", "x-nginx-*",
        "x-scheme", "x-proto*", "x-host", "x-port", "x-url-scheme", "x-ssl-*", "ssl-*", "x-proxy*",
        "x-cluster-*", "x-country*", "x-geo*", "x-vercel-*", "x-nf-*", "x-haproxy-*", "x-istio-*",
        "x-peer-*", "x-litellm-*", "x-portkey-*", "front-end-https", "x-waf-*", "x-bluecoat-via",
        "client-ip", "cloudfront-*", "disguised-host", "was-default-hostname",
        "x-site-deployment-id", "x-waws-*", "x-appservice-*", "fly-*", "render-*", "rndr-id",
        "x-railway-*", "x-heroku-*", "l5d-*", "knative-*", "x-queue-start",
    ),
    "tracing": (
        "traceparent", "tracestate", "baggage", "b3", "x-b3-*", "x-request-*", "request-id",
        "request-context", "x-correlation-*", "correlation-*", "x-trace*", "x-datadog-*",
        "sentry-*", "uber-trace-id", "uberctx-*", "x-ot-*", "ot-*", "x-instana-*", "newrelic",
        "elastic-apm-*", "x-honeycomb-*", "sw8*", "grpc-*", "dd-*", "x-dynatrace*",
        "langsmith-*",
    ),
    "read by the gateway": ("x-interlingua-*",),
}  # fmt: skip
"""Names that say nothing to a model and are no loss, by reason; one may end with ``*``."""
_is_silent: Final = re.compile(
    "|".join(re.escape(one).replace(r"\*", ".*") for names in SILENT.values() for one in names)
).fullmatch
_VALUE: Final = re.compile(r"[ -~]{1,2048}")
"""A value that may be sent to a worker: printable, and not too long."""


class RequestHeaders:
    """The headers that only requests of one protocol have, by name in lower case.

    ``prefixes`` begin all names that belong to the protocol, also those of ``SILENT``.
    """

    def __init__(
        self, prefixes: tuple[str, ...] = (), decisions: Mapping[str, HeaderDecision] | None = None
    ) -> None:
        self.prefixes = prefixes
        self.decisions: Mapping[str, HeaderDecision] = decisions or {}
        self.forwarded = frozenset(
            name for name, one in self.decisions.items() if one == "forwarded"
        )
        """The names that workers of the same protocol get."""
        self.has_meaning = NameCache(self._is_meaningful).__getitem__
        """Whether a header of this name is lost unless a worker gets it."""

    def select_forwarded(self, headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        """The headers of a request that workers of the same protocol get."""
        forwarded = self.forwarded
        if forwarded.isdisjoint(headers):
            return ()
        return tuple(
            (name, value)
            for name, value in headers.items()
            if name in forwarded and _VALUE.fullmatch(value)
        )

    def _is_meaningful(self, name: str) -> bool:
        decision = self.decisions.get(name)
        if decision is not None or name.startswith(self.prefixes):
            return decision != "handled"
        return _is_silent(name) is None


NO_REQUEST_HEADERS: Final = RequestHeaders()
