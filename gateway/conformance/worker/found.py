"""What was found of a worker: for people, for programs, and for the pool that will ask it."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from gateway.conformance.worker.probing import Found
from gateway.core.restricted import PARAMETERS

_BASIS: Final = "whole"
"""Without it nothing is known of a field: whatever was asked may have failed for another reason."""
_HEAD: Final = """\
# What a worker does not support, found by interlingua conform --worker.
# For a pool of such workers in the gateway's configuration.
"""


class Worker(Struct, frozen=True):
    """What was probed."""

    url: str
    dialect: str
    profile: str
    model: str | None


def fields(found: Sequence[Found]) -> list[str]:
    """The fields that were seen not to be honoured, or refused."""
    basis = [one for one in found if one.name == _BASIS] or found
    if not any(one.outcome == "passed" for one in basis):
        return []
    return sorted({path for one in found for path in one.fields} & PARAMETERS)


def quirks(found: Sequence[Found]) -> dict[str, str]:
    """What else is known, by the probe's name."""
    told = {}
    for one in found:
        notes = ([one.detail] if one.outcome == "failed" else []) + list(one.quirks)
        if notes:
            told[one.name] = "; ".join(notes)
    return told


def row(one: Found, width: int) -> str:
    """A line of the table."""
    return f"{one.name.ljust(width)}  {one.outcome:11}  {_told(one)}".rstrip()


def _told(one: Found) -> str:
    promised = f"{one.what} " if one.outcome == "failed" else ""
    return f"{promised}{'; '.join(filter(None, (one.detail, *one.quirks)))}"


def sums(found: Sequence[Found]) -> Mapping[str, int]:
    """How many went how."""
    count = Counter(one.outcome for one in found)
    return {
        "passed": count["passed"],
        "failed": count["failed"],
        "not_offered": count["not offered"],
    }


def document(worker: Worker, found: Sequence[Found]) -> bytes:
    """All of it, as JSON."""
    told = msgspec.structs.asdict(worker) | {"probes": found} | dict(sums(found))
    return msgspec.json.encode(told | {"fields": fields(found), "quirks": quirks(found)})


def unsupported_parameters(worker: Worker, found: Sequence[Found]) -> str:
    """The setting of a pool, as YAML, with what else was seen in comments."""
    told = {"dialect": worker.dialect, "profile": worker.profile, "model": worker.model} | {
        f"quirk of {name}": text for name, text in quirks(found).items()
    }
    comments = [f"# {name}: {_line(text)}" for name, text in told.items() if text is not None]
    setting = f"unsupported_parameters: [{', '.join(fields(found))}]"
    return _HEAD + "\n".join([*comments, setting]) + "\n"


def _line(text: str) -> str:
    """What a worker has said, in one line that is a comment in YAML."""
    return "".join(one if one.isprintable() else " " for one in text)


Say = Callable[[str], None]


def conclude(worker: Worker, found: Sequence[Found], say: Say, *, as_json: bool) -> None:
    """Tell the sum, and end with its exit code."""
    count = sums(found)
    if as_json:
        say(document(worker, found).decode())
    else:
        if unkept := fields(found):
            say(f"not done: {', '.join(unkept)}")
        shown = (f"{number} {name.replace('_', ' ')}" for name, number in count.items())
        say(", ".join(shown))
    sys.exit(1 if count["failed"] else 0 if count["passed"] else 2)
