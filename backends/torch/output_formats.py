# ruff: noqa: RUF001 - the marks of DeepSeek have letters like these
"""How model families mark reasoning and tool calls in their output, and the parser of it.

The marks are detected from the chat template. They only describe: nothing constrains the model to
them, and what can't be parsed stays text. The families whose calls a grammar can enforce are in
``tool_calls``; their reasoning is parsed here, too.
"""

import ast
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from backends.torch.detokenizer import OutputToken, ReadyText, count_overlap
from backends.torch.ipc import FunctionDefinition
from backends.torch.tool_calls import (
    ParsedCallArguments,
    ParsedCallStart,
    ParsedOutput,
    ParsedReasoning,
    ToolCallParser,
    ToolCallRules,
    make_call_id,
)

FunctionSchemas = Mapping[str, Mapping[str, Any]]
"""The parameters' JSON schema of each function."""
Call = tuple[str, Any]
"""A function's name and its arguments, an object."""
ParseCalls = Callable[[str, FunctionSchemas], list[Call]]
"""Reads the calls of a section without its marks. Raises one of ``_PARSE_ERRORS``."""
_PARSE_ERRORS: Final = (
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
MAX_SECTION: Final = 1 << 20
"""Characters after which a section of calls without an end is text."""
MAX_CLOSINGS: Final = 8
"""Closing marks after which a section of calls that can't be parsed is text."""


class OutputMark(Struct, frozen=True):
    """Text that the model writes between ``opening`` and ``closing``; "" closes at the end."""

    family: str
    template_sign: str
    """Text in the chat templates of these families."""
    opening: str
    closing: str

    @property
    def texts(self) -> str:
        """All marks, one after another."""
        return self.opening + self.closing


class ReasoningMark(OutputMark, frozen=True):
    """The marks of reasoning, which starts the output; ``answer_marks`` are around the answer."""

    answer_marks: tuple[str, ...] = ()

    @property
    def texts(self) -> str:
        """See ``OutputMark``."""
        return self.opening + self.closing + "".join(self.answer_marks)


class CallsMark(OutputMark, frozen=True):
    """The marks of a section of calls. ``at_start``: the section starts the output."""

    parse: ParseCalls
    at_start: bool = False
    is_kept: bool = False
    """The opening mark is part of what ``parse`` reads."""
    inner_marks: tuple[str, ...] = ()
    """Marks in the section that may be special tokens."""

    @property
    def texts(self) -> str:
        """See ``OutputMark``."""
        return self.opening + self.closing + "".join(self.inner_marks)


# --- what stands between the marks of calls -----------------------------------------------------


def _parse_json(text: str, schemas: FunctionSchemas) -> list[Call]:
    """JSON objects, alone, in a list, or one after another."""
    del schemas
    decoder, found, position = msgspec.json.Decoder(), list[Any](), 0
    text = text.strip()
    while position < len(text):
        end = _find_json_end(text, position)
        value = decoder.decode(text[position:end])
        found += value if isinstance(value, list) else [value]
        position = end + len(text[end:]) - len(text[end:].lstrip(" \n\r\t;,"))
    return [_read_call(one) for one in found]


def _find_json_end(text: str, start: int) -> int:
    """The position after the object or list at ``start``."""
    depth = 0
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[{\[]|[}\]]', re.DOTALL).finditer(text, start):
        depth += (match[0] in "{[" and 1) or (match[0] in "}]" and -1) or 0
        if not depth:
            return match.end()
    return len(text)


def _read_call(value: Any) -> Call:
    value = value.get("function", value) if isinstance(value.get("function"), dict) else value
    name = value.get("name") or value["tool_name"]
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    return name, msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments


def _parse_python(text: str, schemas: FunctionSchemas) -> list[Call]:
    """Python calls with named literals, in a list, or one per line."""
    del schemas
    nodes: list[ast.AST] = []
    for statement in ast.parse(text.strip()).body:
        if not isinstance(statement, ast.Expr):
            raise TypeError("a statement is no call")
        value = statement.value
        nodes += value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    calls: list[Call] = []
    for node in nodes:
        if not isinstance(node, ast.Call):
            raise TypeError("an expression is no call")
        if isinstance(node.func, ast.Name) and node.func.id == "print" and len(node.args) == 1:
            node = node.args[0]  # noqa: PLW2901 - Gemma prints what it calls
        if not isinstance(node, ast.Call) or node.args or None in [k.arg for k in node.keywords]:
            raise ValueError("an argument has no name")
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        calls.append((ast.unparse(node.func), arguments))
    return calls


def _make_tag_parser(call: str, argument: str) -> ParseCalls:
    """A parser of calls with a tag for each argument, by two patterns."""
    call_pattern, argument_pattern = (
        re.compile(call, re.DOTALL),
        re.compile(argument, re.DOTALL),
    )

    def parse(text: str, schemas: FunctionSchemas) -> list[Call]:
        calls: list[Call] = []
        rest = call_pattern.sub("", text).strip()
        for match in call_pattern.finditer(text):
            name = match["name"].strip()
            body = match["body"]
            if argument_pattern.sub("", body).strip():
                raise ValueError("text between the arguments")
            arguments: dict[str, Any] = {
                one["key"].strip(): _cast(one["value"], schemas.get(name, {}), one["key"].strip())
                for one in argument_pattern.finditer(body)
            }
            calls.append((name, arguments))
        if rest:
            raise ValueError("text between the calls")
        return calls

    return parse


def _cast(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """An argument's value: a string, unless its schema has another type and it is JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, dict) else None
    if isinstance(declared, dict) and declared.get("type") == "string":
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _make_json_argument_parser(call: str) -> ParseCalls:
    """A parser of calls by a pattern of a name and JSON arguments."""
    pattern = re.compile(call, re.DOTALL)

    def parse(text: str, schemas: FunctionSchemas) -> list[Call]:
        del schemas
        if pattern.sub("", text).strip():
            raise ValueError("text between the calls")
        return [
            (match["name"].strip(), msgspec.json.decode(match["body"].strip() or "{}"))
            for match in pattern.finditer(text)
        ]

    return parse


_ESCAPED_STRING = re.compile("<escape>(.*?)<escape>", re.DOTALL)


def _parse_function_gemma(text: str, schemas: FunctionSchemas) -> list[Call]:
    """``call:NAME{key:<escape>text<escape>,other:1}``."""
    del schemas
    match = re.fullmatch(r"\s*call:(?P<name>[\w.-]+)(?P<body>\{.*\})\s*", text, re.DOTALL)
    if match is None:
        raise ValueError("no call")
    strings: list[str] = []

    def hold(found: re.Match[str]) -> str:
        strings.append(msgspec.json.encode(found[1]).decode())
        return f"\0{len(strings) - 1}\0"

    body = _ESCAPED_STRING.sub(hold, match["body"])
    body = re.sub(r"([{,]\s*)([A-Za-z_][\w-]*)\s*:", r'\1"\2":', body)
    body = re.sub("\0(\\d+)\0", lambda found: strings[int(found[1])], body)
    return [(match["name"], msgspec.json.decode(body))]


_parse_function_tags = _make_tag_parser(
    r"<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>",
    r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>",
)
_parse_glm = _make_tag_parser(
    r"\A\s*(?P<name>[^\s<]+)(?P<body>.*)\Z",
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
)
_parse_invoke = _make_tag_parser(
    r'<invoke name="?(?P<name>[^">\n]+)"?>(?P<body>.*?)</invoke>',
    r'<parameter name="?(?P<key>[^">\n]+)"?>(?P<value>.*?)</parameter>',
)
_parse_deepseek = _make_json_argument_parser(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n(?P<body>.*?)\n```"
    r"\s*)<｜tool▁call▁end｜>"
)
_parse_deepseek_v31 = _make_json_argument_parser(
    r"<｜tool▁call▁begin｜>(?P<name>[^\n<]+)<｜tool▁sep｜>(?P<body>.*?)<｜tool▁call▁end｜>"
)
_parse_kimi = _make_json_argument_parser(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>(?P<body>.*?)<\|tool_call_end\|>"
)
_parse_harmony = _make_json_argument_parser(
    r"\A(?:functions\.)?(?P<name>[\w-]+)[^{]*?<\|message\|>(?P<body>.*)\Z"
)


def _parse_internlm(text: str, schemas: FunctionSchemas) -> list[Call]:
    return _parse_json(text.strip().removeprefix("<|plugin|>"), schemas)


def decode_parameters(function: FunctionDefinition) -> Mapping[str, Any]:
    """The JSON schema of a function's parameters."""
    schema = msgspec.json.decode(function.parameters)
    return schema if isinstance(schema, dict) else {}


# --- the families -------------------------------------------------------------------------------

REASONING_MARKS: Final = (
    ReasoningMark(
        "gpt-oss", "<|channel|>", "<|channel|>analysis<|message|>", "<|end|>",
        ("<|start|>assistant", "<|channel|>final<|message|>",
         "<|channel|>commentary<|message|>", "<|end|>", "<|return|>"),
    ),
    ReasoningMark("Magistral, Mistral", "[THINK]", "[THINK]", "[/THINK]"),
    ReasoningMark("Seed-OSS", "<seed:think>", "<seed:think>", "</seed:think>"),
    ReasoningMark(
        "Command A", "<|START_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningMark(
        "Granite 3.3", "<response>", "<think>", "</think>", ("<response>", "</response>")
    ),
    ReasoningMark(
        "Granite 3.2", "Here is my thought process:",
        "Here is my thought process:", "Here is my response:",
    ),
    ReasoningMark(
        "Qwen3, QwQ, DeepSeek, SmolLM3, GLM-4.5, Kimi, MiniMax, Nemotron",
        "</think>", "<think>", "</think>",
    ),
)  # fmt: skip
"""The first one whose sign is in a chat template describes its reasoning."""

_DEEPSEEK_MARKS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_KIMI_MARKS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
CALLS_MARKS: Final = (
    CallsMark("gpt-oss", "<|channel|>", "<|channel|>commentary to=", "<|call|>", _parse_harmony,
              inner_marks=("<|message|>", "<|constrain|>")),
    CallsMark(
        "DeepSeek V3, R1", "```json", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        _parse_deepseek, inner_marks=_DEEPSEEK_MARKS,
    ),
    CallsMark(
        "DeepSeek V3.1", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>", _parse_deepseek_v31,
        inner_marks=_DEEPSEEK_MARKS,
    ),
    CallsMark(
        "Kimi K2", "<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>", _parse_kimi, inner_marks=_KIMI_MARKS,
    ),
    CallsMark(
        "MiniMax M2", "<minimax:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>",
        _parse_invoke,
    ),
    CallsMark("MiniMax M1", "<tool_calls>", "<tool_calls>", "</tool_calls>", _parse_json),
    CallsMark(
        "Seed-OSS", "<seed:tool_call>", "<seed:tool_call>", "</seed:tool_call>",
        _parse_function_tags,
    ),
    CallsMark("Qwen3-Coder", "<function=", "<tool_call>", "</tool_call>", _parse_function_tags),
    CallsMark("GLM-4.5", "<arg_key>", "<tool_call>", "</tool_call>", _parse_glm),
    CallsMark("Nemotron", "<TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>", _parse_json),
    CallsMark("LFM2", "<|tool_list_start|>", "<|tool_call_start|>", "<|tool_call_end|>",
              _parse_python),
    CallsMark("InternLM 2.5", "<|action_start|>", "<|action_start|>", "<|action_end|>",
              _parse_internlm, inner_marks=("<|plugin|>",)),
    CallsMark("Command A, R7B", "<|START_ACTION|>", "<|START_ACTION|>", "<|END_ACTION|>",
              _parse_json),
    CallsMark("Command R", "directly_answer", "Action: ```json", "```", _parse_json),
    CallsMark("FunctionGemma", "<start_function_call>", "<start_function_call>",
              "<end_function_call>", _parse_function_gemma, inner_marks=("<escape>",)),
    CallsMark("Gemma 3", "```tool_code", "```tool_code", "```", _parse_python),
    CallsMark("Phi-4-mini", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", _parse_json),
    CallsMark("Phi-4", "functools[", "functools", "", _parse_json),
    CallsMark("Granite 3", "<|tool_call|>", "<|tool_call|>", "", _parse_json),
    CallsMark("Llama 4", "[func_name1(", "[", "", _parse_python,
              at_start=True, is_kept=True),
)  # fmt: skip
"""The first one whose sign is in a chat template describes its calls.

Mistral, Llama 3, Hermes, Qwen and SmolLM3 are in ``tool_calls.TOOL_CALL_FORMATS``.
"""


@functools.lru_cache(64)
def detect_reasoning_mark(template: str) -> ReasoningMark | None:
    """The marks of reasoning of a chat template, if it has some."""
    return next((one for one in REASONING_MARKS if one.template_sign in template), None)


@functools.lru_cache(64)
def detect_calls_mark(template: str) -> CallsMark | None:
    """The marks of calls of a chat template, if no grammar enforces its format."""
    return next((one for one in CALLS_MARKS if _has_sign(one, template)), None)


def _has_sign(mark: CallsMark, template: str) -> bool:
    return mark.template_sign in template and (
        # The code fence is common; only with its other marks it is DeepSeek's.
        mark.template_sign != "```json" or mark.opening in template
    )


# --- the parser ---------------------------------------------------------------------------------


class OutputRules(Struct, frozen=True):
    """The marks in a request's output. ``is_open``: the prompt ends with the start of reasoning."""

    reasoning: ReasoningMark | None
    calls: CallsMark | ToolCallRules | None
    schemas: FunctionSchemas
    is_open: bool
    marker_tokens: frozenset[int]
    """Special tokens in the output; they must be decoded, so that the parser sees them."""

    def make_parser(self) -> "OutputParser":
        """A parser for one choice."""
        return OutputParser(self)


class OutputParser:
    """Parses the output of one choice into reasoning, text and tool calls."""

    def __init__(self, rules: OutputRules) -> None:
        self._reasoning = rules.reasoning
        self._mark = rules.calls if isinstance(rules.calls, CallsMark) else None
        self._inner: ToolCallParser | None = (
            rules.calls.make_parser() if isinstance(rules.calls, ToolCallRules) else None
        )
        self._schemas = rules.schemas
        self._state = "start" if rules.reasoning is not None else "text"
        if rules.is_open:
            self._state = "reasoning"
        self._is_harmony = rules.reasoning is not None and "<|channel|>" in rules.reasoning.opening
        self._text = ""
        self._strips = self._state == "reasoning"
        """Whether white space at the start of ``_text`` belongs to the mark before it."""
        self._section_start = ""
        """The opening mark of the section, with white space before it."""
        self._failed_ends = 0
        """Closing marks in the section that did not end it; the first and the last are at:"""
        self._first_end = self._last_end = -1
        self._has_text = False
        self._pending_tokens: list[OutputToken] = []
        self._calls = 0

    @property
    def calls(self) -> int:
        """The number of calls that have started."""
        return self._calls + (0 if self._inner is None else self._inner.calls)

    def feed(self, ready: ReadyText) -> Iterator[ParsedOutput]:
        """Add text; return what can be parsed so far."""
        self._text += ready.text
        self._pending_tokens += ready.tokens
        yield from self._advance(ended=False)

    def close(self) -> Iterator[ParsedOutput]:
        """The rest at the end of the output."""
        yield from self._advance(ended=True)
        if self._inner is not None:
            yield from self._inner.close()
        elif self._pending_tokens:
            yield ReadyText("", self._pop_tokens())

    def _advance(self, *, ended: bool) -> Iterator[ParsedOutput]:
        steps = {
            "start": self._read_start,
            "reasoning": self._read_reasoning,
            "text": self._read_text,
            "section": self._read_section,
        }
        before = None
        while before != (self._state, self._text):
            before = self._state, self._text
            yield from steps[self._state](ended)

    def _read_start(self, ended: bool) -> Iterator[ParsedOutput]:  # noqa: FBT001 - one table
        """Find out whether the output starts with reasoning."""
        if self._reasoning is None:
            return
        text, opening = self._text.lstrip(), self._reasoning.opening
        if text.startswith(opening):
            self._text, self._state, self._strips = text[len(opening) :], "reasoning", True
        elif ended or not opening.startswith(text):
            self._state = "text"
        yield from ()

    def _read_reasoning(self, ended: bool) -> Iterator[ParsedOutput]:  # noqa: FBT001 - one table
        closing = "" if self._reasoning is None else self._reasoning.closing
        if self._strips:
            self._text = self._text.lstrip()
            self._strips = not self._text
        position = self._text.find(closing)
        if position >= 0:
            text, self._text = self._text[:position].rstrip(), self._text[position + len(closing) :]
            self._state, self._strips = "text", True
        else:
            size = 0 if ended else count_overlap(self._text, closing)
            kept = self._text[: len(self._text) - size]
            text = kept if ended else kept.rstrip()
            self._text = self._text[len(text) :]
        if text:
            yield ParsedReasoning(text, len(self._pop_tokens()))

    def _read_text(self, ended: bool) -> Iterator[ParsedOutput]:  # noqa: FBT001 - one table
        position, opening = self._find_mark()
        if opening is None:
            position = len(self._text) - (0 if ended else self._count_uncertain())
        text, self._text = self._text[:position], self._text[position:]
        for answer_mark in self._get_answer_marks():
            text = re.sub(rf"\s*{re.escape(answer_mark)}", "", text)
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        if opening is not None:
            body = text.rstrip()
            self._text = self._text[len(opening) :]
            is_calls = self._mark is not None and opening == self._mark.opening
            self._state = "section" if is_calls else "reasoning"
            self._section_start = text[len(body) :] + opening
            self._failed_ends, self._first_end = 0, -1
            self._strips = not is_calls
            text = body
        yield from self._emit_text(text)

    def _find_mark(self) -> tuple[int, str | None]:
        """The first mark of calls, or of harmony's further reasoning."""
        found: list[tuple[int, str]] = []
        if self._mark is not None:
            position = self._text.find(self._mark.opening)
            starts = not self._has_text and not self._text[:position].strip()
            if position >= 0 and (starts or not self._mark.at_start):
                found.append((position, self._mark.opening))
        if self._is_harmony and self._reasoning is not None:
            position = self._text.find(self._reasoning.opening)
            if position >= 0:
                found.append((position, self._reasoning.opening))
        return min(found, default=(-1, None))

    def _get_answer_marks(self) -> tuple[str, ...]:
        return () if self._reasoning is None else self._reasoning.answer_marks

    def _count_uncertain(self) -> int:
        """Characters at the end that may begin a mark, and white space before a section."""
        marks = [*self._get_answer_marks()]
        if self._mark is not None and not (self._mark.at_start and self._has_text):
            marks.append(self._mark.opening)
        if self._is_harmony and self._reasoning is not None:
            marks.append(self._reasoning.opening)
        if not marks:
            return 0
        size = max(count_overlap(self._text, mark) for mark in marks)
        text = self._text[: len(self._text) - size]
        return len(self._text) - len(text.rstrip())

    def _read_section(self, ended: bool) -> Iterator[ParsedOutput]:  # noqa: FBT001 - one table
        """Wait for the end of the section; return its calls, or its text if it is malformed."""
        mark = self._mark
        if mark is None:
            return
        end, calls = self._find_section_end(mark, ended=ended)
        if end < 0:
            return
        whole = self._section_start + self._text[:end]
        self._text, self._state = self._text[end:], "text"
        if calls is None:
            yield from self._emit_text(whole)
            return
        self._strips = True
        for name, arguments in calls:
            yield ParsedCallStart(self._calls, make_call_id(), name, len(self._pop_tokens()))
            yield ParsedCallArguments(self._calls, arguments, 0)
            self._calls += 1

    def _find_section_end(
        self, mark: CallsMark, *, ended: bool
    ) -> tuple[int, list[tuple[str, str]] | None]:
        """Where the section ends, and its calls if it has some; -1: not there yet.

        A string of the arguments may contain the closing mark.
        """
        while mark.closing and self._failed_ends < MAX_CLOSINGS:
            position = self._text.find(mark.closing, self._last_end if self._failed_ends else 0)
            if position < 0:
                break
            end = position + len(mark.closing)
            if calls := self._parse_section(mark, self._text[:position]):
                return end, calls
            self._failed_ends, self._last_end = self._failed_ends + 1, end
            self._first_end = end if self._first_end < 0 else self._first_end
        if self._failed_ends == MAX_CLOSINGS or (ended and self._first_end >= 0):
            return self._first_end, None
        if ended or len(self._text) > MAX_SECTION:
            return len(self._text), self._parse_section(mark, self._text)
        return -1, None

    def _parse_section(self, mark: CallsMark, body: str) -> list[tuple[str, str]] | None:
        """The names and arguments in JSON of the section's calls.

        None if it is malformed, or calls a function that is not offered.
        """
        text = mark.opening + body if mark.is_kept else body
        try:
            calls = mark.parse(text, self._schemas)
            if not all(name in self._schemas and isinstance(args, dict) for name, args in calls):
                return None
            return [(name, msgspec.json.encode(args).decode()) for name, args in calls] or None
        except _PARSE_ERRORS:
            return None

    def _emit_text(self, text: str) -> Iterator[ParsedOutput]:
        if not text:
            return
        self._has_text = True
        ready = ReadyText(text, self._pop_tokens())
        if self._inner is None:
            yield ready
        else:
            yield from self._inner.feed(ready)

    def _pop_tokens(self) -> list[OutputToken]:
        tokens, self._pending_tokens = self._pending_tokens, []
        return tokens
