"""Probes: is it there, does it answer, whole and in pieces, and does it count."""

from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.conformance.cases import Mismatch, expect
from gateway.conformance.worker import ideal
from gateway.conformance.worker.line import Heard, Line, NotOffered, Refused
from gateway.conformance.worker.probing import Probe
from gateway.core.ports import Learning
from gateway.core.types import GenerateRequest, PromptEcho, Start, Stopping, Text, Usage

COUNT: Final = "Count from one to twenty in words, with a space between them and nothing else."
_LINES: Final = "The capital of France is\nParis. The capital of Italy is"
"""A prompt in two lines, which nobody says back by chance."""
_SLACK: Final = 8
"""Tokens that a text may have beside its characters: begins, ends, a template's."""


async def _health(line: Line) -> str:
    heard = await line.fetch(line.dialect.probe)
    expect(heard.status in range(200, 300), f"{line.dialect.probe.path} is answered {heard.status}")
    return f"{line.dialect.probe.path} is answered {heard.status}"


async def _capacity(line: Line) -> str:
    if not isinstance(line.dialect, Learning):
        raise NotOffered("the dialect asks nothing")
    model = line.whom.model or line.whom.embedder or ""
    heard = [await line.fetch(wire) for wire in line.dialect.questions(model)]
    bodies = [one.body if one.status in range(200, 300) else None for one in heard]
    most = line.dialect.learn(model, bodies)
    had = sum(body is not None for body in bodies)
    expect(had, f"none of {len(bodies)} questions is answered: {[one.status for one in heard]}")
    told = "tells no number" if most is None else f"takes {most} at a time"
    return f"{had} of {len(bodies)} questions answered; {told}"


async def _unknown(line: Line) -> str:
    request = replace(line.say("hi"), model="interlingua-no-such-model")
    heard = await line.ask(request)
    if heard.whole is not None:
        line.quirks.append("every model's name is answered")
        return "every name is answered: it serves one model"
    expect(heard.refused, f"wanted a refusal, got {heard.told}")
    return f"refused: {heard.told}"


async def _whole(line: Line) -> str:
    choice = (await line.ask(line.say(COUNT))).choice
    expect(choice.text.strip() or choice.thought, "the text is empty")
    return f"{len(choice.text)} characters"


async def _stream(line: Line) -> str:
    heard = await line.ask(line.say(COUNT, stream=True))
    said = heard.choice
    expect(said.text.strip() or said.thought, "the text is empty")
    pieces = sum(isinstance(event, Text) for event in heard.events)
    if pieces == 1:
        line.quirks.append("a stream has its whole text in one piece")
    return f"{pieces} pieces in {len(heard.pieces)} reads"


async def _same(line: Line) -> str:
    whole = await line.base(COUNT)
    said = (await line.ask(line.say(COUNT, stream=True))).choice.text
    if said != whole:
        place = next((i for i, (a, b) in enumerate(zip(said, whole, strict=False)) if a != b), None)
        at = min(len(said), len(whole)) if place is None else place
        raise Mismatch(
            f"they differ from character {at}: {whole[at : at + 20]!r}, {said[at : at + 20]!r}"
        )
    return "the same text"


async def _prompt(line: Line) -> str:
    choice = (await line.ask(line.prompt("The days of the week are Monday, Tuesday,"))).choice
    return f"{len(choice.text)} characters"


async def _usage_whole(line: Line) -> str:
    return _counted(await line.ask(_countable(line, stream=False)))


async def _usage_stream(line: Line) -> str:
    heard = await line.ask(_countable(line, stream=True))
    counted = _counted(heard)
    places = [i for i, event in enumerate(heard.events) if isinstance(event, Usage)]
    last = max(i for i, event in enumerate(heard.events) if isinstance(event, Text))
    return f"{counted}; {'before' if places[0] < last else 'after'} the last text"


async def _usage_same(line: Line) -> str:
    whole = (await line.ask(line.say(COUNT))).answer.usage
    stream = (await line.ask(line.say(COUNT, stream=True))).answer.usage
    if whole is None or stream is None:
        raise NotOffered("the worker does not tell usage both ways")
    got = [(one.prompt_tokens, one.completion_tokens) for one in (whole, stream)]
    expect(got[0] == got[1], f"whole {got[0]}, stream {got[1]} (prompt, completion)")
    return f"{got[0]} (prompt, completion)"


def _countable(line: Line, *, stream: bool) -> GenerateRequest:
    """Raises NotOffered where the dialect has no place for usage."""
    request = line.say(COUNT, stream=stream)
    if not ideal.tells_usage(line.dialect, request):
        raise NotOffered("the dialect has no place for it")
    return request


def _counted(heard: Heard) -> str:
    """Usage that can be true of the answer."""
    answer = heard.answer
    usage = answer.usage
    text = answer.choices[0].text + answer.choices[0].thought
    if usage is None or usage.source != "worker":
        raise Mismatch("no usage came")
    expect(usage.prompt_tokens > 0, f"a prompt of {usage.prompt_tokens} tokens")
    most = len(text.encode()) + _SLACK
    expect(
        0 < usage.completion_tokens <= most,
        f"{usage.completion_tokens} completion tokens for {len(text)} characters",
    )
    return f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens"


async def _no_echo(line: Line) -> str:
    for stream in (False, True):
        heard = await line.ask(line.prompt(_LINES, stream=stream))
        text = heard.choice.text
        expect(not text.startswith(_LINES), "the prompt stands before the text")
        expect(not any(isinstance(e, PromptEcho) for e in heard.events), "the prompt is told")
    return "only what is new"


async def _begins_once(line: Line) -> str:
    heard = await line.ask(line.say(COUNT, stream=True))
    expect(heard.answer.choices, "there is no choice")
    starts = sum(isinstance(event, Start) for event in heard.events)
    expect(starts <= 1, f"it begins {starts} times")
    return "one beginning, one end"


async def _types(line: Line) -> str:
    kinds = []
    for stream in (False, True):
        heard = await line.ask(line.say("Say hi.", stream=stream))
        expect(heard.whole is not None, heard.told)
        kind = heard.headers.get("content-type", "")
        events = not heard.body.lstrip().startswith((b"{", b"["))
        wanted = "text/event-stream" if events else "application/json"
        got = kind.partition(";")[0].strip().lower()
        expect(got == wanted, f"a body of {wanted} is called {kind!r}")
        charset = kind.lower().partition("charset=")[2].strip('" ')
        expect(charset in {"", "utf-8"}, f"the charset is {charset!r}")
        kinds.append(got)
    return ", ".join(kinds)


async def _unknown_field(line: Line) -> str:
    request = line.say("Say hi.")
    wire = line.encoded(request)
    fields = msgspec.json.decode(wire.body)
    body = msgspec.json.encode(fields | {"interlingua_probe": 1})
    heard = await line.send(replace(wire, body=body), request)
    try:
        heard.choice  # noqa: B018 - what it raises tells
    except Refused:
        line.quirks.append("a parameter that it does not know is refused")
        return f"refused: {heard.told}"
    return "taken and ignored"


async def _one_token(line: Line) -> str:
    request = line.say(COUNT, stream=True, stopping=Stopping(max_tokens=1))
    choice = (await line.ask(request)).choice
    return f"{choice.text!r}, {choice.reason}"


PROBES: Final = (
    Probe("health", "The dialect's probe is answered with 200.", _health),
    Probe("capacity", "What the dialect asks before it sends requests is answered.", _capacity),
    Probe("whole", "A whole answer comes, in the dialect.", _whole),
    Probe("stream", "A streamed answer comes, with the dialect's end.", _stream),
    Probe("prompt", "A prompt is gone on with.", _prompt),
    Probe("model-unknown", "A model that is not there is refused.", _unknown),
    Probe("stream-is-whole", "A greedy stream has the text of the whole answer.", _same),
    Probe("stream-begins-once", "A stream begins once, and nothing follows its end.", _begins_once),
    Probe("stream-one-token", "A stream of one token has its end, too.", _one_token),
    Probe("usage-whole", "A whole answer tells its tokens.", _usage_whole),
    Probe("usage-stream", "A stream tells its tokens.", _usage_stream),
    Probe("usage-same", "Both tell the same number of tokens.", _usage_same),
    Probe("no-echo", "The prompt is not given back unasked.", _no_echo),
    Probe("content-types", "Bodies are called what they are.", _types),
    Probe("field-unknown", "A parameter it does not know is ignored or refused.", _unknown_field),
)
