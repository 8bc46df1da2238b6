"""The client's address behind trusted proxies, as they forward it in a header."""

import ipaddress
from collections.abc import Awaitable, Sequence
from typing import Final, Literal

from gateway.http_server.connection import HandleRequest
from gateway.http_server.overload import TrustedProxies
from gateway.pipeline.http import HttpRequest, ResponseWriter

ForwardedHeader = Literal["x-forwarded-for", "forwarded"]

_MAX_HOPS: Final = 32
"""Hops that are read of a header, the nearest first."""


class ForwardedHandler:
    """Handles the requests of a listener behind proxies: ``peer`` becomes the client's address."""

    def __init__(
        self, handle_request: HandleRequest, trusted: TrustedProxies, header: ForwardedHeader
    ) -> None:
        self._handle_request = handle_request
        self._trusted = trusted
        self._header = header

    def handle(self, http: HttpRequest, writer: ResponseWriter) -> Awaitable[None]:
        """See ``gateway.http_server.connection.HandleRequest``."""
        if self._header in http.headers and self._trusted.has(http.peer):
            hops = _read_hops(http, self._header)
            http.peer = find_client(http.peer, hops, self._trusted)
        return self._handle_request(http, writer)


def _read_hops(http: HttpRequest, header: ForwardedHeader) -> Sequence[str]:
    """The addresses that proxies added, the nearest last: of all headers with this name."""
    get_all = getattr(http.headers, "getall", None)
    text = http.headers[header] if get_all is None else ",".join(get_all(header))
    hops = text.rsplit(",", _MAX_HOPS)[-_MAX_HOPS:]
    return hops if header == "x-forwarded-for" else [_read_for(hop) for hop in hops]


def _read_for(element: str) -> str:
    """The parameter ``for`` of an element of the header Forwarded (RFC 7239)."""
    for pair in element.split(";"):
        name, _, value = pair.partition("=")
        if name.strip().lower() == "for":
            return value.strip().strip('"')
    return ""


def find_client(peer: str, hops: Sequence[str], trusted: TrustedProxies) -> str:
    """The nearest address that is not of a trusted proxy.

    An entry that is no address ends the search at the proxy that sent it.
    """
    client = peer
    for hop in reversed(hops):
        address = _parse_hop(hop)
        if address is None:
            break
        client = address
        if not trusted.has(client):
            break
    return client


def _parse_hop(text: str) -> str | None:
    """The address of a hop, which may have a port; None if it is no address."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
