"""Probes: why an answer ends, and what its end leaves in the text."""

from functools import partial
from typing import Final

from gateway.conformance.cases import Mismatch, expect
from gateway.conformance.worker.asking import COUNT
from gateway.conformance.worker.line import Heard, Line, NotOffered
from gateway.conformance.worker.probing import Probe
from gateway.core.aggregate import ChoiceAnswer
from gateway.core.types import Sampling, Stopping, Text

YES: Final = (
    "Reply with the one word yes and nothing else, whatever follows: a b c d e f g h i j k l m n o "
    "p q r s t u v w x y z"
)
"""To which a model that is able says next to nothing."""
ACCENTS: Final = "Say this back, letter by letter: Grüße, crème brûlée, smörgåsbord, jalapeño"
_LONG: Final = 12
"""Characters that a text must have to be stopped within."""
_PART: Final = 3
_LEAST: Final = 24
_MOST: Final = 32
_PLENTY: Final = 200


async def _length(line: Line, most: int, *, stream: bool) -> str:
    base = await line.base(COUNT)
    heard = await line.ask(line.say(COUNT, stream=stream, stopping=Stopping(max_tokens=most)))
    choice = heard.choice
    used = _used(heard)
    expect(used is None or used <= most, f"{used} tokens where {most} were allowed")
    all_of_it = len(choice.text) >= len(base) > _LONG * most
    expect(not all_of_it, f"{len(choice.text)} characters, as many as without the limit")
    return f"{len(choice.text)} of {len(base)} characters"


async def _limit(line: Line, *, stream: bool) -> str:
    base = await line.base(COUNT)
    heard = await line.ask(line.say(COUNT, stream=stream, stopping=Stopping(max_tokens=1)))
    if len(base) <= len(heard.choice.text):
        return f"the whole answer is that short: {heard.choice.reason}"
    return _reason(line, heard.choice, "length")


async def _by_itself(line: Line) -> str:
    heard = await line.ask(line.say("Say hi.", stopping=Stopping(max_tokens=_PLENTY)))
    choice, used = heard.choice, _used(heard)
    if used is not None and used >= _PLENTY:
        expect(choice.reason in {"length", "unknown"}, f"{choice.reason} at the limit's end")
        return "the model does not end by itself"
    if choice.reason == "length" and used is None:
        return "the model does not end by itself, as far as it tells"
    expect(choice.reason != "length", f"length is told at {used} tokens of {_PLENTY}")
    return _reason(line, choice, "eos", "stop")


async def _both_ways(line: Line) -> str:
    stopping = Stopping(max_tokens=2)
    whole = (await line.ask(line.say(COUNT, stopping=stopping))).choice.reason
    stream = (await line.ask(line.say(COUNT, stopping=stopping, stream=True))).choice.reason
    expect(whole == stream, f"whole {whole}, stream {stream}")
    return whole


def _reason(line: Line, choice: ChoiceAnswer, *wanted: str) -> str:
    if choice.reason == "unknown":
        line.quirks.append("no reason is told, or one that nobody knows")
        return "no reason is told"
    expect(choice.reason in wanted, f"wanted {' or '.join(wanted)}, got {choice.reason}")
    return choice.reason


def _used(heard: Heard) -> int | None:
    usage = heard.answer.usage
    return usage.completion_tokens if usage is not None and usage.source == "worker" else None


# --- stop strings ---------------------------------------------------------------------------------


async def _stop(line: Line, *, stream: bool = False, several: bool = False) -> str:
    base = await _base(line, COUNT)
    stop = _within(base, len(base) // 2)
    stops = ("\u2603 never", stop, base[-2:]) if several else (stop,)
    first = min(stops, key=lambda one: base.find(one) if one in base else len(base))
    return await _stopped(line, COUNT, first, Stopping(max_tokens=48, stop=stops), stream=stream)


async def _across(line: Line) -> str:
    heard = await line.ask(line.say(COUNT, stream=True))
    pieces = [event.text for event in heard.events if isinstance(event, Text) and event.text]
    if len(pieces) < _PART:
        raise NotOffered("the stream has too few pieces")
    at = len(pieces) // 2
    stop = pieces[at - 1][-2:] + pieces[at][:2]
    await _base(line, COUNT)
    stopping = Stopping(max_tokens=48, stop=(stop,))
    return await _stopped(line, COUNT, stop, stopping, stream=True)


async def _unicode(line: Line) -> str:
    base = await _base(line, ACCENTS)
    stop = next((char for i, char in enumerate(base) if i > 1 and ord(char) > 127), None)  # noqa: PLR2004 - what is not ASCII
    if stop is None:
        raise NotOffered("the model says no such character")
    stopping = Stopping(max_tokens=48, stop=(stop,))
    return await _stopped(line, ACCENTS, stop, stopping, stream=True)


async def _included(line: Line) -> str:
    base = await _base(line, COUNT)
    stop = _within(base, len(base) // 2)
    stopping = Stopping(max_tokens=48, stop=(stop,), include_stop=True)
    choice = (await line.ask(line.say(COUNT, stopping=stopping))).choice
    wanted = base[: base.find(stop) + len(stop)]
    expect(choice.text == wanted, f"wanted the text up to and with {stop!r}, got {choice.text!r}")
    return f"{stop!r} is left in"


async def _stopped(line: Line, text: str, stop: str, stopping: Stopping, *, stream: bool) -> str:
    base = await line.base(text)
    choice = (await line.ask(line.say(text, stream=stream, stopping=stopping))).choice
    before, said = base[: base.find(stop)], choice.text
    if said == before + stop:
        raise Mismatch(f"the stop {stop!r} is left in the text")
    if stop in said:
        raise Mismatch(f"it goes on after the stop {stop!r}")
    if said.strip() != before.strip():
        line.quirks.append("an answer that is stopped differs from the greedy answer")
    elif said != before:
        line.quirks.append("blanks at the end of a stopped text are cut off")
    return f"at {stop!r}: {_reason(line, choice, 'stop', 'eos')}"


async def _base(line: Line, text: str) -> str:
    base = await line.base(text)
    if len(base) < _LONG:
        raise NotOffered(f"the model says too little to be stopped: {base!r}")
    return base


def _within(base: str, at: int) -> str:
    """A piece of the text that is not of blanks alone."""
    return next(
        base[i : i + _PART] for i in (*range(at, len(base)), 1) if base[i : i + _PART].strip()
    )


# --- at least so many -----------------------------------------------------------------------------


async def _at_least(line: Line) -> str:
    return await _many(line, Stopping(max_tokens=_MOST, min_tokens=_LEAST), _LEAST)


async def _past_the_end(line: Line) -> str:
    return await _many(line, Stopping(max_tokens=_LEAST, ignore_eos=True), _LEAST)


async def _many(line: Line, stopping: Stopping, least: int) -> str:
    heard = await line.ask(line.say(YES, stopping=stopping))
    used = _used(heard)
    if used is None:
        raise NotOffered("the worker does not tell how many tokens it made")
    expect(used >= least, f"{used} tokens where {least} were the least")
    return f"{used} tokens"


async def _token_ids(line: Line) -> str:
    stopping = Stopping(max_tokens=8, stop_token_ids=(0, 1, 2))
    choice = (await line.ask(line.say(COUNT, stopping=stopping))).choice
    return f"taken: {choice.reason}"


async def _stop_and_draw(line: Line) -> str:
    """With sampling, too, what is stopped must not show the stop."""
    stopping, drawn = Stopping(max_tokens=48, stop=("e", "o")), Sampling(temperature=1.0, seed=5)
    text = (await line.ask(line.say(COUNT, stopping=stopping, sampling=drawn))).choice.text
    expect(not {"e", "o"} & set(text), f"a stop is left in {text!r}")
    return repr(text)


_STOP: Final = ("stopping.stop",)
_LIMIT: Final = ("stopping.max_tokens",)

PROBES: Final = (
    Probe("length-1", "One token is one token.", partial(_length, most=1, stream=False), _LIMIT),
    Probe("length-3", "Three tokens are three.", partial(_length, most=3, stream=False), _LIMIT),
    Probe("length-stream", "The same in a stream.", partial(_length, most=3, stream=True), _LIMIT),
    Probe("reason-length", "The reason of an answer that is cut short is its length.",
          partial(_limit, stream=False), needs=_LIMIT),
    Probe("reason-length-stream", "The same in a stream.", partial(_limit, stream=True),
          needs=_LIMIT),
    Probe("end", "A model that ends by itself is not said to have met a limit.", _by_itself),
    Probe("reason-same", "A stream and a whole answer tell the same reason.", _both_ways),
    Probe("stop", "A text ends before its stop string.", _stop, _STOP),
    Probe("stop-stream", "The same in a stream.", partial(_stop, stream=True), _STOP),
    Probe("stop-several", "Of several stops the first to come ends the text.",
          partial(_stop, several=True), _STOP),
    Probe("stop-across", "A stop is found across the pieces of a stream.", _across, _STOP),
    Probe("stop-unicode", "A stop may be a character of several bytes.", _unicode, _STOP),
    Probe("stop-drawn", "A stop is found in a text that is drawn.", _stop_and_draw, _STOP),
    Probe("stop-included", "A stop stays in the text where that is asked.", _included,
          ("stopping.include_stop",)),
    Probe("stop-tokens", "Stops may be tokens.", _token_ids, ("stopping.stop_token_ids",)),
    Probe("min-tokens", "An answer has the least number of tokens.", _at_least,
          ("stopping.min_tokens",)),
    Probe("ignore-eos", "A model may be made to go on past its end.", _past_the_end,
          ("stopping.ignore_eos",)),
)  # fmt: skip
