"""What a probe is, how all of them are run, and what each has found."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Literal

from msgspec import Struct

from gateway.conformance.cases import Mismatch
from gateway.conformance.worker.line import Line, NotOffered, Refused, Unreachable, Unsure

Outcome = Literal["passed", "failed", "not offered"]

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_LONGEST: Final = 240
_NOBODY: Final = "it can't be reached"


class Probe(Struct, frozen=True):
    """One thing that is tried.

    ``run`` gives what it has seen, and raises NotOffered, Refused, Mismatch or Unsure. ``fields``
    are what the probe is about: a worker that refuses them, or does not honour them, is not to be
    asked for them. Without any, a refusal is a failure. ``needs`` are further ones, without which
    there is nothing to try.
    """

    name: str
    what: str
    """What is promised, as a sentence."""
    run: Callable[[Line], Awaitable[str]]
    fields: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


class Found(Struct, frozen=True):
    """How one probe went. ``fields`` are those that the worker was seen not to honour."""

    name: str
    what: str
    outcome: Outcome
    detail: str = ""
    fields: tuple[str, ...] = ()
    quirks: tuple[str, ...] = ()


async def probed(
    probes: Sequence[Probe], line: Line, *, seconds: float, total: float
) -> AsyncIterator[Found]:
    """One for each probe, as they come.

    A probe has ``seconds``, and all of them have ``total``; those for which no time is left are not
    offered. Raises Unreachable when nobody listens.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + total
    answered = False
    for probe in probes:
        left = end - loop.time()
        if left <= 0:
            yield Found(probe.name, probe.what, "not offered", "no time was left for it")
        else:
            found = await _run(probe, line.about(probe.fields + probe.needs), min(seconds, left))
            if found.detail.startswith(_NOBODY) and not answered:
                raise Unreachable(found.detail)
            answered = True
            yield found


async def _run(probe: Probe, line: Line, seconds: float) -> Found:
    outcome: Outcome = "failed"
    fields: tuple[str, ...] = ()
    try:
        async with asyncio.timeout(seconds):
            detail = await probe.run(line)
        outcome = "passed"
    except* NotOffered as group:
        outcome, detail = "not offered", _first(group)
    except* Refused as group:
        outcome = "passed" if probe.fields else "failed"
        detail, fields = f"refused: {_first(group)}", probe.fields
    except* Mismatch as group:
        detail, fields = _first(group), probe.fields
    except* Unsure as group:
        detail = _first(group)
    except* TimeoutError:
        detail = f"no answer within {seconds:.0f} s"
    except* Unreachable as group:
        detail = f"{_NOBODY}: {_first(group)}"
    except* Exception as group:  # noqa: BLE001 - a check may trip over a foreign answer
        detail = f"{type(group.exceptions[0]).__name__} {_first(group)}"
    key = line.whom.key
    quirks = tuple(clean(one, key) for one in line.quirks)
    return Found(probe.name, probe.what, outcome, clean(detail, key), fields, quirks)


def _first(group: BaseException) -> str:
    """The text of the exception itself, or of the first in a group."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return str(group)


def clean(text: str, key: str | None) -> str:
    """In one line, not too long, and without the key, which a worker may give back."""
    if key:
        text = text.replace(key, "***")
    text = _CONTROL.sub(" ", text).strip()
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
