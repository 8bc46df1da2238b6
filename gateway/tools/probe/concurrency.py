"""Probes: connections, concurrent requests, clients that disconnect."""

import re
from collections.abc import Sequence
from typing import Final

from gateway.tools.probe.client import (
    Inconclusive,
    NotOffered,
    Probe,
    WorkerClient,
    WorkerRefused,
    WorkerResponse,
    expect,
    run_concurrently,
)
from protocols.core.request import StopConditions

_AT_ONCE: Final = 8
_ANIMALS: Final = ("cat dog", "cow hen", "owl bat", "fox elk")
_PLENTY: Final = 400


async def _keep_alive(worker: WorkerClient) -> str:
    first = await worker.send(worker.text_request("Say hi."))
    expect(first.choice.text, "nothing is said")
    second = await worker.send(worker.text_request("Say hi."))
    expect(second.choice.text, "the second response has no text")
    if first.port == second.port:
        return "two requests on one connection"
    is_closed = "close" in first.headers.get("connection", "").lower()
    expect(is_closed, "the connection is closed without a Connection: close header")
    worker.quirks.append("every response closes its connection")
    return "each response announces that it closes its connection"


async def _simultaneous(worker: WorkerClient) -> str:
    request = worker.text_request("Say hi.")
    found = await run_concurrently(*(worker.send(request) for _ in range(_AT_ONCE)))
    answered = sum(response.result is not None for response in found)
    if busy := [response for response in found if response.status in (429, 503)]:
        worker.quirks.append(f"of {_AT_ONCE} requests at once {len(busy)} are rejected")
        return f"{answered} answered, {len(busy)} rejected as overload"
    bad = next((response for response in found if response.result is None), None)
    expect(bad is None, f"{answered} of {_AT_ONCE} answered; {bad.summary if bad else ''}")
    return f"{_AT_ONCE} answered"


async def _isolation(worker: WorkerClient, *, stream: bool = True) -> str:
    """Each response belongs to its own request: it equals the response without concurrency."""
    questions = [f"Say these words and nothing else: {one} {one}" for one in _ANIMALS]
    alone = [_text(await worker.send(worker.text_request(one, stream=stream))) for one in questions]
    if len(set(alone)) < len(alone):
        raise NotOffered(f"the model gives the same response to all: {alone[0]!r}")
    found = await run_concurrently(
        *(worker.send(worker.text_request(one, stream=stream)) for one in questions)
    )
    texts = [_text(response) for response in found]
    _check_isolation(alone, texts)
    same = sum(a == b for a, b in zip(alone, texts, strict=True))
    return f"{same} of {len(texts)} exactly as alone"


def _check_isolation(alone: Sequence[str], texts: Sequence[str]) -> None:
    for n, text in enumerate(texts):
        if text == alone[n]:
            continue
        other = next((m for m, one in enumerate(alone) if m != n and text == one), None)
        expect(other is None, f"the answer to question {n} is the one to question {other}")
        mine = set(re.findall(r"\w+", alone[n]))
        strange = {
            word
            for m, one in enumerate(_ANIMALS)
            for word in one.split()
            if m != n and word not in mine and word in text
        }
        expect(not strange, f"the answer to question {n} has words of others: {sorted(strange)}")


def _text(response: WorkerResponse) -> str:
    return response.choice.text


async def _disconnect(worker: WorkerClient) -> str:
    """A disconnect does not affect the next client."""
    stopping = StopConditions(max_tokens=_PLENTY)
    request = worker.text_request("Count from one to a thousand.", stream=True, stopping=stopping)
    for _ in range(3):
        response = await worker.send_and_disconnect(request)
        if response.error is not None:
            raise Inconclusive(response.summary)
    choice = (await worker.send(worker.text_request("Say hi."))).choice
    return f"left three times, and answered: {choice.finish_reason}"


async def _simultaneous_disconnects(worker: WorkerClient) -> str:
    stopping = StopConditions(max_tokens=_PLENTY)
    request = worker.text_request("Count from one to a thousand.", stream=True, stopping=stopping)
    left = await run_concurrently(*(worker.send_and_disconnect(request) for _ in range(_AT_ONCE)))
    response = await worker.send(worker.text_request("Say hi."))
    try:
        response.choice  # noqa: B018 - what it raises tells
    except WorkerRefused:
        raise Inconclusive(response.summary) from None
    return f"{sum(one.error is None for one in left)} left at once, and answered"


async def _complete_bodies(worker: WorkerClient) -> str:
    """Every response is complete, however many requests follow on one connection."""
    for stream in (True, False, True, False):
        response = await worker.send(worker.text_request("Say hi.", stream=stream))
        response.choice  # noqa: B018 - what it raises tells
        length = response.headers.get("content-length")
        if length is not None:
            expect(int(length) == len(response.body), f"{len(response.body)} bytes of {length}")
    return "four answers, each with its end"


PROBES: Final = (
    Probe("keep-alive", "A second request reuses the connection.", _keep_alive),
    Probe("ends", "Every response is complete.", _complete_bodies),
    Probe(
        "at-once", "Eight concurrent requests are answered, or rejected as overload.", _simultaneous
    ),
    Probe("apart", "Concurrent streams do not mix.", _isolation),
    Probe("left", "After a client disconnects, the next request is answered.", _disconnect),
    Probe("left-at-once", "The same after eight clients disconnect.", _simultaneous_disconnects),
)
