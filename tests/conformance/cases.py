"""Conformance cases: what one is, how it is played against a server, and when it applies.

A row says what is sent and what must come back::

    Case("X1", "POST", "/v1/things", body={"name": "a"}, body_is={"id": str, "name": "a"})
    Case("X2", "POST", "/v1/things", body=b"{", status=400, body_has={"error": re.compile("J.*")})
    Case("X3", "POST", "/v1/things", body={"stream": True}, events=[{"n": 1}, {"n": 2}, "[DONE]"])

Wherever a value is wanted, ``...`` stands for any value, a type for any value of it, a pattern for
a string that it matches from end to end, and a function for what it calls true. A dict wants its
keys in its order and no others, or with ``body_has`` those among others; a list wants its items.

The gateway that is played against serves the models of the cases over a scripted model, and knows
the key that ``run_case`` is given.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
import msgspec
from msgspec import UNSET, Struct

JSON = "application/json"
EVENTS = "text/event-stream"
KEY = "sk-test"


class Mismatch(Exception):
    """An answer is not what its case wants; the text says where, what was wanted, what came."""


class Response(Struct, frozen=True):
    """What came back. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cut: bool = False
    """The connection broke before the body's end."""

    @property
    def json(self) -> Any:
        """The body, decoded. Raises Mismatch."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise Mismatch(f"the body is not JSON: {_excerpt(self.body)}") from None

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")

    @property
    def events(self) -> list[Any]:
        """The body's events: the JSON of each ``data:``, or its text where that is no JSON.

        A block that is not a single ``data:`` line is given as it stands, as a string.
        """
        return [_parse_event(block) for block in re.split(r"\r?\n\r?\n", self.text) if block]

    @property
    def chunks(self) -> list[Any]:
        """Those events that are JSON."""
        return [event for event in self.events if not isinstance(event, str)]


Check = Callable[[Response], None]
"""Raises Mismatch."""


class Case(Struct, frozen=True):
    """One request, and what must come back.

    ``id`` begins with the case's number in the protocol's wire document; further words tell rows of
    one number apart. ``body`` is sent as JSON unless it is bytes. A header of None is not sent.
    """

    id: str
    method: str
    path: str
    headers: Mapping[str, str | None] = {}
    body: Any = None
    status: int = 200
    content_type: str | None = None
    """Without parameters; None is JSON, or a stream of events where ``events`` are wanted, or
    nothing where the body must be empty."""
    answer_headers: Mapping[str, Any] = {}
    """Those wanted among others; None wants it absent."""
    body_is: Any = UNSET
    """The whole body: bytes as they are, everything else as JSON."""
    body_has: Any = UNSET
    """What the body must hold among other things."""
    events: Sequence[Any] | None = None
    """Every event of the stream in its order; the stream must have come whole."""
    check: Check | None = None
    times: int = 1
    """How often it is sent, one after the other."""
    across: Callable[[Sequence[Response]], None] | None = None
    """Sees all the answers together. Raises Mismatch."""
    meanwhile: "Case | None" = None
    """Played once the first bytes of this answer's body have come, and before the next are read."""
    profile: str | None = None
    needs: Mapping[str, Any] = {}
    """The protocol's options that the gateway must be configured with."""
    alone: bool = False
    """No other protocol may share the listener."""
    why: str = ""
    """Why the gateway differs here on purpose from the protocol's own server."""

    @property
    def number(self) -> str:
        """The number in the wire document."""
        return self.id.split()[0]


def cases_of(protocol: str) -> Sequence[Case]:
    """A protocol's cases. Raises ModuleNotFoundError."""
    cases: Sequence[Case] = importlib.import_module(f"tests.conformance.{protocol}").CASES
    return cases


class ProtocolSetup(Struct, frozen=True, kw_only=True):
    """A protocol as the gateway under test serves it. ``profiles`` are all of the protocol's.

    A case is written for its own options, and for the defaults of all others, so it does not apply
    where another option is set.
    """

    profiles: tuple[str, ...]
    """The first is the default."""
    profile: str | None = None
    options: Mapping[str, object] = {}
    alone: bool = False
    """No other protocol shares the listener."""

    def missing(self, case: Case) -> str:
        """What the case needs and the gateway does not have; "" where the case applies."""
        return ", ".join(self._missing(case))

    def _missing(self, case: Case) -> Iterator[str]:
        required = case.profile or self.profiles[0]
        if required != (self.profile or self.profiles[0]):
            yield f"the profile {required}"
        for name, value in case.needs.items():
            if self.options.get(name) != value:
                yield f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name in self.options.keys() - case.needs.keys():
            yield f"the default of {name}"
        if case.alone and not self.alone:
            yield "a listener without other protocols"


async def run_case(http: httpx.AsyncClient, case: Case, *, key: str | None = KEY) -> list[Response]:
    """Send a case's request to the base URL of ``http`` and hold each answer against the case.

    Raises Mismatch, or httpx.TransportError when there is no answer at all.
    """
    answers = []
    for _ in range(case.times):
        answer = await _send_case(http, case, key)
        check_response(case, answer)
        answers.append(answer)
    if case.across is not None:
        case.across(answers)
    return answers


def check_response(case: Case, answer: Response) -> None:
    """Hold an answer against its case. Raises Mismatch."""
    if answer.status != case.status:
        raise Mismatch(
            f"status: wanted {case.status}, got {answer.status}: {_excerpt(answer.body)}"
        )
    _judge_headers(case, answer)
    if isinstance(case.body_is, bytes):
        if answer.body != case.body_is:
            raise Mismatch(f"body: wanted {case.body_is!r}, got {_excerpt(answer.body)}")
    elif case.body_is is not UNSET:
        match(case.body_is, answer.json, "body")
    if case.body_has is not UNSET:
        match(case.body_has, answer.json, "body", whole=False)
    if case.events is not None:
        expect(not answer.cut, f"the stream broke after {_excerpt(answer.body[-200:])}")
        match(list(case.events), answer.events, "events")
    if case.check is not None:
        case.check(answer)


def expect(true: object, otherwise: str) -> None:
    """Raises Mismatch ``otherwise``."""
    if not true:
        raise Mismatch(otherwise)


def match(wanted: Any, got: Any, at: str, *, whole: bool = True) -> None:
    """Raises Mismatch unless ``got`` is as ``wanted``; ``at`` is its place in the answer.

    ``whole``: dicts have the wanted keys only, in the wanted order.
    """
    good = True
    if isinstance(wanted, dict):
        _match_dict(wanted, got, at, whole=whole)
    elif isinstance(wanted, list | tuple):
        _match_list(wanted, got, at, whole=whole)
    elif isinstance(wanted, re.Pattern):
        good = isinstance(got, str) and wanted.fullmatch(got) is not None
    elif isinstance(wanted, type):
        good = isinstance(got, wanted) and (wanted is bool or not isinstance(got, bool))
    elif callable(wanted):
        good = bool(wanted(got))
    elif wanted is not ...:
        good = wanted == got and isinstance(wanted, bool) is isinstance(got, bool)
    if not good:
        raise Mismatch(f"{at}: wanted {_describe_expected(wanted)}, got {_excerpt(got)}")


def _match_dict(wanted: Mapping[str, Any], got: Any, at: str, *, whole: bool) -> None:
    if not isinstance(got, dict):
        raise Mismatch(f"{at}: wanted an object, got {_excerpt(got)}")
    if whole and list(wanted) != list(got):
        raise Mismatch(f"{at}: wanted the keys {', '.join(wanted)}, got {', '.join(got)}")
    for key, one in wanted.items():
        if key not in got:
            raise Mismatch(f"{at}: wanted {key}, got only {', '.join(got)}")
        match(one, got[key], f"{at}.{key}", whole=whole)


def _match_list(wanted: Sequence[Any], got: Any, at: str, *, whole: bool) -> None:
    if not isinstance(got, list):
        raise Mismatch(f"{at}: wanted an array, got {_excerpt(got)}")
    for i, (one, item) in enumerate(zip(wanted, got, strict=False)):
        match(one, item, f"{at}[{i}]", whole=whole)
    if len(wanted) != len(got):
        last = _excerpt(got[-1]) if got else "nothing"
        raise Mismatch(f"{at}: wanted {len(wanted)} items, got {len(got)}; the last is {last}")


def _judge_headers(case: Case, answer: Response) -> None:
    wanted = case.content_type
    if wanted is None and case.body_is != b"":
        wanted = JSON if case.events is None else EVENTS
    if wanted is not None:
        got = answer.headers.get("content-type", "").partition(";")[0]
        match(wanted, got, "content-type")
    for name, one in case.answer_headers.items():
        match(one, answer.headers.get(name.lower()), name)


async def _send_case(http: httpx.AsyncClient, case: Case, key: str | None) -> Response:
    content = None
    headers: dict[str, str | None] = {}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    if case.body is not None:
        content = case.body if isinstance(case.body, bytes) else msgspec.json.encode(case.body)
        headers["content-type"] = JSON
    headers |= {name.lower(): value for name, value in case.headers.items()}
    sent = {name: value for name, value in headers.items() if value is not None}
    pieces = []
    cut = False
    async with http.stream(case.method, case.path, content=content, headers=sent) as response:
        try:
            async for piece in response.aiter_bytes():
                pieces.append(piece)
                if case.meanwhile is not None and len(pieces) == 1:
                    await run_case(http, case.meanwhile, key=key)
        except httpx.RemoteProtocolError:
            cut = True
    got = {name.lower(): value for name, value in response.headers.items()}
    return Response(response.status_code, got, b"".join(pieces), cut)


def _parse_event(block: str) -> Any:
    if not block.startswith("data:") or "\n" in block.strip("\n"):
        return block
    text = block.strip("\n").removeprefix("data:").removeprefix(" ")
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _describe_expected(wanted: Any) -> str:
    match wanted:
        case re.Pattern():
            return f"what matches {wanted.pattern!r}"
        case type():
            return f"a value of type {wanted.__name__}"
        case _ if callable(wanted):
            return f"what satisfies {wanted.__name__}"
        case _:
            return repr(wanted)


def _excerpt(got: Any) -> str:
    text = repr(got)
    return text if len(text) <= 400 else text[:400] + "…"
