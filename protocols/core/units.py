"""Scalar types of settings: durations, sizes, rates, shares, names, addresses, URLs and secrets.

Each type has a unit, which parses the text of the configuration: durations become seconds, sizes
become bytes. A Struct names the type in its fields, such as ``timeout: Duration``.
"""

import functools
import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, NoReturn
from urllib.parse import SplitResult, urlsplit

from msgspec import Meta, Struct


class ConfigSection(Struct, frozen=True, forbid_unknown_fields=True):
    """A section of the configuration file: a mapping whose keys are the fields."""


# Rates and daily budgets.

RATE_PATTERN: Final = re.compile(r"([1-9][0-9]{0,9})([kMG]?)/(s|min|h|day)")
BUDGET_PATTERN: Final = re.compile(r"([1-9][0-9]{0,9})([kMG]?)/day")
_SECONDS_PER_PERIOD: Final = {"s": 1, "min": 60, "h": 3600, "day": 86400}
_MULTIPLIERS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_MAX_AMOUNT: Final = 10**12


class RateValue(NamedTuple):
    """An amount per ``period`` seconds."""

    amount: int
    period: int


def parse_rate(text: str) -> RateValue:
    """An amount per second, minute, hour or day: 10/s, 600/min, 200k/min, 5M/day."""
    match = RATE_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError("is not a rate; write a number and a period: 10/s, 600/min, 200k/h")
    return RateValue(_parse_amount(match), _SECONDS_PER_PERIOD[match[3]])


def format_rate(rate: RateValue) -> str:
    """The shortest text with this value."""
    amount, period = rate  # a default of the JSON schema is a plain tuple
    unit = next(name for name, seconds in _SECONDS_PER_PERIOD.items() if seconds == period)
    return f"{_format_amount(amount)}/{unit}"


def parse_budget(text: str) -> int:
    """Tokens per day, from 00:00 UTC: 500k/day, 5M/day."""
    match = BUDGET_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError("is not a budget; write the tokens per day: 500k/day or 5M/day")
    return _parse_amount(match)


def format_budget(amount: int) -> str:
    """The shortest text with this value."""
    return f"{_format_amount(amount)}/day"


def _parse_amount(match: re.Match[str]) -> int:
    amount = int(match[1]) * _MULTIPLIERS[match[2]]
    if amount > _MAX_AMOUNT:
        raise ValueError("is out of range; write at most 1000G")
    return amount


def _format_amount(amount: int) -> str:
    suffix = max(
        (one for one in _MULTIPLIERS if amount % _MULTIPLIERS[one] == 0),
        key=_MULTIPLIERS.__getitem__,
    )
    return f"{amount // _MULTIPLIERS[suffix]}{suffix}"


# Addresses and URLs.

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

PRINTABLE_ASCII = re.compile(r"[\x21-\x7e]+")
_HEADER_VALUE: Final = re.compile(r"[!-~](?:[ -~]*[!-~])?")
"""The characters of URLs and of API keys."""
_HOSTNAME = re.compile(r"(?=.{1,253}\Z)([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?)+")
_NUMERIC_HOST = re.compile(r"(.*\.)?(0x[0-9a-f]*|[0-9]+)\.?", re.IGNORECASE)
_MAX_PORT = 65535


def parse_address(text: str) -> str:
    """An address to listen on: ``host:port`` or ``[host]:port``."""
    host, port = split_address(text)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """The host, without brackets, and the port."""
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
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


_IPV6_NETWORK_BYTES: Final = 8
"""The network part of an IPv6 address: a client usually has all addresses of a /64."""


@functools.lru_cache(maxsize=4096)
def get_client_network(address: str) -> str | bytes:
    """What counts as one client: an IPv4 address or the network of an IPv6 address."""
    ip = parse_ip(address.partition("%")[0])
    if not isinstance(ip, ipaddress.IPv6Address):
        return address if ip is None else str(ip)
    return address if ip.is_loopback else ip.packed[:_IPV6_NETWORK_BYTES]


def is_hostname(host: str) -> bool:
    """Whether it is a host name; ``2130706433`` and ``0x7f.1`` are IP addresses."""
    return bool(_HOSTNAME.fullmatch(host)) and not _NUMERIC_HOST.fullmatch(host)


def parse_host_port(text: str) -> str:
    """A host name with addresses in DNS, and a port: ``host:port``."""
    host, _, port = text.rpartition(":")
    if (
        not is_hostname(host)
        or not re.fullmatch(r"[0-9]{1,5}", port)
        or not 0 < int(port) <= _MAX_PORT
    ):
        raise ValueError("is not a name with a port; write it as workers.models.svc:8000")
    return text


def parse_srv_name(text: str) -> str:
    """The full name of a service with SRV records in DNS."""
    if not is_hostname(text):
        raise ValueError("is not the name of a service; write it as _http._tcp.workers.models.svc")
    return text


def parse_nameserver(text: str) -> str:
    """The IP address of a nameserver, with its port if that is not 53."""
    bare = parse_ip(text) is None
    try:
        host = split_address(text)[0] if bare else text
    except ValueError:
        host = ""
    if parse_ip(host) is None:
        raise ValueError("is not the address of a nameserver; write it as 10.0.0.2 or [::1]:5353")
    return text


def parse_network(text: str) -> str:
    """An IP network, or a single address."""
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        message = "is not an IP network; write it as 10.0.0.0/8, 192.0.2.7 or 2001:db8::/32"
        raise ValueError(message) from None


def parse_worker_url(text: str) -> str:
    """A worker's base URL, without a slash at its end."""
    try:
        return _parse_base_url(text)
    except ValueError as error:
        message = f"{error}; write a base URL, such as http://10.0.0.11:8000"
        raise ValueError(message) from None


def parse_collector_url(text: str) -> str:
    """The base URL of a collector of traces and metrics, without a slash at its end."""
    hint = "write a base URL, such as http://127.0.0.1:4318"
    if "@" in text:
        raise ValueError(
            f"contains a user or password (give a key as auth: {{bearer: ...}}); {hint}"
        )
    try:
        return _parse_base_url(text)
    except ValueError as error:
        raise ValueError(f"{error}; {hint}") from None


def _parse_base_url(text: str) -> str:
    """A base URL, without a slash at its end. Raises ValueError if it is none."""
    if not PRINTABLE_ASCII.fullmatch(text) or "\\" in text:
        _reject_url("contains spaces, backslashes or characters that no URL may have")
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        _reject_url("is not a URL")
    if url.scheme not in ("http", "https") or "//" not in text:
        _reject_url("does not start with http:// or https://")
    if "@" in url.netloc:
        _reject_url("contains a user or password (give a worker's key as auth: {bearer: ...})")
    if "?" in text or "#" in text:
        _reject_url("has a query or a fragment")
    if port == 0 or url.netloc.endswith(":"):
        _reject_url("has no port after its colon")
    _check_url_host(url)
    if any(step in ("", ".", "..") for step in url.path.rstrip("/").split("/")[1:]):
        _reject_url("has an empty segment, '.' or '..' in its path")
    return text.rstrip("/")


def _check_url_host(url: SplitResult) -> None:
    host = url.hostname or ""
    address = parse_ip(host)
    if address is None and not is_hostname(host):
        _reject_url(
            "names no host" if not host else "has a host that is neither a name nor an address"
        )
    if address and (address.is_link_local or address.is_multicast or address.is_unspecified):
        _reject_url("is an address that no worker can have (link-local, multicast or unspecified)")


def _reject_url(message: str) -> NoReturn:
    raise ValueError(message)


_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)")
_SECONDS_PER_UNIT: Final[Mapping[str, float]] = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_MAX_DURATION = 168 * 3600.0
_RETENTION = re.compile(r"([0-9]{1,5})([hd])")
_SECONDS_PER_DAY = 86400
_SIZE = re.compile(r"([0-9]{1,12})(B|[kKMGT]B|[KMGT]iB)")
_BYTES_PER_UNIT: Final[Mapping[str, int]] = {
    "B": 1,
    **{f"{letter}B": 1000**n for letter, n in zip("kKMGT", (1, 1, 2, 3, 4), strict=True)},
    **{f"{letter}iB": 1024**n for n, letter in enumerate("KMGT", 1)},
}
_MAX_SIZE = 1 << 40
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)(%?)")
_WEIGHT = re.compile(r"([0-9]{1,7})(%?)")
_MAX_WEIGHT = 1_000_000
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_MODEL_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,200}")
_SEPARATOR = r"(?:[/\\]|%(?:25)*(?:2f|5c))"
_DOT_SEGMENT = re.compile(
    rf"(?:^|{_SEPARATOR})(?:\.|%(?:25)*2e){{1,2}}(?:$|{_SEPARATOR})", re.IGNORECASE
)
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_STICKY_SOURCE = re.compile(
    rf"header:{_HEADER_NAME.pattern}|body:[^\x00-\x1f]{{1,100}}|key|address"
)
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_PATH_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")
ANY_ORIGIN: Final = "*"
_CORS_ORIGIN = re.compile(
    r"\*|null|(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,30})://"
    r"(?:(?:\*|[A-Za-z0-9_-]{1,63})(?:\.(?:\*|[A-Za-z0-9_-]{1,63})){0,20}|\[[0-9A-Fa-f:.]{2,45}\])"
    r"(?P<port>:(?:[0-9]{1,5}|\*))?"
)
_CORS_SCHEMA = re.compile(re.sub(r"\?P<[a-z]+>", "?:", _CORS_ORIGIN.pattern))
"""The same without named groups, which JSON Schema's patterns don't have."""
_DEVICE = re.compile(r"auto|[a-z]+(:[0-9]{1,3})?")


def _mask(*_: object) -> str:
    return "***"


class Secret(str):
    """A string that is shown as ``***``; ``reveal`` returns the text."""

    __slots__ = ()

    __repr__ = _mask
    __str__ = _mask
    __format__ = _mask

    def reveal(self) -> str:
        """The text itself, as a plain string."""
        return str.__str__(self)


PathKind = Literal["", "file", "output", "folder", "template", "weights"]


class ScalarType(Struct, frozen=True):
    """How a scalar is written. ``parse`` raises ValueError; ``format_value`` is its inverse.

    ``path_kind`` says whether the text is a path, relative to the configuration's folder, and what
    must exist there: ``weights`` is a path only if it starts with a dot, ``output`` and ``folder``
    need not exist yet.
    """

    parse: Callable[[str], Any]
    json_schema: Mapping[str, Any]
    format_value: Callable[[Any], Any] = str
    path_kind: PathKind = ""
    is_secret: bool = False
    """An error must not show the text, which may be the secret itself."""
    description: str = ""
    """Its meaning, unless the docstring of ``parse`` says it."""


def parse_duration(text: str) -> float:
    """A duration, in seconds: 500ms, 2s, 10m or 1h."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError("is not a duration; write a number and its unit: 500ms, 2s, 10m or 1h")
    seconds = float(match[1]) * _SECONDS_PER_UNIT[match[2]]
    if seconds > _MAX_DURATION:
        raise ValueError(f"is too long; at most {_MAX_DURATION / 3600:g}h")
    return seconds


def parse_timeout(text: str) -> float:
    """A duration of more than 0 seconds."""
    seconds = parse_duration(text)
    if seconds == 0:
        raise ValueError("must be more than 0s")
    return seconds


def format_duration(seconds: float) -> str:
    """The shortest text with this value."""
    for unit in ("h", "m"):
        if seconds and seconds % _SECONDS_PER_UNIT[unit] == 0:
            return f"{seconds // _SECONDS_PER_UNIT[unit]:.0f}{unit}"
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def parse_retention(text: str) -> int:
    """A retention time, in hours or days: 36h or 90d."""
    match = _RETENTION.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise ValueError("is not a retention time; write hours or days: 36h or 90d")
    return int(match[1]) * (_SECONDS_PER_DAY if match[2] == "d" else _SECONDS_PER_DAY // 24)


def format_retention(seconds: int) -> str:
    """In days, if the number of days is whole."""
    days, rest = divmod(seconds, _SECONDS_PER_DAY)
    return f"{seconds * 24 // _SECONDS_PER_DAY}h" if rest else f"{days}d"


def parse_size(text: str) -> int:
    """A size, in bytes: 512B, 16KiB, 8MiB or 1GB."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("is not a size; write a number and its unit: 512B, 16KiB, 8MiB or 1GB")
    unit = match[2]
    count = int(match[1]) * _BYTES_PER_UNIT[unit]
    if not 0 < count <= _MAX_SIZE:
        raise ValueError("is out of range; write from 1B to 1TiB")
    return count


def format_size(count: int) -> str:
    """The shortest text with this value."""
    unit = max(
        (unit for unit in _BYTES_PER_UNIT if count % _BYTES_PER_UNIT[unit] == 0),
        key=_BYTES_PER_UNIT.__getitem__,
    )
    return f"{count // _BYTES_PER_UNIT[unit]}{unit}"


def parse_weight(text: str) -> int:
    """A weight: a whole number or a percentage."""
    match = _WEIGHT.fullmatch(text)
    limit = 100 if match and match[2] else _MAX_WEIGHT
    if match is None or int(match[1]) > limit:
        raise ValueError(
            f"is not a weight; write a whole number from 0 to {_MAX_WEIGHT}, or a percentage: 90%"
        )
    return int(match[1])


def parse_share(text: str) -> float:
    """A share: a percentage, or a number from 0 to 1."""
    match = _SHARE.fullmatch(text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 2.0
    if share > 1:
        raise ValueError("is not a share; write a percentage, such as 20%")
    return share


def format_share(share: float) -> str:
    """As a percentage."""
    return f"{100 * share:.6f}".rstrip("0").rstrip(".") + "%"


def parse_name(text: str) -> str:
    """The name of a backend, version, split, route, key or tag."""
    return _check_pattern(_NAME, text, "letters, digits, '.', '_' and '-', at most 100")


def parse_alias(text: str) -> str:
    """An alias: another name of a model."""
    checked = _check_pattern(_MODEL_NAME, text, "letters, digits and ._:/-, at most 200")
    if ".." in checked or has_dot_segment(checked):
        raise ValueError("holds '.' or '..', which mean folders in a path; write another name")
    return checked


def has_dot_segment(name: str) -> bool:
    """Whether a server could take ``name`` in a path for this or the parent folder.

    So it is if a segment is ``.`` or ``..``, plain or percent-encoded any number of times.
    """
    return _DOT_SEGMENT.search(name) is not None


def parse_model_name(text: str) -> str:
    """The public name of a model; ``*`` at its end stands for the rest of any name.

    ``openai/*`` is every name with this beginning that no other model has, ``*`` every name.
    """
    beginning = text.removesuffix("*")
    if beginning:
        parse_alias(beginning)
    elif not text:
        parse_alias(text)
    return text


def _check_pattern(pattern: re.Pattern[str], text: str, allowed: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError(f"is not a name; names are made of {allowed} characters")
    return text


def parse_header_name(text: str) -> str:
    """The name of a header."""
    if not _HEADER_NAME.fullmatch(text):
        raise ValueError("is not a header name; write it as x-user-id")
    return text


def parse_sticky_source(text: str) -> str:
    """A source of the user's identity: ``header:NAME``, ``body:FIELD``, ``key`` or ``address``."""
    if not _STICKY_SOURCE.fullmatch(text):
        raise ValueError("is not a sticky source; write header:NAME, body:FIELD, key or address")
    return text.lower() if text.startswith("header:") else text


def parse_sha256(text: str) -> str:
    """A SHA-256 digest, in hexadecimal digits."""
    if not _SHA256.fullmatch(text):
        raise ValueError(
            "is not a SHA-256, which has 64 digits from 0 to f; "
            "create it with: printf %s KEY | sha256sum"
        )
    return text.lower()


def parse_path_prefix(text: str) -> str:
    """The prefix of a protocol's paths."""
    if not _PATH_PREFIX.fullmatch(text) or "/." in text:
        raise ValueError("is not a path prefix; write it as /name, without a slash at its end")
    return text


def parse_cors_origin(text: str) -> str:
    """The origin of a web page: https://app.example, https://*.example.org or ``*``."""
    match = _CORS_ORIGIN.fullmatch(text)
    if match is None or text.count("*") > 1:
        raise ValueError(
            "is not an origin; write it without a path, as https://app.example or http://localhost:*"
        )
    default_port = {"http": ":80", "https": ":443"}.get(match["scheme"] or "")
    origin = text.lower()
    return origin.removesuffix(default_port) if default_port and match["port"] else origin


def parse_device(text: str) -> str:
    """The device of a local model: auto, cpu, cuda or cuda:1."""
    if not _DEVICE.fullmatch(text):
        raise ValueError("is not a device; write auto, cpu, cuda or cuda:1")
    return text


def parse_bearer_token(text: str) -> Secret:
    """A token that a header may contain."""
    if not PRINTABLE_ASCII.fullmatch(text):
        raise ValueError("is empty, or contains spaces or characters that no header may have")
    return Secret(text)


def parse_header_value(text: str) -> Secret:
    """The value of a header, which may be a secret."""
    if not _HEADER_VALUE.fullmatch(text):
        raise ValueError("is empty, begins or ends with a space, or has characters beyond ASCII")
    return Secret(text)


def parse_weights_path(text: str) -> str:
    """A local model: a folder, a file, a hub's name or ``package:NAME``."""
    if not text:
        raise ValueError("is empty; name a folder, a file, a hub's model or package:NAME")
    return text


# --- registry ------------------------------------------------------------------------------------


def _build_string_schema(pattern: re.Pattern[str] | None = None) -> dict[str, Any]:
    if pattern is None:
        return {"type": "string", "minLength": 1}
    return {"type": "string", "pattern": f"^({pattern.pattern})$"}


SCALAR_TYPES: Final[Mapping[str, ScalarType]] = {
    "duration": ScalarType(parse_duration, _build_string_schema(_DURATION), format_duration),
    "timeout": ScalarType(parse_timeout, _build_string_schema(_DURATION), format_duration),
    "keep": ScalarType(parse_retention, _build_string_schema(_RETENTION), format_retention),
    "size": ScalarType(parse_size, _build_string_schema(_SIZE), format_size),
    "weight": ScalarType(
        parse_weight,
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": _MAX_WEIGHT},
                _build_string_schema(_WEIGHT),
            ]
        },
        int,
    ),
    "share": ScalarType(
        parse_share,
        {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, _build_string_schema(_SHARE)]},
        format_share,
    ),
    "rate": ScalarType(parse_rate, _build_string_schema(RATE_PATTERN), format_rate),
    "budget": ScalarType(parse_budget, _build_string_schema(BUDGET_PATTERN), format_budget),
    "name": ScalarType(parse_name, _build_string_schema(_NAME)),
    "model": ScalarType(
        parse_model_name, {"type": "string", "pattern": f"^(\\*|{_MODEL_NAME.pattern}\\*?)$"}
    ),
    "alias": ScalarType(parse_alias, _build_string_schema(_MODEL_NAME)),
    "header": ScalarType(parse_header_name, _build_string_schema(_HEADER_NAME)),
    "header_value": ScalarType(
        parse_header_value, _build_string_schema(_HEADER_VALUE), is_secret=True
    ),
    "sticky": ScalarType(parse_sticky_source, _build_string_schema(_STICKY_SOURCE)),
    "digest": ScalarType(parse_sha256, _build_string_schema(_SHA256), is_secret=True),
    "prefix": ScalarType(parse_path_prefix, _build_string_schema(_PATH_PREFIX)),
    "origin": ScalarType(parse_cors_origin, _build_string_schema(_CORS_SCHEMA)),
    "device": ScalarType(parse_device, _build_string_schema(_DEVICE)),
    "address": ScalarType(parse_address, _build_string_schema()),
    "place": ScalarType(parse_host_port, _build_string_schema()),
    "service": ScalarType(parse_srv_name, _build_string_schema()),
    "nameserver": ScalarType(parse_nameserver, _build_string_schema()),
    "network": ScalarType(parse_network, _build_string_schema()),
    "worker": ScalarType(parse_worker_url, _build_string_schema(re.compile(r"https?://.+"))),
    "collector": ScalarType(parse_collector_url, _build_string_schema(re.compile(r"https?://.+"))),
    "file": ScalarType(
        str, _build_string_schema(), path_kind="file", description="An existing file."
    ),
    "written": ScalarType(
        str,
        _build_string_schema(),
        path_kind="output",
        description="A file in an existing folder.",
    ),
    "folder": ScalarType(
        str,
        _build_string_schema(),
        path_kind="folder",
        description="A folder in an existing folder.",
    ),
    "template": ScalarType(
        str,
        _build_string_schema(),
        path_kind="template",
        description="A tokenizer's folder, or a template file.",
    ),
    "weights": ScalarType(parse_weights_path, _build_string_schema(), path_kind="weights"),
}


def _make_scalar_meta(name: str) -> Meta:
    return Meta(extra={"unit": name}, extra_json_schema={"x-unit": name})


Duration = Annotated[float, _make_scalar_meta("duration")]
Timeout = Annotated[float, _make_scalar_meta("timeout")]
Retention = Annotated[int, _make_scalar_meta("keep")]
Size = Annotated[int, _make_scalar_meta("size")]
Share = Annotated[float, _make_scalar_meta("share")]
Weight = Annotated[int, _make_scalar_meta("weight")]
Rate = Annotated[tuple[int, int], _make_scalar_meta("rate")]
Budget = Annotated[int, _make_scalar_meta("budget")]
Name = Annotated[str, _make_scalar_meta("name")]
ModelName = Annotated[str, _make_scalar_meta("model")]
ModelAlias = Annotated[str, _make_scalar_meta("alias")]
HeaderName = Annotated[str, _make_scalar_meta("header")]
HeaderValue = Annotated[str, _make_scalar_meta("header_value")]
StickySource = Annotated[str, _make_scalar_meta("sticky")]
Sha256Digest = Annotated[str, _make_scalar_meta("digest")]
PathPrefix = Annotated[str, _make_scalar_meta("prefix")]
CorsOrigin = Annotated[str, _make_scalar_meta("origin")]
DeviceName = Annotated[str, _make_scalar_meta("device")]
ListenAddress = Annotated[str, _make_scalar_meta("address")]
HostPort = Annotated[str, _make_scalar_meta("place")]
SrvName = Annotated[str, _make_scalar_meta("service")]
IpNetwork = Annotated[str, _make_scalar_meta("network")]
NameserverAddress = Annotated[str, _make_scalar_meta("nameserver")]
WorkerUrl = Annotated[str, _make_scalar_meta("worker")]
CollectorUrl = Annotated[str, _make_scalar_meta("collector")]
FilePath = Annotated[str, _make_scalar_meta("file")]
OutputPath = Annotated[str, _make_scalar_meta("written")]
OutputFolder = Annotated[str, _make_scalar_meta("folder")]
TemplatePath = Annotated[str, _make_scalar_meta("template")]
WeightsPath = Annotated[str, _make_scalar_meta("weights")]
NonEmptyStr = Annotated[str, Meta(min_length=1)]
PositiveInt = Annotated[int, Meta(ge=1, le=100_000)]
ItemCount = Annotated[int, Meta(ge=1, le=1_000_000_000)]
"""A number of objects or values in a JSON text."""
TokenCount = Annotated[int, Meta(ge=1, le=1_000_000_000)]
OptionValue = str | int | float | bool
"""The value of a protocol's own option."""
