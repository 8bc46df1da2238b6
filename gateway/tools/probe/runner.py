"""Runs the probes, and collects the result of each."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import Final, Literal

from msgspec import Struct

from gateway.tools.probe import basic, concurrency, errors, stopping, structured
from gateway.tools.probe.client import (
    Inconclusive,
    NotOffered,
    Probe,
    UnexpectedResponse,
    Unreachable,
    WorkerClient,
    WorkerRefused,
)

ProbeOutcome = Literal["passed", "failed", "not offered"]

PROBES: Final = (
    *basic.RESPONSE_PROBES,
    *stopping.STOPPING_PROBES,
    *stopping.SAMPLING_PROBES,
    *basic.MESSAGE_PROBES,
    *structured.PROBES,
    *errors.PROBES,
    *concurrency.PROBES,
    *basic.EMBEDDING_PROBES,
)
"""In the order in which they run."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_MAX_LENGTH: Final = 240
_UNREACHABLE: Final = "it can't be reached"


class ProbeResult(Struct, frozen=True):
    """How one probe went. ``fields``: the worker rejects them, or ignores them."""

    name: str
    what: str
    outcome: ProbeOutcome
    detail: str = ""
    fields: tuple[str, ...] = ()
    quirks: tuple[str, ...] = ()


async def run_probes(
    probes: Sequence[Probe], worker: WorkerClient, *, seconds: float, total: float
) -> AsyncIterator[ProbeResult]:
    """A result for each probe, as it comes.

    A probe may take ``seconds``, and all of them together ``total``; a probe for which no time is
    left is not offered. Raises Unreachable if the worker accepts no connection.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + total
    answered = False
    for probe in probes:
        remaining = end - loop.time()
        if remaining <= 0:
            yield ProbeResult(probe.name, probe.what, "not offered", "no time left")
        else:
            result = await _run(
                probe, worker.for_probe(probe.fields + probe.needs), min(seconds, remaining)
            )
            if result.detail.startswith(_UNREACHABLE) and not answered:
                raise Unreachable(result.detail)
            answered = True
            yield result


async def _run(probe: Probe, worker: WorkerClient, seconds: float) -> ProbeResult:
    outcome: ProbeOutcome = "failed"
    fields: tuple[str, ...] = ()
    try:
        async with asyncio.timeout(seconds):
            detail = await probe.run(worker)
        outcome = "passed"
    except* NotOffered as group:
        outcome, detail = "not offered", _message(group)
    except* WorkerRefused as group:
        outcome = "passed" if probe.fields else "failed"
        detail, fields = f"rejected: {_message(group)}", probe.fields
    except* UnexpectedResponse as group:
        detail, fields = _message(group), probe.fields
    except* Inconclusive as group:
        detail = _message(group)
    except* TimeoutError:
        detail = f"no answer within {seconds:.0f} s"
    except* Unreachable as group:
        detail = f"{_UNREACHABLE}: {_message(group)}"
    except* Exception as group:  # noqa: BLE001 - a check may fail on any response
        detail = f"{type(group.exceptions[0]).__name__} {_message(group)}"
    key = worker.target.key
    quirks = tuple(sanitize(quirk, key) for quirk in worker.quirks)
    return ProbeResult(probe.name, probe.what, outcome, sanitize(detail, key), fields, quirks)


def _message(group: BaseException) -> str:
    """The text of the exception itself, or of the first in a group."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return str(group)


def sanitize(text: str, key: str | None) -> str:
    """One line of limited length, without the key, which a worker may return."""
    if key:
        text = text.replace(key, "***")
    text = _CONTROL.sub(" ", text).strip()
    return text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…"
