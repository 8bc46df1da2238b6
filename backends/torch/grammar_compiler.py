"""Grammars that constrain the next token, compiled in threads and cached.

Compiling a grammar takes a millisecond, a large one a third of a second; threads keep it out of the
engine's steps. Before sampling, a mask with one flag per token is computed from it.

JSON is written in one style, ``{"a": 1, "b": [2]}``, since weak models otherwise generate endless
white space.
"""

import contextlib
import importlib.util
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.torch.grammar_source import GrammarPart, GrammarSource
from backends.torch.rejection import RequestRejectedError
from protocols.core.json_text import decode_json

MAX_CACHED_GRAMMARS: Final = 64
"""Compiled grammars in the cache; the least recently used are evicted."""
MAX_GRAMMAR_LENGTH: Final = 1 << 18
"""Maximum characters of a grammar."""
_MAX_QUOTED: Final = 200
NO_CANDIDATES_ERROR: Final = (
    "no token is allowed by both the output format and the other parameters"
)
_TOO_COMPLEX: Final = "the output format is too complex to enforce"
_JSON_OPTIONS: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_UNKNOWN_KEYS_PATTERN: Final = re.compile(r"Unimplemented keys: \[(.*?)\]")
_UNKNOWN_FORMAT_PATTERN: Final = re.compile(r"Unknown format: (\S+)")


class GrammarState:
    """The state of one sequence in its grammar."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary_size = vocabulary

    def copy(self) -> "GrammarState":
        """An independent copy of the state."""
        return GrammarState(self._matcher.deep_copy(), self._vocabulary_size)

    def get_forbidden_tokens(self) -> NDArray[np.bool_]:
        """A mask with a flag for each token that is not allowed next.

        Raises RequestRejectedError if the grammar turns out to be too complex.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise RequestRejectedError("unsupported", _TOO_COMPLEX)
        return np.unpackbits(~packed, count=self._vocabulary_size, bitorder="little").view(np.bool_)

    def accept_token(self, token: int) -> None:
        """Advance by a token. Raises RequestRejectedError if it is not allowed."""
        if not self._matcher.consume_token(token):
            raise RequestRejectedError("invalid", NO_CANDIDATES_ERROR)

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete and no token may follow."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Compiles and caches grammars for one model's vocabulary.

    ``wake`` is called from another thread when a grammar has been compiled.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: int, end_tokens: frozenset[int], wake: Callable[[], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary
        self._end_tokens = sorted(end_tokens)
        self._wake = wake
        self._threads = ThreadPoolExecutor(2, "grammars")
        self._cache: OrderedDict[bytes, Future[GrammarState]] = OrderedDict()
        self._lock = threading.Lock()
        self._token_table: Any = None

    def __repr__(self) -> str:
        return f"<GrammarCompiler {len(self._cache)} grammars cached>"

    def load_vocabulary(self) -> None:
        """Load the vocabulary at start, so that the first request need not wait for it."""
        with contextlib.suppress(RequestRejectedError):
            self._get_token_table()

    def compile_grammar(self, source: GrammarSource) -> "Future[GrammarState]":
        """A future of the grammar's initial state; its error is a RequestRejectedError."""
        key = blake2b(msgspec.msgpack.encode(source)).digest()
        future = self._cache.pop(key, None)
        if future is None:
            future = self._threads.submit(self._compile_grammar, source)
            future.add_done_callback(lambda _: self._wake())
        self._cache[key] = future
        while len(self._cache) > MAX_CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        return future

    def _compile_grammar(self, source: GrammarSource) -> GrammarState:
        if sum(len(part.text) for part in source) > MAX_GRAMMAR_LENGTH:
            raise RequestRejectedError(
                "invalid", f"the output format has more than {MAX_GRAMMAR_LENGTH} characters"
            )
        token_table = self._get_token_table()
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - optional dependency

        try:
            entries = [_build_grammar_entry(LLMatcher, part) for part in source]
        except Exception as error:  # the GBNF converter has its own errors
            raise _make_grammar_error(str(error)) from error
        text = msgspec.json.encode({"grammars": entries}).decode()
        limits = LLParserLimits(max_lexer_states=100_000, verbose_errors=False)
        matcher = LLMatcher(token_table, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _make_grammar_error(matcher.get_error())
        state = GrammarState(matcher, self._vocabulary_size)
        # The first mask takes longest and fails for a grammar that is too complex.
        state.get_forbidden_tokens()
        return state

    def _get_token_table(self) -> Any:
        with self._lock:
            if self._token_table is None:
                self._token_table = _build_token_table(
                    self._tokenizer, self._vocabulary_size, self._end_tokens
                )
            return self._token_table


def supports_grammars(tokenizer: Any) -> bool:
    """Whether outputs of a model with this tokenizer can be constrained."""
    return bool(tokenizer.is_fast) and importlib.util.find_spec("llguidance") is not None


def _build_token_table(tokenizer: Any, vocabulary: int, end_tokens: list[int]) -> Any:
    """The table that llguidance needs of a model's tokens. Raises RequestRejectedError."""
    try:
        from llguidance.hf import from_tokenizer  # noqa: PLC0415 - optional dependency

        return from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(end_tokens))
    except ImportError as error:
        text = "structured output needs llguidance: pip install 'interlingua[torch]'"
        raise RequestRejectedError("unsupported", text) from error
    except ValueError as error:
        text = "this model's tokenizer does not support structured output"
        raise RequestRejectedError("unsupported", text) from error


def _build_grammar_entry(matcher: Any, part: GrammarPart) -> dict[str, Any]:
    """A part in llguidance's format."""
    match part.kind:
        case "lark":
            return {"name": part.name, "lark_grammar": part.text}
        case "grammar":
            from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415 - optional dependency

            return {"name": part.name, "lark_grammar": any_to_lark(part.text)}
        case "regex":
            return _build_named_entry(part.name, matcher.grammar_from_regex(part.text))
        case "json" | "lenient":
            options = {**_JSON_OPTIONS, "lenient": part.kind == "lenient"}
            return _build_named_entry(
                part.name, matcher.grammar_from_json_schema(part.text, overrides=options)
            )


def _build_named_entry(name: str, grammar: str) -> dict[str, Any]:
    entries = decode_json(grammar, kind=dict[str, msgspec.Raw])["grammars"]
    [entry] = decode_json(entries, kind=list[dict[str, msgspec.Raw]])
    return {**entry, "name": name}


def _make_grammar_error(message: str) -> RequestRejectedError:
    """The error for llguidance's message, which quotes only the client's own input."""
    if keys := _UNKNOWN_KEYS_PATTERN.search(message):
        names = keys[1].replace('"', "")
        return RequestRejectedError("unsupported", f"the schema has unsupported keys: {names}")
    if "oneOf" in message:
        text = "oneOf with overlapping schemas is not supported; use anyOf"
        return RequestRejectedError("unsupported", text)
    if match := _UNKNOWN_FORMAT_PATTERN.search(message):
        return RequestRejectedError(
            "unsupported", f"the schema has an unsupported format: {match[1]}"
        )
    if "fuel" in message or "too " in message:
        return RequestRejectedError("unsupported", _TOO_COMPLEX)
    excerpt = " ".join(message.split())[:_MAX_QUOTED]
    return RequestRejectedError("invalid", f"invalid output format: {excerpt}")
