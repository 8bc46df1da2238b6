"""What a scalar of the configuration may be beside a text, a number and a truth: the units.

A unit reads a scalar's text into the value that the gateway works with. Durations become seconds,
sizes become bytes.
"""

import os.path
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from gateway.config.addresses import (
    PRINTABLE,
    address,
    collector,
    nameserver,
    place,
    service,
    worker,
)
from gateway.config.rates import BUDGET, RATE, budget, rate, write_budget, write_rate

_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)")
_SECONDS: Final[Mapping[str, float]] = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST = 168 * 3600.0
_KEEP = re.compile(r"([0-9]{1,5})([hd])")
_DAY = 86400
_SIZE = re.compile(r"([0-9]{1,12})(B|[kKMGT]B|[KMGT]iB)")
_BYTES: Final[Mapping[str, int]] = {
    "B": 1,
    **{f"{letter}B": 1000**n for letter, n in zip("kKMGT", (1, 1, 2, 3, 4), strict=True)},
    **{f"{letter}iB": 1024**n for n, letter in enumerate("KMGT", 1)},
}
_LARGEST = 1 << 40
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)(%?)")
_WEIGHT = re.compile(r"([0-9]{1,7})(%?)")
_HEAVIEST = 1_000_000
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_MODEL = re.compile(r"[A-Za-z0-9._:/-]{1,200}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_STICKY = re.compile(rf"header:{_HEADER.pattern}|body:[^\x00-\x1f]{{1,100}}|key|address")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_RELATIVE = "what is relative starts at the configuration's own folder"
_DEVICE = re.compile(r"auto|[a-z]+(:[0-9]{1,3})?")


def _masked(*_: object) -> str:
    return "***"


class Secret(str):
    """A text that is shown as ``***``. ``reveal`` gives what it holds."""

    __slots__ = ()

    __repr__ = _masked
    __str__ = _masked
    __format__ = _masked

    def reveal(self) -> str:
        """The text itself, as a plain string."""
        return str.__str__(self)


class Unit(Struct, frozen=True):
    """``read`` raises ValueError with what is wrong; ``write`` is its inverse, for people.

    ``path``: the text is a file's path, relative to the configuration; ``dotted`` where it is one
    only if it starts with a dot, and ``written`` where the gateway itself changes it.
    """

    parse: Callable[[str], Any]
    json_schema: Mapping[str, Any]
    format_value: Callable[[Any], Any] = str
    path_kind: Literal["", "always", "dotted", "written"] = ""
    is_secret: bool = False
    """A complaint must not show the text, which may be the secret itself."""


def duration(text: str) -> float:
    """Seconds."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError("is not a duration; write a number and its unit: 500ms, 2s, 10m or 1h")
    seconds = float(found[1]) * _SECONDS[found[2]]
    if seconds > _LONGEST:
        raise ValueError(f"is too long; at most {_LONGEST / 3600:g}h")
    return seconds


def timeout(text: str) -> float:
    """Seconds, more than none."""
    seconds = duration(text)
    if seconds == 0:
        raise ValueError("leaves no time at all; write more than 0s")
    return seconds


def write_duration(seconds: float) -> str:
    """The shortest way to say it."""
    for unit in ("h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds // _SECONDS[unit]:.0f}{unit}"
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def keep(text: str) -> int:
    """Seconds: for how long something is kept."""
    found = _KEEP.fullmatch(text)
    if found is None or int(found[1]) == 0:
        raise ValueError("is no time to keep something for; write hours or days: 36h or 90d")
    return int(found[1]) * (_DAY if found[2] == "d" else _DAY // 24)


def write_keep(seconds: int) -> str:
    """In days, where these are whole."""
    days, rest = divmod(seconds, _DAY)
    return f"{seconds * 24 // _DAY}h" if rest else f"{days}d"


def size(text: str) -> int:
    """Bytes."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError("is not a size; write a number and its unit: 512B, 16KiB, 8MiB or 1GB")
    unit = found[2]
    count = int(found[1]) * _BYTES[unit]
    if not 0 < count <= _LARGEST:
        raise ValueError("is out of range; write from 1B to 1TiB")
    return count


def write_size(count: int) -> str:
    """The shortest way to say it."""
    unit = max((unit for unit in _BYTES if count % _BYTES[unit] == 0), key=_BYTES.__getitem__)
    return f"{count // _BYTES[unit]}{unit}"


def weight(text: str) -> int:
    """A share of the whole: a number, or a percentage."""
    found = _WEIGHT.fullmatch(text)
    most = 100 if found and found[2] else _HEAVIEST
    if found is None or int(found[1]) > most:
        raise ValueError(
            f"is not a weight; write a whole number from 0 to {_HEAVIEST}, or a percentage: 90%"
        )
    return int(found[1])


def share(text: str) -> float:
    """A part of the whole, from 0 to 1: a percentage, or a number."""
    found = _SHARE.fullmatch(text)
    part = float(found[1]) / (100 if found[2] else 1) if found else 2.0
    if part > 1:
        raise ValueError("is not a part of the whole; write a percentage, such as 20%")
    return part


def write_share(part: float) -> str:
    """As a percentage."""
    return f"{100 * part:.6f}".rstrip("0").rstrip(".") + "%"


def name(text: str) -> str:
    """The name of a backend, a version, a split, a rule, a key or a tag."""
    return _checked(_NAME, text, "letters, digits, '.', '_' and '-', at most 100")


def alias(text: str) -> str:
    """A further name of a model."""
    checked = _checked(_MODEL, text, "letters, digits and ._:/-, at most 200")
    if ".." in checked:
        raise ValueError("holds '..', which paths read as a step up; write another name")
    return checked


def model(text: str) -> str:
    """The public name of a model; ``*`` stands for every name that no other model has."""
    return text if text == "*" else alias(text)


def _checked(pattern: re.Pattern[str], text: str, allowed: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError(f"is not a name; names are made of {allowed} characters")
    return text


def header(text: str) -> str:
    """The name of a header."""
    if not _HEADER.fullmatch(text):
        raise ValueError("is not the name of a header; write it as x-user-id")
    return text


def sticky(text: str) -> str:
    """What tells who asks: ``header:NAME``, ``body:FIELD``, ``key`` or ``address``."""
    if not _STICKY.fullmatch(text):
        raise ValueError("tells nobody; write header:NAME, body:FIELD, key or address")
    return text.lower() if text.startswith("header:") else text


def digest(text: str) -> str:
    """A SHA-256 in lower case."""
    if not _DIGEST.fullmatch(text):
        raise ValueError(
            "is not a SHA-256, which has 64 digits from 0 to f; "
            "make it with: printf %s KEY | sha256sum"
        )
    return text.lower()


def prefix(text: str) -> str:
    """What stands before a dialect's own paths."""
    if not _PREFIX.fullmatch(text) or "/." in text:
        raise ValueError("is not a path prefix; write it as /name, without a slash at its end")
    return text


def device(text: str) -> str:
    """Where a local model computes."""
    if not _DEVICE.fullmatch(text):
        raise ValueError("is not a device; write auto, cpu, cuda or cuda:1")
    return text


def bearer(text: str) -> Secret:
    """What a header may carry."""
    if not PRINTABLE.fullmatch(text):
        raise ValueError("is empty, or has blanks or characters that no header can carry")
    return Secret(text)


def file(text: str) -> str:
    """A file that exists."""
    if not os.path.isfile(text):  # noqa: PTH113 - that of Path may raise
        raise ValueError(f"names no file; {_RELATIVE}")
    return text


def written(text: str) -> str:
    """A file that need not be there yet; its folder must be."""
    if os.path.isdir(text) or not os.path.isdir(os.path.dirname(text) or "."):  # noqa: PTH112, PTH120 - as above
        raise ValueError(f"is no file in a folder that there is; {_RELATIVE}")
    return text


def weights_path(text: str) -> str:
    """A local model: a folder, a file, a hub's name or ``package:NAME``."""
    if not text:
        raise ValueError("is empty; name a folder, a file, a hub's model or package:NAME")
    there = os.path.exists(os.path.expanduser(text))  # noqa: PTH110, PTH111 - those of Path may raise
    if text.startswith(("/", ".", "~")) and not there:
        raise ValueError(f"names no file or folder; {_RELATIVE}")
    return text


def template_path(text: str) -> str:
    """A tokenizer's folder, or a file that is a template."""
    if not os.path.exists(text):  # noqa: PTH110 - as above
        raise ValueError(f"names no file or folder; {_RELATIVE}")
    return text


# --- the registry of them ------------------------------------------------------------------------


def _text(pattern: re.Pattern[str] | None = None) -> dict[str, Any]:
    if pattern is None:
        return {"type": "string", "minLength": 1}
    return {"type": "string", "pattern": f"^({pattern.pattern})$"}


UNITS: Final[Mapping[str, Unit]] = {
    "duration": Unit(duration, _text(_DURATION), write_duration),
    "timeout": Unit(timeout, _text(_DURATION), write_duration),
    "keep": Unit(keep, _text(_KEEP), write_keep),
    "size": Unit(size, _text(_SIZE), write_size),
    "weight": Unit(
        weight,
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": _HEAVIEST}, _text(_WEIGHT)]},
        int,
    ),
    "share": Unit(
        share,
        {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, _text(_SHARE)]},
        write_share,
    ),
    "rate": Unit(rate, _text(RATE), write_rate),
    "budget": Unit(budget, _text(BUDGET), write_budget),
    "name": Unit(name, _text(_NAME)),
    "model": Unit(model, {"type": "string", "pattern": f"^(\\*|{_MODEL.pattern})$"}),
    "alias": Unit(alias, _text(_MODEL)),
    "header": Unit(header, _text(_HEADER)),
    "sticky": Unit(sticky, _text(_STICKY)),
    "digest": Unit(digest, _text(_DIGEST), is_secret=True),
    "prefix": Unit(prefix, _text(_PREFIX)),
    "device": Unit(device, _text(_DEVICE)),
    "address": Unit(address, _text()),
    "place": Unit(place, _text()),
    "service": Unit(service, _text()),
    "nameserver": Unit(nameserver, _text()),
    "worker": Unit(worker, _text(re.compile(r"https?://.+"))),
    "collector": Unit(collector, _text(re.compile(r"https?://.+"))),
    "file": Unit(file, _text(), path_kind="always"),
    "written": Unit(written, _text(), path_kind="written"),
    "template": Unit(template_path, _text(), path_kind="always"),
    "weights": Unit(weights_path, _text(), path_kind="dotted"),
}


def _unit(name: str) -> Meta:
    return Meta(extra={"unit": name}, extra_json_schema={"x-unit": name})


Duration = Annotated[float, _unit("duration")]
Timeout = Annotated[float, _unit("timeout")]
Keep = Annotated[int, _unit("keep")]
Size = Annotated[int, _unit("size")]
Share = Annotated[float, _unit("share")]
Weight = Annotated[int, _unit("weight")]
Rate = Annotated[tuple[int, int], _unit("rate")]
Budget = Annotated[int, _unit("budget")]
Name = Annotated[str, _unit("name")]
ModelName = Annotated[str, _unit("model")]
Alias = Annotated[str, _unit("alias")]
Header = Annotated[str, _unit("header")]
Sticky = Annotated[str, _unit("sticky")]
Digest = Annotated[str, _unit("digest")]
Prefix = Annotated[str, _unit("prefix")]
Device = Annotated[str, _unit("device")]
Address = Annotated[str, _unit("address")]
Place = Annotated[str, _unit("place")]
Service = Annotated[str, _unit("service")]
Nameserver = Annotated[str, _unit("nameserver")]
WorkerUrl = Annotated[str, _unit("worker")]
Collector = Annotated[str, _unit("collector")]
FilePath = Annotated[str, _unit("file")]
WrittenPath = Annotated[str, _unit("written")]
TemplatePath = Annotated[str, _unit("template")]
WeightsPath = Annotated[str, _unit("weights")]
Text = Annotated[str, Meta(min_length=1)]
