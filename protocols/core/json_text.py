"""Decodes JSON texts of others, of which none may be nested deeper than MAX_DEPTH.

By itself, a decoder stops where the interpreter's stack ends: another depth for each release of
Python, and for each caller. The depth is therefore counted in the text before it is decoded, and
every text is decoded here: bodies, the responses of workers, stored objects, and JSON in strings.
A ``Raw`` is part of a text whose depth was counted: who makes one of a
text decodes that text before.
"""

import json  # noqa: TID251 - msgspec does not show names that stand twice
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import accumulate
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Generic, TypeVar, get_args, get_origin, overload

import msgspec
from msgspec import Raw

MAX_DEPTH: Final = 128
"""How deep arrays and objects may be nested, in any JSON text."""

_SMALL: Final = 2 * MAX_DEPTH
"""A text of up to so many bytes is too short to be nested deeper, as each bracket is closed."""
_SLICE: Final = 64 << 10
"""How many bytes are looked at in one step: the interpreter's lock is free between steps."""
_STEP: Final = 4 << 10
"""How many bytes are compared one by one where a rare character is found."""
_BRACKETS: Final = b"{}[]"
_OPENINGS: Final = (b"{", b"[")
_CLOSINGS: Final = (b"}", b"]")
_NO_OPENINGS: Final = bytes(set(range(256)) - set(b"{["))
_PASSES: Final = 3
"""How often pairs of brackets are taken out."""
_STEPS: Final = tuple({ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}.get(i, 0)
                      for i in range(256))  # fmt: skip

TEXT_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of ``JsonDecoder.decode_each``: who gets one decodes the text with the full type."""
JsonSyntaxError: Final = json.JSONDecodeError
"""What ``decode_pairs`` raises for a text that is no JSON, not even with NaN or a long number."""

T = TypeVar("T")
_Text = bytes | bytearray | str


class JsonTooDeep(msgspec.DecodeError):
    """A JSON text is nested deeper than MAX_DEPTH."""

    def __init__(self) -> None:
        super().__init__(f"JSON is nested too deep: more than {MAX_DEPTH} levels")


class JsonDecoder(Generic[T]):
    """A decoder of msgspec that raises JsonTooDeep, and never RecursionError."""

    __slots__ = ("decode", "decode_each", "kind")

    decode: Callable[[_Text | Raw], T]
    decode_each: Callable[[Iterable[bytes]], Iterator[T]]
    """Decodes texts one by one, each at the least cost; raises one of ``TEXT_ERRORS``."""
    kind: Any
    """What is decoded."""

    @overload
    def __init__(self: "JsonDecoder[Any]") -> None: ...

    @overload
    def __init__(
        self: "JsonDecoder[T]",
        kind: type[T],
        *,
        strict: bool = ...,
        dec_hook: Any = ...,
        skims: bool = ...,
    ) -> None: ...

    @overload
    def __init__(
        self: "JsonDecoder[Any]",
        kind: Any,
        *,
        strict: bool = ...,
        dec_hook: Any = ...,
        skims: bool = ...,
    ) -> None: ...

    def __init__(
        self,
        kind: Any = Any,
        *,
        strict: bool = True,
        dec_hook: Any = None,
        skims: bool = False,
    ) -> None:
        """``skims``: the depth is not counted, as the type names no value that may be nested.

        It refuses the values that the type does not name, or builds nothing of them. Their text is
        decoded again or is like one that was.
        """
        decode = msgspec.json.Decoder(kind, strict=strict, dec_hook=dec_hook).decode

        def decode_bounded(text: _Text | Raw) -> Any:
            if not skims and len(text) > _SMALL:
                check_depth(text)
            try:
                return decode(text)
            except RecursionError:  # of a Raw that was made of a text that was not decoded
                raise JsonTooDeep from None

        self.decode = decode if _is_scalar(kind) else decode_bounded
        # No call of a Python function for each text: a stream has thousands.
        self.decode_each = partial(map, decode if skims else decode_bounded)
        self.kind = kind


_SCALARS: Final = (str, int, float, bool, NoneType)


def _is_scalar(kind: Any) -> bool:
    """Whether the type has no value that may be nested: its decoder refuses the first bracket."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _is_scalar(get_args(kind)[0])
    if origin is UnionType:
        return all(map(_is_scalar, get_args(kind)))
    return kind in _SCALARS


@overload
def decode_json(text: _Text | Raw) -> Any: ...


@overload
def decode_json(text: _Text | Raw, kind: type[T]) -> T: ...


@overload
def decode_json(text: _Text | Raw, kind: Any) -> Any: ...


def decode_json(text: _Text | Raw, kind: Any = Any) -> Any:
    """Decode a text. Raises DecodeError (also JsonTooDeep) and UnicodeDecodeError."""
    return _get_decoder(kind).decode(text)


@cache
def _get_decoder(kind: Any) -> JsonDecoder[Any]:
    return JsonDecoder(kind)


def decode_pairs(text: bytes) -> Any:
    """Decode a text with each object as a tuple of its names and values, also of repeated names.

    Raises JsonTooDeep and ValueError, such as UnicodeDecodeError.
    """
    check_depth(text)
    return json.loads(text.decode(), object_pairs_hook=tuple)


class _Name:
    """A name in an object, which equals no other: a dict keeps those that stand twice."""

    __slots__ = ("text",)

    def __init__(self, _: type, text: str) -> None:
        self.text = text


_decode_fields: Final = JsonDecoder(dict[_Name, Raw], dec_hook=_Name).decode


def decode_all_fields(text: bytes) -> list[tuple[str, Raw]]:
    """The fields of an object in their order, also of repeated names, with undecoded values.

    Raises DecodeError (also JsonTooDeep) and UnicodeDecodeError.
    """
    return [(name.text, raw) for name, raw in _decode_fields(text).items()]


def check_depth(text: _Text | Raw) -> None:
    """Raises JsonTooDeep. Of text that is not JSON, the part before the mistake counts."""
    if isinstance(text, str):
        openings = count_rare(text, "[") + count_rare(text, "{")
    elif isinstance(text, Raw):
        return
    elif len(text) <= _STEP:  # one pass, which takes half as long as two
        openings = len(text.translate(None, _NO_OPENINGS))
    else:
        openings = count_rare(text, b"[") + count_rare(text, b"{")
    if openings <= MAX_DEPTH:
        return
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)
    depth = 0
    for structure in remove_strings(data, _BRACKETS):
        if depth + _bound_depth(structure) <= MAX_DEPTH:
            depth += sum(map(structure.count, _OPENINGS)) - sum(map(structure.count, _CLOSINGS))
            continue
        levels = list(accumulate(map(_STEPS.__getitem__, structure), initial=depth))
        if max(levels) > MAX_DEPTH:
            raise JsonTooDeep
        depth = levels[-1]


def count_rare(text: _Text, character: Any) -> int:
    """``text.count(character)``, and much faster where the character is rare, as in an image.

    ``count`` compares each byte; ``find`` passes over those between two steps at a memory's speed.
    """
    found = 0
    start = text.find(character)
    while start >= 0:
        found += text.count(character, start, start + _STEP)
        start = text.find(character, start + _STEP)
    return found


def _bound_depth(structure: bytes) -> int:
    """A depth that these brackets do not exceed, at a tenth of what counting each of them costs.

    Nearly all lists and objects are in the two or three innermost levels. Taking out all pairs with
    nothing between them changes the depth by one at most; every bracket that is left may open a
    level.
    """
    for _ in range(_PASSES):
        structure = structure.replace(b"{}", b"").replace(b"[]", b"")
    return 2 * _PASSES + sum(map(structure.count, _OPENINGS))


def remove_strings(text: bytes, kept: bytes) -> Iterator[bytes]:
    """The ``kept`` bytes of a JSON text that are in no string, in their order, in slices.

    Every step is short: the interpreter's lock is free between them.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"")
        text = text.replace(b'\\"', b"")
    structure = text.translate(None, bytes(set(range(256)) - set(kept) - {ord('"')}))
    structure = structure.replace(b'""', b"")  # the end of a string and the start of another, too
    is_inside = False
    for start in range(0, len(structure), _SLICE):
        pieces = structure[start : start + _SLICE].split(b'"')
        yield b"".join(pieces[is_inside::2])
        is_inside ^= len(pieces) % 2 == 0


_encode = msgspec.json.Encoder().encode
_NON_ASCII = re.compile("[^\\x00-\\x7f]+")


def encode_ascii(value: Any) -> bytes:
    """``value`` as JSON on one line, in ASCII.

    For streams whose clients split lines at any of Unicode's line ends, such as U+2028 or U+0085.
    """
    body = _encode(value)
    return body if body.isascii() else _escape(body)


def _escape(body: bytes) -> bytes:
    """JSON with escapes instead of characters beyond ASCII, which stand in strings only."""
    return _NON_ASCII.sub(_escape_run, body.decode()).encode()


def _escape_run(run: re.Match[str]) -> str:
    digits = run[0].encode("utf-16-be").hex()
    return "".join([f"\\u{digits[i : i + 4]}" for i in range(0, len(digits), 4)])
