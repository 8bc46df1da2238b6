"""Whether clients, and the admin, could come in."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final

import httpx

from gateway.config import Config, Tls, split_address
from gateway.tools.doctor import tls
from gateway.tools.doctor.finding import Finding, bad, ok, why

_PATIENCE: Final = 2.0


async def examine(config: Config, now: Callable[[], float]) -> Sequence[Finding]:
    """Each listener, and the admin's."""
    found = []
    for listener in config.listeners:
        what = f"listener {listener.address}"
        found.append(await _entrance(what, listener.address, listener.tls, "/health"))
        if (told := listener.tls) is not None:
            found.append(await asyncio.to_thread(tls.own, told.cert, told.key, what, now()))
    if (admin := config.admin) is not None:
        what = f"admin {admin.address}"
        found.append(await _entrance(what, admin.address, None, "/-/live"))
    return found


async def _entrance(what: str, address: str, told: Tls | None, path: str) -> Finding:
    """Whether it is free, or a gateway's already."""
    host, port = split_address(address)
    try:
        _try(host, port)
    except OSError as error:
        if await _is_ours(host, port, told, path):
            return ok(what, "a gateway answers there")
        mend = "stop what listens there, or choose another address"
        return bad(what, f"can't be had: {why(error)}", mend)
    return ok(what, "is free")


def _try(host: str, port: int) -> None:
    """Listen there for a moment. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family):
        pass


async def _is_ours(host: str, port: int, told: Tls | None, path: str) -> bool:
    """Whether what listens there answers as a gateway does."""
    anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    shown = f"[{anywhere}]" if ":" in anywhere else anywhere
    url = f"{'http' if told is None else 'https'}://{shown}:{port}{path}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is this machine
    try:
        async with httpx.AsyncClient(verify=context, timeout=_PATIENCE) as client:
            return (await client.get(url)).is_success
    except httpx.HTTPError:
        return False
