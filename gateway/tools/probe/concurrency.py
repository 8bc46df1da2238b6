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

_CONCURRENCY: Final = 8
_ANIMALS: Final = ("cat dog", "cow hen", "owl bat", "fox elk")
_HIGH_LIMIT: Final = 400


async def _keep_alive(worker: WorkerClient) -> str:
    first = await worker.send(worker.text_request("Say hi."))
    expect(first.choice.text, "the response has no text")
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
    responses = await run_concurrently(*(worker.send(request) for _ in range(_CONCURRENCY)))
    answered = sum(response.result is not None for response in responses)
    if overloaded := [response for response in responses if response.status in (429, 503)]:
        worker.quirks.append(f"of {_CONCURRENCY} requests at once {len(overloaded)} are rejected")
        return f"{answered} answered, {len(overloaded)} rejected as overload"
    failure = next((response for response in responses if response.result is None), None)
    expect(
        failure is None,
        f"{answered} of {_CONCURRENCY} answered; {failure.summary if failure else ''}",
    )
    return f"{_CONCURRENCY} answered"


async def _isolation(worker: WorkerClient, *, stream: bool = True) -> str:
    """Each response belongs to its own request: it equals the response without concurrency."""
    questions = [
        f"Say these words and nothing else: {question} {question}" for question in _ANIMALS
    ]
    expected = [
        _text(await worker.send(worker.text_request(question, stream=stream)))
        for question in questions
    ]
    if len(set(expected)) < len(expected):
        raise NotOffered(f"the model gives the same response to all: {expected[0]!r}")
    responses = await run_concurrently(
        *(worker.send(worker.text_request(question, stream=stream)) for question in questions)
    )
    texts = [_text(response) for response in responses]
    _check_isolation(expected, texts)
    equal = sum(a == b for a, b in zip(expected, texts, strict=True))
    return f"{equal} of {len(texts)} exactly as without concurrency"


def _check_isolation(expected: Sequence[str], texts: Sequence[str]) -> None:
    for n, text in enumerate(texts):
        if text == expected[n]:
            continue
        other = next((m for m, animals in enumerate(expected) if m != n and text == animals), None)
        expect(other is None, f"the answer to question {n} is the one to question {other}")
        own_words = set(re.findall(r"\w+", expected[n]))
        foreign = {
            word
            for m, animals in enumerate(_ANIMALS)
            for word in animals.split()
            if m != n and word not in own_words and word in text
        }
        expect(not foreign, f"the answer to question {n} has words of others: {sorted(foreign)}")


def _text(response: WorkerResponse) -> str:
    return response.choice.text


async def _disconnect(worker: WorkerClient) -> str:
    """A disconnect does not affect the next client."""
    stopping = StopConditions(max_tokens=_HIGH_LIMIT)
    request = worker.text_request("Count from one to a thousand.", stream=True, stopping=stopping)
    for _ in range(3):
        response = await worker.send_and_disconnect(request)
        if response.error is not None:
            raise Inconclusive(response.summary)
    choice = (await worker.send(worker.text_request("Say hi."))).choice
    return f"disconnected three times, then answered: {choice.finish_reason}"


async def _simultaneous_disconnects(worker: WorkerClient) -> str:
    stopping = StopConditions(max_tokens=_HIGH_LIMIT)
    request = worker.text_request("Count from one to a thousand.", stream=True, stopping=stopping)
    responses = await run_concurrently(
        *(worker.send_and_disconnect(request) for _ in range(_CONCURRENCY))
    )
    response = await worker.send(worker.text_request("Say hi."))
    try:
        response.choice  # noqa: B018 - it raises if there is none
    except WorkerRefused:
        raise Inconclusive(response.summary) from None
    disconnected = sum(cancelled.error is None for cancelled in responses)
    return f"{disconnected} disconnected at once, then answered"


async def _complete_bodies(worker: WorkerClient) -> str:
    """Every response is complete, however many requests follow on one connection."""
    for stream in (True, False, True, False):
        response = await worker.send(worker.text_request("Say hi.", stream=stream))
        response.choice  # noqa: B018 - it raises if there is none
        length = response.headers.get("content-length")
        if length is not None:
            expect(int(length) == len(response.body), f"{len(response.body)} bytes of {length}")
    return "four complete responses"


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
