"""Probes: what may be said to a model, and whether its answer comes through unharmed."""

from functools import partial
from typing import Final

from gateway.conformance.cases import expect
from gateway.conformance.worker.ending import ACCENTS
from gateway.conformance.worker.line import Heard, Line, Refused, folded
from gateway.conformance.worker.probing import Probe
from gateway.core.errors import ContextTooLong, GatewayError
from gateway.core.types import Message, Role, Stopping, TextPart

_EMOJI: Final = "Say this back: 👩‍👩‍👧‍👦 🇫🇷 🏳️‍🌈 日本語 한국어 עברית 𠮷"
_CONTROLS: Final = "a\x00b\x07c\x1bd\x7fe\u2028f\ufefff"
_LOST: Final = "\ufffd"
_WORDS: Final = 400_000
"""Of a prompt that is too long for almost any model: 2 MB."""


async def _come_through(line: Line, text: str, *, stream: bool) -> str:
    heard = await line.ask(line.say(text, stream=stream))
    said = heard.choice.text + heard.choice.thought
    expect(_LOST not in said, f"characters are broken: {said!r}")
    expect(not _twice(said), f"characters are encoded twice: {said!r}")
    if stream:
        _bytewise(line, text, heard, said)
    rare = sum(not char.isascii() for char in said)
    return f"{rare} characters of several bytes" if rare else "the model said none of them"


def _twice(text: str) -> bool:
    """Whether it is UTF-8 that was taken for Latin-1."""
    if text.isascii():
        return False
    try:
        text.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return False
    return True


def _bytewise(line: Line, text: str, heard: Heard, said: str) -> None:
    """The same bytes one by one, as a network might bring them."""
    decoder = line.dialect.decoder(line.say(text, stream=True))
    body = heard.body
    try:
        events = [event for i in range(len(body)) for event in decoder.feed(body[i : i + 1])]
        answer = folded([*events, *decoder.close()])
    except GatewayError as error:
        expect(False, f"byte by byte: {error}")  # noqa: FBT003 - it is the only positional one
    else:
        choice = answer.choices[0]
        expect(choice.text + choice.thought == said, "byte by byte it is another text")


async def _borne(line: Line, text: str) -> str:
    """Answered, or refused as the client's fault."""
    try:
        return f"answered: {(await line.ask(line.say(text))).choice.reason}"
    except Refused as error:
        return f"refused: {error}"


async def _long(line: Line) -> str:
    request = line.say("word " * _WORDS, stopping=Stopping(max_tokens=1))
    heard = await line.ask(request)
    try:
        usage = heard.answer.usage
    except Refused:
        if not isinstance(heard.error, ContextTooLong):
            line.quirks.append("a prompt that is too long is refused in words nobody knows")
        return f"refused: {heard.told}"
    read = f"; it says it has read {usage.prompt_tokens} tokens" if usage is not None else ""
    return f"{_WORDS} words are taken{read}"


async def _middling(line: Line) -> str:
    text = "word " * 300 + "Say hi."
    usage = (await line.ask(line.say(text))).answer.usage
    return "answered" if usage is None else f"answered: {usage.prompt_tokens} tokens"


def _turn(role: Role, text: str) -> Message:
    return Message(role, (TextPart(text),))


async def _system(line: Line) -> str:
    turns = (_turn("system", "Answer in one word."), _turn("user", "What is the capital of Italy?"))
    return repr((await line.ask(line.turns(*turns))).choice.text[:40])


async def _several(line: Line) -> str:
    turns = (
        _turn("user", "My name is Ada."),
        _turn("assistant", "Hello Ada."),
        _turn("user", "What is my name?"),
    )
    return repr((await line.ask(line.turns(*turns))).choice.text[:40])


async def _parts(line: Line) -> str:
    turn = Message("user", (TextPart("Say "), TextPart("hi.")))
    return repr((await line.ask(line.turns(turn))).choice.text[:40])


async def _assistant_first(line: Line) -> str:
    turns = (_turn("assistant", "Hello."), _turn("user", "Say hi."))
    try:
        return f"answered: {(await line.ask(line.turns(*turns))).choice.reason}"
    except Refused as error:
        return f"refused: {error}"


PROBES: Final = (
    Probe("system", "A system message is taken.", _system),
    Probe("turns", "Earlier turns are taken.", _several),
    Probe("text-parts", "A message of several texts is taken.", _parts),
    Probe("assistant-first", "An assistant may speak first, or is refused.", _assistant_first),
    Probe("empty", "Nothing said is answered or refused.", partial(_borne, text="")),
    Probe("controls", "NUL and its like are answered or refused.",
          partial(_borne, text=_CONTROLS)),
    Probe("accents", "Letters of two bytes come through.",
          partial(_come_through, text=ACCENTS, stream=False)),
    Probe("accents-stream", "The same in a stream, wherever its packets end.",
          partial(_come_through, text=ACCENTS, stream=True)),
    Probe("emoji", "Signs of many bytes come through.",
          partial(_come_through, text=_EMOJI, stream=False)),
    Probe("emoji-stream", "The same in a stream, wherever its packets end.",
          partial(_come_through, text=_EMOJI, stream=True)),
    Probe("prompt-long", "A page of text is taken.", _middling),
    Probe("prompt-too-long", "A prompt over any limit is refused as the client's fault, or taken.",
          _long),
)  # fmt: skip
