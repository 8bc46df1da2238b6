"""Conformance cases: what a case is, how it runs against a server, and when it applies.

A case has a request and the expected response:

    Case("X1", "POST", "/v1/things", body={"name": "a"}, body_is={"id": str, "name": "a"})
    Case("X2", "POST", "/v1/things", body=b"{", status=400, body_has={"error": re.compile("J.*")})
    Case("X3", "POST", "/v1/things", body={"stream": True}, events=[{"n": 1}, {"n": 2}, "[DONE]"])

In place of an expected value, ``...`` matches any value, a type any value of that type, a pattern a
string that it matches in full, and a function any value for which it returns true. A dict must have
the same keys in the same order; with ``body_has`` further keys are allowed. A list must have the
same items.

The server must serve the cases' models with a scripted model and accept the key given to
``run_case``.
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
    """A response differs from its case; the text has the place and both values."""


class Response(Struct, frozen=True):
    """A response received. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cut: bool = False
    """Whether the connection ended before the body did."""

    @property
    def json(self) -> Any:
        """Decode the body. Raises Mismatch."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise Mismatch(f"the body is not JSON: {_excerpt(self.body)}") from None

    @property
    def text(self) -> str:
        """Return the body as text."""
        return self.body.decode("utf-8", "replace")

    @property
    def events(self) -> list[Any]:
        """Return the JSON of each ``data:`` line, or its text if it is not JSON.

        A block that is not a single ``data:`` line is returned as a string.
        """
        return [_parse_event(block) for block in re.split(r"\r?\n\r?\n", self.text) if block]

    @property
    def chunks(self) -> list[Any]:
        """Return the events that are JSON."""
        return [event for event in self.events if not isinstance(event, str)]


Check = Callable[[Response], None]
"""Raises Mismatch."""


class Case(Struct, frozen=True):
    """One request and the expected response.

    ``id`` starts with the case's number in the protocol's wire document; further words distinguish
    cases of one number. ``body`` is sent as JSON unless it is bytes. A header of None is not sent.
    """

    id: str
    method: str
    path: str
    headers: Mapping[str, str | None] = {}
    body: Any = None
    status: int = 200
    content_type: str | None = None
    """Without parameters. None expects JSON or, with ``events``, an event stream.

    An empty body is expected without a content type.
    """
    answer_headers: Mapping[str, Any] = {}
    """Expected headers; further ones are allowed, and None must be absent."""
    body_is: Any = UNSET
    """The entire body: bytes are compared unchanged, everything else as JSON."""
    body_has: Any = UNSET
    """What the body must contain."""
    events: Sequence[Any] | None = None
    """All events of the stream in order; the stream must be complete."""
    check: Check | None = None
    times: int = 1
    """How often the request is sent, one after the other."""
    across: Callable[[Sequence[Response]], None] | None = None
    """Checks all responses together. Raises Mismatch."""
    meanwhile: "Case | None" = None
    """A case that runs after the first bytes of this response's body arrived."""
    profile: str | None = None
    needs: Mapping[str, Any] = {}
    """Options of the protocol that the gateway must be configured with."""
    alone: bool = False
    """Whether no other protocol may share the listener."""
    why: str = ""
    """Why the gateway intentionally differs from the protocol's own server."""

    @property
    def number(self) -> str:
        """Return the number in the wire document."""
        return self.id.split()[0]


def cases_of(protocol: str) -> Sequence[Case]:
    """Return a protocol's cases. Raises ModuleNotFoundError."""
    cases: Sequence[Case] = importlib.import_module(f"tests.conformance.{protocol}").CASES
    return cases


class ProtocolSetup(Struct, frozen=True, kw_only=True):
    """A protocol as the tested gateway serves it. ``profiles`` are all of the protocol's.

    A case expects its own options and the defaults of all others, so it does not apply where
    another option is set.
    """

    profiles: tuple[str, ...]
    """The first is the default."""
    profile: str | None = None
    options: Mapping[str, object] = {}
    alone: bool = False
    """Whether no other protocol shares the listener."""

    def missing(self, case: Case) -> str:
        """Return what the case needs and the gateway lacks, or "" if the case applies."""
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
    """Send a case's request to the base URL of ``http`` and compare each response.

    Raises Mismatch, or httpx.TransportError if there is no response.
    """
    answers = []
    for _ in range(case.times):
        response = await _send_case(http, case, key)
        check_response(case, response)
        answers.append(response)
    if case.across is not None:
        case.across(answers)
    return answers


def check_response(case: Case, answer: Response) -> None:
    """Compare a response with its case. Raises Mismatch."""
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
        match(case.body_has, answer.json, "body", exact=False)
    if case.events is not None:
        expect(not answer.cut, f"the stream broke after {_excerpt(answer.body[-200:])}")
        match(list(case.events), answer.events, "events")
    if case.check is not None:
        case.check(answer)


def expect(true: object, otherwise: str) -> None:
    """Raise Mismatch with ``otherwise`` unless the condition holds."""
    if not true:
        raise Mismatch(otherwise)


def match(wanted: Any, actual: Any, at: str, *, exact: bool = True) -> None:
    """Raise Mismatch unless ``got`` matches ``wanted``; ``at`` is its place in the response.

    With ``exact``, dicts must have exactly the expected keys in order.
    """
    good = True
    if isinstance(wanted, dict):
        _match_dict(wanted, actual, at, exact=exact)
    elif isinstance(wanted, list | tuple):
        _match_list(wanted, actual, at, exact=exact)
    elif isinstance(wanted, re.Pattern):
        good = isinstance(actual, str) and wanted.fullmatch(actual) is not None
    elif isinstance(wanted, type):
        good = isinstance(actual, wanted) and (wanted is bool or not isinstance(actual, bool))
    elif callable(wanted):
        good = bool(wanted(actual))
    elif wanted is not ...:
        good = wanted == actual and isinstance(wanted, bool) is isinstance(actual, bool)
    if not good:
        raise Mismatch(f"{at}: wanted {_describe_expected(wanted)}, got {_excerpt(actual)}")


def _match_dict(wanted: Mapping[str, Any], actual: Any, at: str, *, exact: bool) -> None:
    if not isinstance(actual, dict):
        raise Mismatch(f"{at}: wanted an object, got {_excerpt(actual)}")
    if exact and list(wanted) != list(actual):
        raise Mismatch(f"{at}: wanted the keys {', '.join(wanted)}, got {', '.join(actual)}")
    for key, one in wanted.items():
        if key not in actual:
            raise Mismatch(f"{at}: wanted {key}, got only {', '.join(actual)}")
        match(one, actual[key], f"{at}.{key}", exact=exact)


def _match_list(wanted: Sequence[Any], actual: Any, at: str, *, exact: bool) -> None:
    if not isinstance(actual, list):
        raise Mismatch(f"{at}: wanted an array, got {_excerpt(actual)}")
    for i, (one, item) in enumerate(zip(wanted, actual, strict=False)):
        match(one, item, f"{at}[{i}]", exact=exact)
    if len(wanted) != len(actual):
        last = _excerpt(actual[-1]) if actual else "nothing"
        raise Mismatch(f"{at}: wanted {len(wanted)} items, got {len(actual)}; the last is {last}")


def _judge_headers(case: Case, answer: Response) -> None:
    wanted = case.content_type
    if wanted is None and case.body_is != b"":
        wanted = JSON if case.events is None else EVENTS
    if wanted is not None:
        content_type = answer.headers.get("content-type", "").partition(";")[0]
        match(wanted, content_type, "content-type")
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
    headers_by_name = {name.lower(): value for name, value in response.headers.items()}
    return Response(response.status_code, headers_by_name, b"".join(pieces), cut)


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


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 400 else text[:400] + "…"
