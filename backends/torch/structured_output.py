"""Structured output: grammars that constrain the next token, compiled in threads and cached.

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
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from backends.torch.call_formats import CallFormat
from backends.torch.grammar_source import GrammarPart, GrammarSource, GrammarWriter, quote_literal
from backends.torch.ipc import FunctionChoice, FunctionDefinition, OutputRule
from backends.torch.output_formats import ReasoningMark
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


# The grammar of an output: its requested format, and the tool calls that it may contain.


def build_format_grammar(output_format: OutputRule) -> GrammarSource:
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
            options = decode_json(output_format.text, kind=list[str])
            if not options:
                raise RequestRejectedError(
                    "invalid", "the list of choices is empty", param=output_format.param
                )
            return (
                GrammarPart("format", "lark", f"start: {' | '.join(map(quote_literal, options))}"),
            )


class OutputConstraint(Struct, frozen=True):
    """What a grammar enforces in an output: calls, a format, or one of both, after reasoning."""

    output_format: OutputRule | None = None
    function_choice: FunctionChoice | None = None
    functions: tuple[FunctionDefinition, ...] = ()
    """The functions that may be called."""
    call_format: CallFormat | None = None
    reasoning: ReasoningMark | None = None
    is_open: bool = False
    """The prompt ends with the start of reasoning."""


def build_output_grammar(
    constraint: OutputConstraint, special_tokens: Mapping[str, int]
) -> GrammarSource:
    """The grammar of an output that may, or must, end with calls of functions.

    An output without calls has the output format, if one is requested. ``special_tokens`` maps the
    text of the model's special tokens to their ids. Raises RequestRejectedError.
    """
    output_format, choice = constraint.output_format, constraint.function_choice
    if choice is None and output_format is not None and constraint.reasoning is None:
        return build_format_grammar(output_format)
    writer = GrammarWriter(special_tokens)
    section = _build_section(writer, constraint)
    answers = [] if section is None else [section]
    if output_format is not None and (choice is None or not choice.required):
        answers.append(_write_answer(writer, constraint.reasoning, "@format"))
        writer.add_parts(build_format_grammar(output_format))
    elif choice is not None and not choice.required:
        return writer.build_source(_write_free_answer(writer, constraint, section or ""))
    thought = _write_reasoning(writer, constraint)
    return writer.build_source(f"{thought} {writer.add_choice(answers)}")


def _build_section(writer: GrammarWriter, constraint: OutputConstraint) -> str | None:
    choice, call_format = constraint.function_choice, constraint.call_format
    if choice is None or call_format is None:
        return None
    return call_format.build_rule(writer, constraint.functions, parallel=choice.parallel)


def _write_reasoning(writer: GrammarWriter, constraint: OutputConstraint) -> str:
    """The reasoning before an answer, and the white space after it."""
    mark = constraint.reasoning
    if mark is None:
        return ""
    if mark.answer_opening:
        following = writer.quote("<|start|>assistant")
        texts = [
            f"{writer.quote(opening)} {writer.write_text_until(mark.closing)} {following}"
            for opening in (mark.opening, *mark.preambles)
        ]
        return f"{writer.add_choice(texts)}*"
    end = f"{writer.write_text_until(mark.closing)} /[ \n\r\t]*/"
    if constraint.is_open:
        return end
    return f"{writer.add_rule(f'{writer.quote(mark.opening)} {end}')}?"


def _write_answer(writer: GrammarWriter, mark: ReasoningMark | None, answer: str) -> str:
    """An answer between its marks, which may be missing unless messages need them."""
    if mark is None:
        return answer
    if mark.answer_opening:
        return f"{writer.quote(mark.answer_opening)} {answer}"
    if len(mark.answer_marks) != 2:  # noqa: PLR2004 - one before, one after
        return answer
    before, after = map(writer.quote, mark.answer_marks)
    return f"({before})? {answer} ({after})?"


def _write_free_answer(writer: GrammarWriter, constraint: OutputConstraint, section: str) -> str:
    """Text, which calls may follow: after the trigger of a section comes a section."""
    mark, call_format = constraint.reasoning, constraint.call_format
    if call_format is None:
        return "TEXT"
    if mark is not None and mark.answer_opening:
        answer = _write_answer(writer, mark, "TEXT")
        return f"{_write_reasoning(writer, constraint)} {writer.add_choice([answer, section])}"
    if call_format.at_start:
        first = re.escape(call_format.opening)
        other = writer.add_rule(f"/[ \n\r\t]*([^{first} \n\r\t](.|\n)*)?/")
        return f"{_write_reasoning(writer, constraint)} {writer.add_choice([section, other])}"
    special = writer.find_special("" if mark is None else mark.texts)
    before = f"(TEXT {writer.add_choice(special)})*" if special else ""
    if writer.is_special(call_format.trigger):
        return f"{before} TEXT ({section})?"
    answers = ["TEXT"]
    for trigger in (call_format.trigger, *call_format.other_triggers):
        rest = _build_section_after(writer, constraint, call_format, trigger)
        if rest is not None:
            answers.append(f"{writer.write_text_until(trigger)} {rest}")
    return f"{before} {writer.add_choice(answers)}"


def _build_section_after(
    writer: GrammarWriter, constraint: OutputConstraint, call_format: CallFormat, trigger: str
) -> str | None:
    """The rest of a section after its trigger; None if no section starts with it."""
    choice = constraint.function_choice
    parallel = choice is not None and choice.parallel
    if not (call_format.section_prefix + call_format.call_prefix).startswith(trigger):
        if not call_format.call_prefix.startswith(trigger):
            return None
        bare = msgspec.structs.replace(call_format, section_prefix="", section_suffix="")
        call_format, parallel = bare, False
    return call_format.build_rule(writer, constraint.functions, parallel=parallel, skip=trigger)
