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
"""Grammars that are kept, those asked for last."""
MAX_GRAMMAR_LENGTH: Final = 1 << 18
"""Characters of a grammar."""
_MAX_QUOTED: Final = 200
NO_CANDIDATES_ERROR: Final = (
    "no token may come that both the output format and the other parameters allow"
)
_TOO_COMPLEX: Final = "the output format is too complex to enforce"
_JSON_OPTIONS: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_UNKNOWN_KEYS_PATTERN: Final = re.compile(r"Unimplemented keys: \[(.*?)\]")
_UNKNOWN_FORMAT_PATTERN: Final = re.compile(r"Unknown format: (\S+)")


class GrammarPart(NamedTuple):
    """A named piece of a grammar; the first is the whole, and others stand in it as ``@name``.

    ``lenient`` JSON Schema leaves aside the keys that can't be held to.
    """

    name: str
    kind: Literal["json", "lenient", "regex", "lark", "grammar"]
    text: str


GrammarSource = tuple[GrammarPart, ...]


class GrammarState:
    """How far one text has come in its grammar."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary_size = vocabulary

    def copy(self) -> "GrammarState":
        """Another text that has come as far."""
        return GrammarState(self._matcher.deep_copy(), self._vocabulary_size)

    def get_forbidden_tokens(self) -> NDArray[np.bool_]:
        """A flag for each token that may not come now.

        Raises RequestRejectedError when the grammar turns out too complex to follow.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise RequestRejectedError("unsupported", _TOO_COMPLEX)
        return np.unpackbits(~packed, count=self._vocabulary_size, bitorder="little").view(np.bool_)

    def accept_token(self, token: int) -> None:
        """This token came. Raises RequestRejectedError for one that may not."""
        if not self._matcher.consume_token(token):
            raise RequestRejectedError("invalid", NO_CANDIDATES_ERROR)

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """The grammars of one model's vocabulary.

    ``wake`` is called, from another thread, when one that was asked for is there.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: int, ends: frozenset[int], wake: Callable[[], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary
        self._end_tokens = sorted(ends)
        self._wake = wake
        self._threads = ThreadPoolExecutor(2, "grammars")
        self._cache: OrderedDict[bytes, Future[GrammarState]] = OrderedDict()
        self._lock = threading.Lock()
        self._token_table: Any = None

    def load_vocabulary(self) -> None:
        """Read the vocabulary. Left to the first request, it would hold up all others."""
        with contextlib.suppress(RequestRejectedError):
            self._get_token_table()

    def compile_grammar(self, source: GrammarSource) -> "Future[GrammarState]":
        """The beginning of a text after this grammar; its exception is a Refused."""
        key = blake2b(msgspec.msgpack.encode(source)).digest()
        found = self._cache.pop(key, None)
        if found is None:
            found = self._threads.submit(self._compile_grammar, source)
            found.add_done_callback(lambda _: self._wake())
        self._cache[key] = found
        while len(self._cache) > MAX_CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        return found

    def _compile_grammar(self, source: GrammarSource) -> GrammarState:
        if sum(len(part.text) for part in source) > MAX_GRAMMAR_LENGTH:
            raise RequestRejectedError(
                "invalid", f"the output format has more than {MAX_GRAMMAR_LENGTH} characters"
            )
        words = self._get_token_table()
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - only this needs it

        try:
            entries = [_build_grammar_entry(LLMatcher, part) for part in source]
        except Exception as error:  # the GBNF reader has errors of its own
            raise _make_grammar_error(str(error)) from error
        text = msgspec.json.encode({"grammars": entries}).decode()
        limits = LLParserLimits(max_lexer_states=100_000, verbose_errors=False)
        matcher = LLMatcher(words, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _make_grammar_error(matcher.get_error())
        guide = GrammarState(matcher, self._vocabulary_size)
        # The first mask takes longest and fails for a grammar that is too complex.
        guide.get_forbidden_tokens()
        return guide

    def _get_token_table(self) -> Any:
        with self._lock:
            if self._token_table is None:
                self._token_table = _build_token_table(
                    self._tokenizer, self._vocabulary_size, self._end_tokens
                )
            return self._token_table


def _build_token_table(tokenizer: Any, vocabulary: int, ends: list[int]) -> Any:
    """What llguidance knows of a model's tokens. Raises RequestRejectedError."""
    try:
        from llguidance.hf import from_tokenizer  # noqa: PLC0415 - see _compile

        return from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(ends))
    except ImportError as error:
        text = (
            "without llguidance no answer can be held to a form: pip install 'interlingua[torch]'"
        )
        raise RequestRejectedError("unsupported", text) from error
    except ValueError as error:
        text = "this model's tokenizer does not support structured output"
        raise RequestRejectedError("unsupported", text) from error


def _build_grammar_entry(matcher: Any, part: GrammarPart) -> dict[str, Any]:
    """A part as llguidance reads it."""
    match part.kind:
        case "lark":
            return {"name": part.name, "lark_grammar": part.text}
        case "grammar":
            from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415 - see _compile

            return {"name": part.name, "lark_grammar": any_to_lark(part.text)}
        case "regex":
            return _build_named_entry(part.name, matcher.grammar_from_regex(part.text))
        case "json" | "lenient":
            how = {**_JSON_OPTIONS, "lenient": part.kind == "lenient"}
            return _build_named_entry(
                part.name, matcher.grammar_from_json_schema(part.text, overrides=how)
            )


def _build_named_entry(name: str, whole: str) -> dict[str, Any]:
    read = msgspec.json.decode(whole, type=dict[str, msgspec.Raw])["grammars"]
    [entry] = msgspec.json.decode(read, type=list[dict[str, msgspec.Raw]])
    return {**entry, "name": name}


def _make_grammar_error(said: str) -> RequestRejectedError:
    """What llguidance said of a grammar, which shows only what the client wrote."""
    if keys := _UNKNOWN_KEYS_PATTERN.search(said):
        names = keys[1].replace('"', "")
        return RequestRejectedError(
            "unsupported", f"the schema has keys that can't be held to: {names}"
        )
    if "oneOf" in said:
        text = "the schema has a oneOf whose cases overlap; anyOf can be held to"
        return RequestRejectedError("unsupported", text)
    if form := _UNKNOWN_FORMAT_PATTERN.search(said):
        return RequestRejectedError(
            "unsupported", f"the schema has a format that is not known: {form[1]}"
        )
    if "fuel" in said or "too " in said:
        return RequestRejectedError("unsupported", _TOO_COMPLEX)
    first = " ".join(said.split())[:_MAX_QUOTED]
    return RequestRejectedError("invalid", f"invalid output format: {first}")


# The grammar of an answer: the form it was asked to have, and the calls it may make.

MAX_CALLS: Final = 16
"""In one answer: a weak model may know no end."""
_TEXT_RULE: Final = r"TEXT: /(.|\n)*/"
_NON_JSON_TEXT_RULE: Final = r"TEXT: /[ \n\r\t]*([^{ \n\r\t](.|\n)*)?/"
"""Where a brace is how a call begins."""


def build_format_grammar(form: OutputFormat) -> GrammarSource:
    """The grammar of a text of this form. Raises RequestRejectedError."""
    match form.kind:
        case "json":
            if not form.text.lstrip().startswith("{"):
                raise RequestRejectedError("invalid", "the schema is no object", param=form.param)
            return (GrammarPart("form", "lenient" if form.lenient else "json", form.text),)
        case "regex":
            return (GrammarPart("form", "regex", form.text),)
        case "grammar":
            return (GrammarPart("form", "grammar", form.text),)
        case "choice":
            options = msgspec.json.decode(form.text, type=list[str])
            if not options:
                raise RequestRejectedError(
                    "invalid", "there is nothing to choose from", param=form.param
                )
            return (
                GrammarPart("form", "lark", f"start: {' | '.join(map(_quote_literal, options))}"),
            )


def build_calls_grammar(
    calling: FunctionChoice,
    functions: Sequence[FunctionDefinition],
    family: ToolCallFormat,
    special: Mapping[str, int],
    form: OutputFormat | None,
) -> GrammarSource:
    """The grammar of a text that may, or must, end in calls of ``functions``.

    Without calls it has ``form``, where one was asked for. ``special`` are the model's special
    tokens, by their text. Raises RequestRejectedError.
    """
    literal = LarkLiterals(special)
    opens, rest = (
        family.call_prefix,
        (family.section_prefix + family.call_prefix)[len(family.trigger) :],
    )
    more = (
        f"({literal(family.call_separator)} call){{0,{MAX_CALLS - 1}}} " if calling.parallel else ""
    )
    end = more + literal(family.section_suffix)
    rules = [*_build_start_rules(calling, family, special, free=form is None)]
    rules += _build_call_rule("call", opens, functions, family, literal)
    if rules[0].endswith("marked"):
        rules += [
            f"marked: lead first {end}",
            *_build_call_rule("first", rest, functions, family, literal),
        ]
    else:
        rules.append(f"calls: {literal(family.section_prefix)} call {end}")
    parts = [GrammarPart("answer", "lark", "\n".join(rules))]
    parts += (
        GrammarPart(f"arguments{i}", "json" if one.strict else "lenient", _build_object_schema(one))
        for i, one in enumerate(functions)
    )
    return (*parts, *(() if form is None or calling.required else build_format_grammar(form)))


def _build_call_rule(
    rule: str,
    opens: str,
    functions: Sequence[FunctionDefinition],
    family: ToolCallFormat,
    literal: "LarkLiterals",
) -> list[str]:
    """A rule for a call of any of the functions, whose texts begin with ``opens``."""
    names = " | ".join(f"{rule}{i}" for i in range(len(functions)))
    return [f"{rule}: {names}"] + [
        f"{rule}{i}: {literal(opens + one.name + family.name_separator)} @arguments{i} "
        f"{literal(family.call_suffix)}"
        for i, one in enumerate(functions)
    ]


def _build_start_rules(
    calling: FunctionChoice, family: ToolCallFormat, special: Mapping[str, int], *, free: bool
) -> Sequence[str]:
    if calling.required:
        return ("start: calls",)
    if not free:
        return ("start: calls | @form",)
    if not family.trigger:
        return ("start: calls | TEXT", _NON_JSON_TEXT_RULE)
    if family.trigger in special:
        return ("start: TEXT | TEXT calls", _TEXT_RULE)
    # The mark ends the text before it, and what is left of the calls follows.
    return (
        "start: TEXT | marked",
        f"lead[lazy]: TEXT {_quote_literal(family.trigger)}",
        _TEXT_RULE,
    )


class LarkLiterals:
    """Texts as Lark has them; the tokens among them by their numbers."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._special_pattern = re.compile(f"({names})") if names else None

    def __call__(self, text: str) -> str:
        """One text, which may be empty."""
        pieces = self._special_pattern.split(text) if self._special_pattern else [text]
        return " ".join(self._format_piece(piece) for piece in pieces if piece)

    def _format_piece(self, text: str) -> str:
        number = self._special.get(text)
        return _quote_literal(text) if number is None else f"<[{number}]>"


def _quote_literal(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _build_object_schema(function: FunctionDefinition) -> str:
    """A function's schema, always of type object. Raises RequestRejectedError."""
    try:
        schema = msgspec.json.decode(function.parameters, type=dict[str, Any])
    except msgspec.ValidationError as error:
        text = f"the parameters of {function.name} are no JSON Schema"
        raise RequestRejectedError("invalid", text, param="tools") from error
    if schema.setdefault("type", "object") != "object":
        text = f"the parameters of {function.name} are not those of an object"
        raise RequestRejectedError("invalid", text, param="tools")
    return msgspec.json.encode(schema).decode()
