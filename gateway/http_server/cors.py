"""Cross-origin resource sharing (CORS): which pages of browsers may use a listener.

Source: the Fetch standard, "HTTP-CORS protocol". A browser asks by a preflight request before it
sends an API key or JSON to another origin, and hides every response without the origin's name from
the page. No credentials of the browser are allowed: API keys are headers that pages set themselves.
"""

import re
from collections.abc import Sequence
from typing import Final

from gateway.config.schema import CorsConfig
from gateway.http_server.connection import HandleRequest
from gateway.pipeline.http import HttpRequest, ResponseWriter, ResponseWriterWrapper
from protocols import PROTOCOLS
from protocols.core.interfaces import Headers
from protocols.core.units import ANY_ORIGIN

_ALLOWED_METHODS: Final = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
_ALLOWED_HEADERS: Final = frozenset(
    {"accept", "api-key", "authorization", "content-type", "idempotency-key", "last-event-id",
     "traceparent", "tracestate", "user-agent", "x-api-key", "x-client-request-id", "x-request-id",
     "x-requested-with"}
)  # fmt: skip
"""Request headers of the clients of all protocols, in lower case."""
_ALLOWED_PREFIXES: Final = (
    "x-interlingua-", "x-stainless-", *(f"{protocol}-" for protocol in PROTOCOLS)
)  # fmt: skip
"""How names of such headers begin; a protocol's own ones begin with its name."""
_ANY_HEADER: Final = "*"
_MAX_REQUESTED_HEADERS: Final = 64
_HEADER_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VARY: Final = (("Vary", "Origin"),)
_PREFLIGHT_VARY: Final = (
    ("Vary", "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"),
)
_REFUSAL: Final = b"the listener's `cors` does not allow this origin, method or header\n"


class CorsPolicy:
    """Which origins, methods and headers are allowed."""

    def __init__(self, config: CorsConfig) -> None:
        self.allows_any_origin = ANY_ORIGIN in config.origins
        self._origins = re.compile("|".join(map(_compile_origin, config.origins)))
        self._headers = _ALLOWED_HEADERS | {name.lower() for name in config.headers}
        self._max_age = str(int(config.max_age))

    def allows_origin(self, origin: str) -> bool:
        """Whether pages of this origin may use the listener."""
        return self.allows_any_origin or self._origins.fullmatch(origin.lower()) is not None

    def build_origin_headers(self, origin: str) -> Headers:
        """The headers of a response to an allowed origin."""
        if self.allows_any_origin:
            return (("Access-Control-Allow-Origin", "*"),)
        return (("Access-Control-Allow-Origin", origin), *_VARY)

    def build_preflight_headers(self, origin: str, method: str, requested: str) -> Headers | None:
        """The headers of the response to a preflight request; None if it is refused.

        ``requested`` lists the headers of the request that is to follow.
        """
        names = [name for item in requested.split(",") if (name := item.strip().lower())]
        if (
            not self.allows_origin(origin)
            or method not in _ALLOWED_METHODS
            or len(names) > _MAX_REQUESTED_HEADERS
            or not all(map(self._allows_header, names))
        ):
            return None
        allowed_headers = (("Access-Control-Allow-Headers", ", ".join(names)),) if names else ()
        return (
            ("Access-Control-Allow-Origin", "*" if self.allows_any_origin else origin),
            ("Access-Control-Allow-Methods", ", ".join(_ALLOWED_METHODS)),
            *allowed_headers,
            ("Access-Control-Max-Age", self._max_age),
            *_PREFLIGHT_VARY,
        )

    def _allows_header(self, name: str) -> bool:
        if name in self._headers or name.startswith(_ALLOWED_PREFIXES):
            return _HEADER_NAME.fullmatch(name) is not None
        return _ANY_HEADER in self._headers and _HEADER_NAME.fullmatch(name) is not None


def _compile_origin(origin: str) -> str:
    """The pattern of the origins that an entry names; ``*`` is a label of a host, or a port."""
    return (
        re.escape(origin.lower())
        .replace(r":\*", r"(?::[0-9]{1,5})?")
        .replace(r"\*", "[a-z0-9_-]{1,63}")
    )


class CorsHandler:
    """Handles the requests of a listener that pages of other origins may use.

    It answers preflight requests itself: browsers send them without an API key.
    """

    def __init__(self, handle_request: HandleRequest, policy: CorsPolicy) -> None:
        self._handle_request = handle_request
        self._policy = policy

    async def handle(self, http: HttpRequest, writer: ResponseWriter) -> None:
        """See ``gateway.http_server.connection.HandleRequest``."""
        policy, origin = self._policy, http.headers.get("origin")
        if origin is None or not policy.allows_origin(origin):
            extra: Headers = () if policy.allows_any_origin else _VARY
        else:
            extra = policy.build_origin_headers(origin)
        method = http.headers.get("access-control-request-method")
        if http.method == "OPTIONS" and origin is not None and method is not None:
            requested = http.headers.get("access-control-request-headers", "")
            headers = policy.build_preflight_headers(origin, method, requested)
            _send_preflight_response(writer, headers)
            return
        if extra:
            writer = _CorsWriter(writer, extra, exposes=extra is not _VARY)
        await self._handle_request(http, writer)


def _send_preflight_response(writer: ResponseWriter, headers: Headers | None) -> None:
    if headers is None:
        plain_text = ("Content-Type", "text/plain; charset=utf-8")
        writer.send_response(403, (plain_text, *_PREFLIGHT_VARY), _REFUSAL)
    else:
        writer.send_response(204, headers, b"")


class _CorsWriter(ResponseWriterWrapper):
    """Adds headers to a response; with ``exposes`` also a list of those that the page may read."""

    def __init__(self, writer: ResponseWriter, extra: Headers, *, exposes: bool) -> None:
        super().__init__(writer)
        self._extra = extra
        self._exposes = exposes

    def extend_headers(self, headers: Headers) -> Headers:
        """See ``ResponseWriterWrapper``."""
        if not self._exposes:
            return (*headers, *self._extra)
        names = _list_names(headers)
        return (*headers, *self._extra, ("Access-Control-Expose-Headers", ", ".join(names)))


def _list_names(headers: Headers) -> Sequence[str]:
    """The names of the headers in lower case, each once."""
    return list(dict.fromkeys(name.lower() for name, _ in headers))
