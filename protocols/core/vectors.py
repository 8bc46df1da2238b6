"""Large arrays of numbers in responses: no step decodes or encodes millions of them.

Either holds the interpreter's lock: a response with 2,048 vectors of 3,072 numbers, decoded or
encoded in one step, would stop all other requests for half a second, also from a thread. Of a
response with embeddings in the manner of OpenAI each vector is therefore decoded by itself, and the
rest has an empty array in the place of each; the arrays of Triton's tensors are decoded in steps.
Every protocol encodes what may be long (vectors, tokens, ranked documents, scores, classes) by
``encode_array``.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from protocols.core.json_text import JsonDecoder

LARGE_RESPONSE: Final = 256 << 10
"""A smaller response is decoded at once."""
MAX_VECTOR: Final = 1 << 20
"""The bytes of a vector that is decoded by itself. A longer one is a part of the rest."""
MAX_ENCODED: Final = 16_384
"""The values that one step encodes."""
MAX_DECODED: Final = 256 << 10
"""About how many bytes of an array one step decodes."""
_KEY: Final = b'"embedding"'
_START: Final = re.compile(rb"\s*+:\s*+(\[)")

Span = tuple[int, int]
"""The place of a vector, with its brackets."""


def find_vectors(text: bytes, key: bytes = _KEY, max_size: int = MAX_VECTOR) -> list[Span]:
    """The arrays of a large JSON text that are values of ``key`` and hold plain values only.

    ``key`` is quoted: in a string, its quotes would be escaped. Longer ones than ``max_size`` bytes
    are left out.
    """
    return [*_iter_vectors(text, key, max_size)] if len(text) >= LARGE_RESPONSE else []


def _iter_vectors(text: bytes, key: bytes, max_size: int) -> Iterator[Span]:
    position = text.find(key)
    while position >= 0:
        position += len(key)
        if found := _START.match(text, position):
            start = found.start(1)
            end = text.find(b"]", start, start + max_size) + 1
            if end and not _has_structure(text[start + 1 : end]):
                yield start, end
                position = end
        position = text.find(key, position)


def _has_structure(text: bytes) -> bool:
    return b"[" in text or b"{" in text or b'"' in text


def list_gaps(text: bytes, vectors: Iterable[Span]) -> Iterator[Span]:
    """The parts of the text between the vectors."""
    position = 0
    for start, end in vectors:
        yield position, start
        position = end
    yield position, len(text)


def remove_vectors(text: bytes, vectors: list[Span]) -> bytes:
    """The text with empty arrays in the place of these vectors."""
    return b"[]".join([text[slice(*gap)] for gap in list_gaps(text, vectors)]) if vectors else text


_decode_step: Final = JsonDecoder(list[Any]).decode


def decode_array(text: bytes, span: Span) -> list[Any]:
    """The values of such an array. Raises as any decoder of JSON."""
    position, end = span[0] + 1, span[1] - 1
    values: list[Any] = []
    while end - position > MAX_DECODED:
        comma = text.find(b",", position + MAX_DECODED, end)
        if comma < 0:
            break
        values += _decode_step(b"[%b]" % text[position:comma])
        position = comma + 1
    values += _decode_step(b"[%b]" % text[position:end])
    return values


_encode_step = msgspec.json.Encoder().encode


def encode_array(values: Sequence[Any]) -> Any:
    """Values as a JSON array, for an object that is encoded later."""
    if len(values) <= MAX_ENCODED:
        return msgspec.Raw(_encode_step(values))
    starts = range(0, len(values), MAX_ENCODED)
    steps = (_encode_step(values[start : start + MAX_ENCODED])[1:-1] for start in starts)
    return msgspec.Raw(b"[" + b",".join(steps) + b"]")
