"""Probes: what is wrong is refused as the client's fault, and harms nobody."""

from functools import partial
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gateway.conformance.cases import Mismatch, expect
from gateway.conformance.worker import ideal
from gateway.conformance.worker.line import Heard, Line, NotOffered
from gateway.conformance.worker.probing import Probe
from gateway.core.ports import WireRequest
from gateway.core.types import Sampling, Stopping

_TEMPERATURE: Final = 0.4375
_LIMIT: Final = 29
"""Values by which a field is found again in what the dialect writes."""
_HUGE: Final = 10_000_000


async def _body(line: Line, body: bytes) -> str:
    request = line.say("Say hi.")
    heard = await line.send(replace(line.encoded(request), body=body), request)
    return _refused(line, heard)


def _refused(line: Line, heard: Heard) -> str:
    if heard.whole is not None:
        raise Mismatch("it is answered")
    as_usual = heard.status in ideal.statuses(line.dialect)
    expect(heard.refused or as_usual, f"wanted a refusal as the client's fault, got {heard.told}")
    return f"refused: {heard.told}"


async def _half(line: Line) -> str:
    request = line.say("Say hi.")
    wire = line.encoded(request)
    heard = await line.send(replace(wire, body=wire.body[: len(wire.body) // 2]), request)
    return _refused(line, heard)


async def _wrong(line: Line, was: Any, becomes: Any, *, must: bool) -> str:
    """A field that holds ``was`` holds another thing; ``must``: nothing good can come of it."""
    sampling, stopping = Sampling(temperature=_TEMPERATURE), Stopping(max_tokens=_LIMIT)
    request = line.say("Say hi.", sampling=sampling, stopping=stopping)
    heard = await line.send(_tampered(line.encoded(request), was, becomes), request)
    if heard.whole is not None and not must:
        line.quirks.append(f"{becomes!r} is taken in place of a good number")
        return "taken"
    return _refused(line, heard)


def _tampered(wire: WireRequest, was: Any, becomes: Any) -> WireRequest:
    fields = msgspec.json.decode(wire.body)
    changed = _with(fields, was, becomes)
    if changed == fields:
        raise NotOffered("the field is not in the body as such")
    return replace(wire, body=msgspec.json.encode(changed))


def _with(value: Any, was: Any, becomes: Any) -> Any:
    match value:
        case dict():
            return {key: _with(one, was, becomes) for key, one in value.items()}
        case list():
            return [_with(one, was, becomes) for one in value]
        case str() if value.startswith("{"):
            return _within(value, was, becomes)
        case _:
            return becomes if value == was and type(value) is type(was) else value


def _within(text: str, was: Any, becomes: Any) -> str:
    """A text that is JSON itself, as some dialects have it."""
    try:
        return msgspec.json.encode(_with(msgspec.json.decode(text), was, becomes)).decode()
    except msgspec.DecodeError:
        return text


async def _not_a_text(line: Line) -> str:
    text = "interlingua says hi"
    request = line.say(text)
    heard = await line.send(_tampered(line.encoded(request), text, 5), request)
    if heard.whole is not None:
        line.quirks.append("a number is taken in place of a text")
        return "taken"
    return _refused(line, heard)


async def _huge(line: Line) -> str:
    """Left as soon as something is said: a model need not go on for ever."""
    request = line.say("Say hi.", stream=True, stopping=Stopping(max_tokens=_HUGE))
    heard = await line.leave(request)
    if heard.error is None:
        return "taken"
    return _refused(line, heard)


async def _method(line: Line) -> str:
    heard = await line.fetch(replace(line.encoded(line.say("hi")), method="PUT", body=b"{}"))
    expect(heard.status in range(400, 500), f"PUT is answered {heard.status}")
    return f"{heard.status}"


async def _path(line: Line) -> str:
    heard = await line.fetch(WireRequest("/interlingua/no/such/path", b"", method="GET"))
    expect(heard.status in range(400, 500), f"it is answered {heard.status}")
    return f"{heard.status}"


async def _after(line: Line) -> str:
    """Whatever was wrong before, a good request is answered."""
    request = line.say("Say hi.")
    wire = line.encoded(request)
    for body in (b"", b"{", wire.body[:-1], b"\xff" * 64):
        await line.send(replace(wire, body=body), request)
    choice = (await line.ask(request)).choice
    return f"answered: {choice.reason}"


PROBES: Final = (
    Probe("not-json", "A body that is no JSON is refused.", partial(_body, body=b"hello")),
    Probe("no-body", "An empty body is refused.", partial(_body, body=b"")),
    Probe("empty-object", "A body that asks nothing is refused.", partial(_body, body=b"{}")),
    Probe("half-body", "Half a body is refused.", _half),
    Probe("not-utf-8", "A body that is not UTF-8 is refused.", partial(_body, body=b"\xff\xfe{}")),
    Probe("deep-body", "A body of a hundred thousand brackets is refused.",
          partial(_body, body=b"[" * 100_000)),
    Probe("text-is-a-number", "A text that is a number is refused or taken.", _not_a_text),
    Probe("temperature-is-a-text", "A temperature that is a text is refused.",
          partial(_wrong, was=_TEMPERATURE, becomes="hot", must=True),
          needs=("sampling.temperature",)),
    Probe("temperature-is-a-list", "A temperature that is a list is refused.",
          partial(_wrong, was=_TEMPERATURE, becomes=[1], must=True),
          needs=("sampling.temperature",)),
    Probe("max-tokens-is-a-text", "A limit that is a text is refused.",
          partial(_wrong, was=_LIMIT, becomes="many", must=True), needs=("stopping.max_tokens",)),
    Probe("max-tokens-negative", "A limit below 0 is refused or taken.",
          partial(_wrong, was=_LIMIT, becomes=-5, must=False), needs=("stopping.max_tokens",)),
    Probe("max-tokens-huge", "A limit of millions is taken or refused.", _huge,
          needs=("stopping.max_tokens",)),
    Probe("wrong-method", "Another method is refused.", _method),
    Probe("wrong-path", "Another path is refused.", _path),
    Probe("after-mistakes", "A good request after all of these is answered.", _after),
)  # fmt: skip
