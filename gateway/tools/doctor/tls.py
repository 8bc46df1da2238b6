"""What a certificate says when it is met."""

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from gateway.tools.doctor.finding import Finding, bad, ok, warn

_DAY: Final = 86_400
_SOON: Final = 14
"""Days within which a certificate should be renewed."""
_MENDS: Final = {
    "certificate has expired": "renew it",
    "certificate is not yet valid": "wait, or mend the clock of one of the two",
    "ostname mismatch": "write the name that it has, or have one made for this name",
    "IP address mismatch": "write the name that it has, or have one made for this address",
    "self-signed": "name who signed it: `tls: {ca: FILE}`",
    "self signed": "name who signed it: `tls: {ca: FILE}`",
    "unable to get local issuer": "name who signed it: `tls: {ca: FILE}`",
}


async def meet(
    host: str, port: int, context: ssl.SSLContext, what: str, now: Callable[[], float]
) -> Finding:
    """What becomes of a connection with TLS. Raises OSError but for what TLS itself has."""
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
    except ssl.SSLError as error:
        return refused(error, what)
    try:
        return told(writer.get_extra_info("peercert"), what, now())
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def refused(error: ssl.SSLError, what: str) -> Finding:
    """Why there is no connection."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        said = f"there is no TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
        return bad(what, said, "write http:// if it is spoken to without")
    why = error.verify_message
    mend = next((text for sign, text in _MENDS.items() if sign in why), "look at the certificate")
    return bad(what, f"its certificate is no good: {why.rstrip('.')}", mend)


def told(certificate: Any, what: str, now: float) -> Finding:
    """How long a good certificate is."""
    until = ssl.cert_time_to_seconds(certificate["notAfter"])
    days = int((until - now) // _DAY)
    if days < _SOON:
        return warn(what, f"its certificate expires in {days} days", "renew it")
    return ok(what, f"its certificate is good for {days} days")


def own(cert: str, key: str, what: str, now: float) -> Finding:
    """What clients will find of a chain in a file: it is met here, in memory."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key, password=str)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be anybody's but its own
    client.load_verify_locations(cert)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    try:
        for end in (*ends, *ends):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        return refused(error, what)
    return told(ends[0].getpeercert(), what, now)
