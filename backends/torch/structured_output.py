"""Structured output: grammars that constrain the next token, compiled in threads and cached.

Compiling a grammar takes a millisecond, a large one a third of a second; threads keep it out of the
engine's steps. Before sampling, a mask with one flag per token is computed from it.

JSON is written in one style, ``{"a": 1, "b": [2]}``, since weak models otherwise generate endless
white space.
"""

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.torch.ipc import FunctionChoice, FunctionDefinition, OutputFormat
from backends.torch.tokenization import RequestRejectedError
from backends.torch.tool_calls import ToolCallFormat

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


class GrammarPart(NamedTuple):
    """A named part of a grammar; the first is the start, which refers to others as ``@name``.

    A ``lenient`` JSON Schema ignores unsupported keys.
    """

    name: str
    kind: Literal["json", "lenient", "regex", "lark", "grammar"]
    text: str


GrammarSource = tuple[GrammarPart, ...]


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
    entries = msgspec.json.decode(grammar, type=dict[str, msgspec.Raw])["grammars"]
    [entry] = msgspec.json.decode(entries, type=list[dict[str, msgspec.Raw]])
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


# The grammar of an output: its requested format, and the tool calls that it may contain.

MAX_CALLS: Final = 16
"""Maximum tool calls in one output: a weak model may never stop calling."""
_TEXT_RULE: Final = r"TEXT: /(.|\n)*/"
_NON_JSON_TEXT_RULE: Final = r"TEXT: /[ \n\r\t]*([^{ \n\r\t](.|\n)*)?/"
"""Text that does not start with a brace, if that is how a tool call starts."""


def build_format_grammar(output_format: OutputFormat) -> GrammarSource:
    """The grammar of an output format. Raises RequestRejectedError."""
    match output_format.kind:
        case "json":
            if not output_format.text.lstrip().startswith("{"):
                raise RequestRejectedError(
                    "invalid", "the schema must be a JSON object", param=output_format.param
                )
            return (
                GrammarPart(
                    "format", "lenient" if output_format.lenient else "json", output_format.text
                ),
            )
        case "regex":
            return (GrammarPart("format", "regex", output_format.text),)
        case "grammar":
            return (GrammarPart("format", "grammar", output_format.text),)
        case "choice":
            options = msgspec.json.decode(output_format.text, type=list[str])
            if not options:
                raise RequestRejectedError(
                    "invalid", "the list of choices is empty", param=output_format.param
                )
            return (
                GrammarPart("format", "lark", f"start: {' | '.join(map(_quote_literal, options))}"),
            )


def build_calls_grammar(
    function_choice: FunctionChoice,
    functions: Sequence[FunctionDefinition],
    call_format: ToolCallFormat,
    special_tokens: Mapping[str, int],
    output_format: OutputFormat | None,
) -> GrammarSource:
    """The grammar of an output that may, or must, end with calls of ``functions``.

    An output without calls has ``output_format``, if one is requested. ``special_tokens`` maps the
    text of the model's special tokens to their ids. Raises RequestRejectedError.
    """
    literal = LarkLiterals(special_tokens)
    head = call_format.call_prefix
    end = literal(call_format.section_suffix)
    if function_choice.parallel:
        end = f"({literal(call_format.call_separator)} call){{0,{MAX_CALLS - 1}}} {end}"
    rules = [
        *_build_start_rules(
            function_choice, call_format, special_tokens, allows_text=output_format is None
        )
    ]
    rules += _build_call_rule("call", head, functions, call_format, literal)
    if rules[0].endswith("triggered"):
        remainder = (call_format.section_prefix + head)[len(call_format.trigger) :]
        rules.append(f"triggered: lead first {end}")
        rules += _build_call_rule("first", remainder, functions, call_format, literal)
    else:
        rules.append(f"calls: {literal(call_format.section_prefix)} call {end}")
    parts = [GrammarPart("answer", "lark", "\n".join(rules))]
    parts += (
        GrammarPart(f"arguments{i}", "json" if f.strict else "lenient", _build_object_schema(f))
        for i, f in enumerate(functions)
    )
    if output_format is not None and not function_choice.required:
        parts += build_format_grammar(output_format)
    return tuple(parts)


def _build_call_rule(
    rule: str,
    head: str,
    functions: Sequence[FunctionDefinition],
    call_format: ToolCallFormat,
    literal: "LarkLiterals",
) -> list[str]:
    """The rules for a call of any function; a call starts with ``head``."""
    names = " | ".join(f"{rule}{i}" for i in range(len(functions)))
    return [f"{rule}: {names}"] + [
        f"{rule}{i}: {literal(head + function.name + call_format.name_separator)} "
        f"@arguments{i} {literal(call_format.call_suffix)}"
        for i, function in enumerate(functions)
    ]


def _build_start_rules(
    function_choice: FunctionChoice,
    call_format: ToolCallFormat,
    special_tokens: Mapping[str, int],
    *,
    allows_text: bool,
) -> Sequence[str]:
    if function_choice.required:
        return ("start: calls",)
    if not allows_text:
        return ("start: calls | @format",)
    if not call_format.trigger:
        return ("start: calls | TEXT", _NON_JSON_TEXT_RULE)
    if call_format.trigger in special_tokens:
        return ("start: TEXT | TEXT calls", _TEXT_RULE)
    # The lazy ``lead`` consumes the trigger; the remainder of the first call follows.
    return (
        "start: TEXT | triggered",
        f"lead[lazy]: TEXT {_quote_literal(call_format.trigger)}",
        _TEXT_RULE,
    )


class LarkLiterals:
    """Writes texts as Lark literals, with special tokens as token ids."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        names = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True)))
        self._special_pattern = re.compile(f"({names})") if names else None

    def __call__(self, text: str) -> str:
        """The literals for a text, which may be empty."""
        pieces = self._special_pattern.split(text) if self._special_pattern else [text]
        return " ".join(self._format_piece(piece) for piece in pieces if piece)

    def _format_piece(self, text: str) -> str:
        token_id = self._special_tokens.get(text)
        return _quote_literal(text) if token_id is None else f"<[{token_id}]>"


def _quote_literal(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _build_object_schema(function: FunctionDefinition) -> str:
    """A function's schema, always of type object. Raises RequestRejectedError."""
    try:
        schema = msgspec.json.decode(function.parameters, type=dict[str, Any])
    except msgspec.ValidationError as error:
        text = f"the parameters of {function.name} must be a JSON Schema"
        raise RequestRejectedError("invalid", text, param="tools") from error
    if schema.setdefault("type", "object") != "object":
        text = f"the parameters of {function.name} must have type object"
        raise RequestRejectedError("invalid", text, param="tools")
    return msgspec.json.encode(schema).decode()
