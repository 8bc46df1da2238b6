"""Probes: connections, several requests at a time, clients that leave."""

import re
from collections.abc import Sequence
from typing import Final

from gateway.conformance.cases import expect
from gateway.conformance.worker.line import Heard, Line, NotOffered, Refused, Unsure, together
from gateway.conformance.worker.probing import Probe
from gateway.core.types import Stopping

_AT_ONCE: Final = 8
_ANIMALS: Final = ("cat dog", "cow hen", "owl bat", "fox elk")
_PLENTY: Final = 400


async def _kept(line: Line) -> str:
    first = await line.ask(line.say("Say hi."))
    expect(first.choice.text, "nothing is said")
    second = await line.ask(line.say("Say hi."))
    expect(second.choice.text, "nothing is said the second time")
    if first.port == second.port:
        return "two requests on one connection"
    said = "close" in first.headers.get("connection", "").lower()
    expect(said, "the connection is closed, though no word of it was said")
    line.quirks.append("every answer closes its connection")
    return "each answer says that it closes its connection"


async def _at_once(line: Line) -> str:
    asked = line.say("Say hi.")
    found = await together(*(line.ask(asked) for _ in range(_AT_ONCE)))
    answered = sum(heard.whole is not None for heard in found)
    if busy := [heard for heard in found if heard.status in (429, 503)]:
        line.quirks.append(f"of {_AT_ONCE} requests at once {len(busy)} are turned away")
        return f"{answered} answered, {len(busy)} turned away as they should be"
    bad = next((heard for heard in found if heard.whole is None), None)
    expect(bad is None, f"{answered} of {_AT_ONCE} answered; {bad.told if bad else ''}")
    return f"{_AT_ONCE} answered"


async def _apart(line: Line, *, stream: bool = True) -> str:
    """Each answer is the one to its own question, as asked alone."""
    questions = [f"Say these words and nothing else: {one} {one}" for one in _ANIMALS]
    alone = [_text(await line.ask(line.say(one, stream=stream))) for one in questions]
    if len(set(alone)) < len(alone):
        raise NotOffered(f"the model says the same to all: {alone[0]!r}")
    found = await together(*(line.ask(line.say(one, stream=stream)) for one in questions))
    texts = [_text(heard) for heard in found]
    _judge(alone, texts)
    same = sum(a == b for a, b in zip(alone, texts, strict=True))
    return f"{same} of {len(texts)} exactly as alone"


def _judge(alone: Sequence[str], texts: Sequence[str]) -> None:
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


def _text(heard: Heard) -> str:
    return heard.choice.text


async def _left(line: Line) -> str:
    """A client that leaves costs the next one nothing."""
    stopping = Stopping(max_tokens=_PLENTY)
    asked = line.say("Count from one to a thousand.", stream=True, stopping=stopping)
    for _ in range(3):
        heard = await line.leave(asked)
        if heard.error is not None:
            raise Unsure(heard.told)
    choice = (await line.ask(line.say("Say hi."))).choice
    return f"left three times, and answered: {choice.reason}"


async def _left_together(line: Line) -> str:
    stopping = Stopping(max_tokens=_PLENTY)
    asked = line.say("Count from one to a thousand.", stream=True, stopping=stopping)
    left = await together(*(line.leave(asked) for _ in range(_AT_ONCE)))
    heard = await line.ask(line.say("Say hi."))
    try:
        heard.choice  # noqa: B018 - what it raises tells
    except Refused:
        raise Unsure(heard.told) from None
    return f"{sum(one.error is None for one in left)} left at once, and answered"


async def _whole_bodies(line: Line) -> str:
    """No answer without its end, however many are asked for one after the other."""
    for stream in (True, False, True, False):
        heard = await line.ask(line.say("Say hi.", stream=stream))
        heard.choice  # noqa: B018 - what it raises tells
        length = heard.headers.get("content-length")
        if length is not None:
            expect(int(length) == len(heard.body), f"{len(heard.body)} bytes of {length}")
    return "four answers, each with its end"


PROBES: Final = (
    Probe("keep-alive", "A second request goes over the same connection.", _kept),
    Probe("ends", "No answer is without its end.", _whole_bodies),
    Probe("at-once", "Eight requests at once are answered, or turned away in time.", _at_once),
    Probe("apart", "Streams at the same time are kept apart.", _apart),
    Probe("left", "A client that leaves costs the next nothing.", _left),
    Probe("left-at-once", "The same when eight leave.", _left_together),
)
