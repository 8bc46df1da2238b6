"""Keeps web pages from using a listener that needs no key.

A page of any site can make its visitor's browser send requests to an address of this machine. Keys
stop it, since a page has none. Without keys, two headers tell, which browsers always send and pages
can't set:

- ``Origin``, the site of the page, must be the listener's own or allowed by ``cors``
- ``Host`` must name this machine: a site may let its own name resolve to a loopback address (DNS
  rebinding), and then its pages have the origin of the listener
"""

import re
from collections.abc import Sequence
from typing import Final

from gateway.http_server.connection import HandleRequest
from gateway.http_server.cors import CorsPolicy
from gateway.pipeline.http import HttpRequest, ResponseWriter
from protocols.core.units import parse_ip

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s\[\]:@/?#\\]+)(?::[0-9]{1,5})?")
_ANY_HOST: Final = "*"
_CONTAINER_HOST: Final = "host.docker.internal"
"""What containers call this machine; no public name ends with ``internal``."""
_TEXT_HEADERS: Final = (("Content-Type", "text/plain; charset=utf-8"),)


def is_local_host(name: str) -> bool:
    """Whether a host is this machine: a loopback address, or a name that browsers resolve to it."""
    ip = parse_ip(name.strip("[]"))
    if ip is not None:
        return ip.is_loopback
    return name.lower() == "localhost" or name.lower().endswith(".localhost")


def names_local_host(header: str) -> bool:
    """Whether the value of a Host header names this machine."""
    match = _HOST.fullmatch(header)
    return match is not None and is_local_host(match[1])


class WebPageGuard:
    """Refuses requests of web pages to a listener without keys, unless they are allowed.

    ``allowed_hosts`` are allowed in ``Host`` beside this machine's names; None if any name is.
    """

    def __init__(
        self,
        handle_request: HandleRequest,
        policy: CorsPolicy | None,
        allowed_hosts: Sequence[str] | None,
    ) -> None:
        self._handle_request = handle_request
        self._policy = policy
        is_any = allowed_hosts is None or _ANY_HOST in allowed_hosts
        self._hosts = None if is_any else frozenset(map(str.lower, allowed_hosts or ()))

    async def handle(self, http: HttpRequest, writer: ResponseWriter) -> None:
        """See ``gateway.http_server.connection.HandleRequest``."""
        host, origin = http.headers.get("host"), http.headers.get("origin")
        if (
            host is not None
            and self._hosts is not None
            and not self._allows_host(host, self._hosts)
        ):
            text = (
                f"the header Host names {host[:100]!r}: on a loopback address without API keys, "
                "only this machine's names and the listener's `allowed_hosts` may be used"
            )
        elif (
            origin is not None
            and http.headers.get("sec-fetch-site") != "same-origin"  # a proxy may change Host
            and not self._allows_origin(origin, host or "")
        ):
            text = (
                f"pages of the origin {origin[:100]!r} may not use a listener without API keys: "
                "allow the origin in the listener's `cors`, or configure keys"
            )
        else:
            await self._handle_request(http, writer)
            return
        writer.send_response(403, _TEXT_HEADERS, f"{text}\n".encode())

    def _allows_host(self, host: str, allowed: frozenset[str]) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].lower()
        return is_local_host(name) or name in allowed or name == _CONTAINER_HOST

    def _allows_origin(self, origin: str, host: str) -> bool:
        is_own = origin.partition("://")[2].lower() == host.lower() != ""
        return is_own or (self._policy is not None and self._policy.allows_origin(origin))
