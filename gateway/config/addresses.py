"""Where to listen, and where workers are: addresses and URLs, checked before anyone goes there."""

import ipaddress
import re
from typing import NoReturn
from urllib.parse import SplitResult, urlsplit

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

PRINTABLE_ASCII = re.compile(r"[\x21-\x7e]+")
"""What a URL is made of, and a key in a header."""
_HOSTNAME = re.compile(r"(?=.{1,253}\Z)([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?)+")
_NUMERIC_HOST = re.compile(r"(.*\.)?(0x[0-9a-f]*|[0-9]+)\.?", re.IGNORECASE)
_MAX_PORT = 65535


def parse_address(text: str) -> str:
    """Where to listen, as ``host:port`` or ``[host]:port``."""
    host, port = split_address(text)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """Host, without brackets, and port."""
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > _MAX_PORT:
        raise ValueError("is not an address; write host:port, such as 127.0.0.1:8000")
    bracketed = host.startswith("[") and host.endswith("]")
    inner = host[1:-1] if bracketed else host
    if bracketed != (":" in inner) or (bracketed and parse_ip(inner) is None):
        raise ValueError("is not an address; an IPv6 host stands in brackets: [::1]:8000")
    if parse_ip(inner) is None and not is_hostname(inner):
        raise ValueError("names no host; write host:port, such as 127.0.0.1:8000 or 0.0.0.0:8000")
    return inner.lower(), int(port)


def parse_ip(host: str) -> IpAddress | None:
    """The IP address that ``host`` is, if it is one."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def is_hostname(host: str) -> bool:
    """Whether it is a name; ``2130706433`` and ``0x7f.1`` are addresses in disguise."""
    return bool(_HOSTNAME.fullmatch(host)) and not _NUMERIC_HOST.fullmatch(host)


def parse_host_port(text: str) -> str:
    """A name that DNS has addresses for, and the port there."""
    host, _, port = text.rpartition(":")
    if (
        not is_hostname(host)
        or not re.fullmatch(r"[0-9]{1,5}", port)
        or not 0 < int(port) <= _MAX_PORT
    ):
        raise ValueError("is no name and port; write it as workers.models.svc:8000")
    return text


def parse_srv_name(text: str) -> str:
    """The whole name of a service, which DNS has places for."""
    if not is_hostname(text):
        raise ValueError("is no service's name; write it as _http._tcp.workers.models.svc")
    return text


def parse_nameserver(text: str) -> str:
    """The address of a nameserver, and its port where that is not 53."""
    bare = parse_ip(text) is None
    try:
        host = split_address(text)[0] if bare else text
    except ValueError:
        host = ""
    if parse_ip(host) is None:
        raise ValueError("is no nameserver's address; write it as 10.0.0.2 or [::1]:5353")
    return text


def parse_worker_url(text: str) -> str:
    """A worker's base URL, without a slash at its end."""
    try:
        return _parse_base_url(text)
    except ValueError as error:
        why = f"{error}; write a worker's base, such as http://10.0.0.11:8000"
        raise ValueError(why) from None


def parse_collector_url(text: str) -> str:
    """The base URL of what collects traces and figures, without a slash at its end."""
    hint = "write a collector's base, such as http://127.0.0.1:4318"
    if "@" in text:
        raise ValueError(f"holds a user or password (give a key as auth: {{bearer: ...}}); {hint}")
    try:
        return _parse_base_url(text)
    except ValueError as error:
        raise ValueError(f"{error}; {hint}") from None


def _parse_base_url(text: str) -> str:
    """A base URL, without a slash at its end. Raises ValueError with why it is none."""
    if not PRINTABLE_ASCII.fullmatch(text) or "\\" in text:
        _reject_url("has blanks, backslashes or letters that no URL has")
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        _reject_url("is not a URL")
    if url.scheme not in ("http", "https") or "//" not in text:
        _reject_url("does not start with http:// or https://")
    if "@" in url.netloc:
        _reject_url("holds a user or password (give a worker's key as auth: {bearer: ...})")
    if "?" in text or "#" in text:
        _reject_url("has a query or a fragment")
    if port == 0 or url.netloc.endswith(":"):
        _reject_url("has no port after its colon")
    _check_url_host(url)
    if any(step in ("", ".", "..") for step in url.path.rstrip("/").split("/")[1:]):
        _reject_url("has an empty step, '.' or '..' in its path")
    return text.rstrip("/")


def _check_url_host(url: SplitResult) -> None:
    host = url.hostname or ""
    found = parse_ip(host)
    if found is None and not is_hostname(host):
        _reject_url(
            "names no host" if not host else "has a host that is neither a name nor an address"
        )
    if found and (found.is_link_local or found.is_multicast or found.is_unspecified):
        _reject_url("names an address that is no worker's (link-local, multicast or unspecified)")


def _reject_url(why: str) -> NoReturn:
    raise ValueError(why)
