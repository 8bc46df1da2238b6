"""Incremental detokenization: whole characters only, stop strings removed.

A token may be a part of a character, and a stop string may span tokens. Text is therefore held back
until it is certain, and a token is emitted with the text that it completes.
"""

import codecs
import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from backends.torch.ipc import EngineToken

TokenDecoder = Callable[[Sequence[int]], str]

_REPLACEMENT_CHARACTER = "\ufffd"
_MAX_PENDING_TOKENS = 8
"""A character has at most four bytes: after more tokens the bytes are certainly invalid."""
_PROMPT_TAIL_TOKENS = 5
"""Prompt tokens decoded before the text: some tokenizers decode the first token differently."""


class Detokenizer:
    """Text that grows by whole characters."""

    __slots__ = ("_decode", "_decoded", "_ids", "_pending")

    def __init__(self, decode: TokenDecoder, prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-_PROMPT_TAIL_TOKENS:])
        self._decoded = decode(self._ids)
        self._pending = 0

    def add(self, token: int) -> str:
        """The text that this token completes."""
        self._ids.append(token)
        self._pending += 1
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT_CHARACTER) and self._pending < _MAX_PENDING_TOKENS:
            return ""
        return self._accept_text(text)

    def close(self) -> str:
        """The remaining text, without an incomplete character."""
        return (
            self._accept_text(self._decode(self._ids).rstrip(_REPLACEMENT_CHARACTER))
            if self._pending
            else ""
        )

    def copy(self) -> "Detokenizer":
        """A copy that continues separately."""
        duplicate = copy.copy(self)
        duplicate._ids = list(self._ids)  # noqa: SLF001 - one of the same kind
        return duplicate

    def _accept_text(self, text: str) -> str:
        new = text[len(self._decoded) :]
        self._ids = self._ids[-max(self._pending, 1) :]
        self._decoded = self._decode(self._ids)
        self._pending = 0
        return new


class OutputToken(NamedTuple):
    """An output token: its id, and its log probability if requested."""

    id: int
    logprob: EngineToken | None


class ReadyText(NamedTuple):
    """Text that may be sent, and its tokens."""

    text: str
    tokens: list[OutputToken]


class OutputText:
    """The output text of one choice, with stop strings removed."""

    __slots__ = ("_detokenizer", "_include_stop", "_pending_tokens", "_stops", "_text", "stopped")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], *, include: bool) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stop for stop in stops if stop)
        self._include_stop = include
        self._text = ""
        self._pending_tokens: list[tuple[int, int, OutputToken]] = []
        self.stopped: str | None = None
        """The stop string that ended the text."""

    def copy(self) -> "OutputText":
        """A copy that continues separately."""
        duplicate = copy.copy(self)
        duplicate._detokenizer = self._detokenizer.copy()  # noqa: SLF001 - one of the same kind
        duplicate._pending_tokens = list(self._pending_tokens)  # noqa: SLF001
        return duplicate

    def add_token(self, token: OutputToken, *, scan: bool) -> None:
        """Add a token; with ``scan`` its text is searched for stop strings."""
        self._append_text(self._detokenizer.add(token.id), token, scan=scan)

    def _append_text(self, new: str, token: OutputToken | None, *, scan: bool) -> None:
        start = len(self._text)
        self._text += new
        if token is not None:
            self._pending_tokens.append((start, len(self._text), token))
        if scan and new:
            self._find_stop(start)

    def _find_stop(self, start: int) -> None:
        """Of several matches the one that ends first counts, as if characters came one by one."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = self._text.find(stop, max(0, start - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is not None:
            end, at, self.stopped = best
            cut = end if self._include_stop else at
            self._text = self._text[:cut]
            self._pending_tokens = [
                position for position in self._pending_tokens if position[0] < cut
            ]

    def pop_ready(self) -> ReadyText | None:
        """The text that may be sent now."""
        size = len(self._text) - self._count_uncertain()
        if size <= 0:
            return None
        text, self._text = self._text[:size], self._text[size:]
        tokens = [ready for _, end, ready in self._pending_tokens if end <= size]
        self._pending_tokens = [
            (max(0, start - size), end - size, ready)
            for start, end, ready in self._pending_tokens
            if end > size
        ]
        return ReadyText(text, tokens)

    def _count_uncertain(self) -> int:
        """The length of the longest end of the text that may become a stop string."""
        if self.stopped is not None:
            return 0
        return max((count_overlap(self._text, stop) for stop in self._stops), default=0)

    def close(self) -> ReadyText | None:
        """The remaining text, after the last token."""
        if self.stopped is None:
            self._append_text(self._detokenizer.close(), None, scan=True)
        text, self._text = self._text, ""
        tokens = [ready for _, _, ready in self._pending_tokens]
        self._pending_tokens = []
        return ReadyText(text, tokens) if text or tokens else None


def count_overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that is a proper prefix of ``stop``."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class TokenBytes:
    """The bytes of each token, as far as the tokenizer reveals them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, bytes] = {}
        self._added_tokens = {
            int(i): str(token) for i, token in tokenizer.added_tokens_decoder.items()
        }
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = backend is not None and "ByteLevel" in repr(backend.decoder)
        self._byte_by_letter = {letter: byte for byte, letter in enumerate(_build_byte_letters())}
        self._special_ids = frozenset(tokenizer.all_special_ids)

    def is_special(self, token: int) -> bool:
        """Whether it is a special token."""
        return token in self._special_ids

    def __call__(self, token: int) -> bytes:
        known = self._cache.get(token)
        if known is None:
            known = self._cache[token] = self._get_bytes(token)
        return known

    def _get_bytes(self, token: int) -> bytes:
        if token in self._added_tokens:
            return self._added_tokens[token].encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if self._byte_level:
            if all(letter in self._byte_by_letter for letter in name):
                return bytes(self._byte_by_letter[letter] for letter in name)
            return str(name).encode()
        if len(name) == len("<0x00>") and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return str(name).replace("\u2581", " ").encode()


def split_texts(data: TokenBytes, ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Token ids, and the text that each completes; special tokens have none."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    return tuple(ids), tuple("" if data.is_special(token) else decode(data(token)) for token in ids)


def _build_byte_letters() -> list[str]:
    """The letter by which byte-level tokenizers represent each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, unused_code = [], 0x100
    for byte in range(0x100):
        letters.append(chr(byte if byte in printable else unused_code))
        unused_code += byte not in printable
    return letters
