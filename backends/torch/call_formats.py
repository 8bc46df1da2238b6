# ruff: noqa: RUF001 - the marks of DeepSeek have letters like these
"""The formats in which model families write tool calls: one table for parser and grammar.

A format consists of literal marks and the syntax of arguments. From them follow how calls are
written, how they are read, and the grammar that enforces them: a format that can be read can be
enforced. Reading is tolerant: white space may differ, and JSON keys may have another order.
"""

import ast
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from backends.torch.argument_syntax import (
    JSON_ARGUMENTS,
    ArgumentSyntax,
    GemmaArguments,
    JsonArguments,
    PythonArguments,
    TagArguments,
    read_keywords,
)
from backends.torch.grammar_source import GrammarWriter
from backends.torch.ipc import FunctionCall, FunctionDefinition
from backends.torch.rejection import RequestRejectedError
from protocols.core.json_text import decode_json

FunctionSchemas = Mapping[str, Mapping[str, Any]]
"""The parameters' JSON schema of each function."""
MAX_CALLS: Final = 16
"""Maximum tool calls in one output: a weak model may never stop calling."""
PARSE_ERRORS: Final = (
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
_MAX_CUTS: Final = 64
"""Brackets at which a list of calls in Python may end that was cut off."""
_JSON_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{\[]|[}\]]', re.DOTALL)


class ParsedCall(NamedTuple):
    """A call of an offered function; ``arguments`` is JSON text."""

    name: str
    arguments: str


class CallFormat(Struct, frozen=True):
    """How a model family writes calls.

    ``section_prefix CALL (call_separator CALL)* section_suffix``, where a call is
    ``call_prefix NAME name_separator ARGUMENTS call_suffix``. In the marks ``{index}`` is a number.
    """

    family: str
    template_sign: str
    """Text in the chat templates of this family, but not of those before it in the list."""
    trigger: str
    """The first mark of a section; without one an output consists either of text or of calls."""
    call_prefix: str
    name_separator: str
    call_suffix: str
    call_separator: str
    section_prefix: str = ""
    section_suffix: str = ""
    closing: str = ""
    """The mark at which a section is read; without one it ends where its last call ends."""
    arguments: ArgumentSyntax = JSON_ARGUMENTS
    at_start: bool = False
    """Calls only start an output."""
    other_triggers: tuple[str, ...] = ()
    """Further marks with which models start a section."""
    loose_pattern: str = ""
    """The pattern of a call, where models write more than the marks say."""
    constrains_free_choice: bool = False
    """A call is enforced once it has started, also if no option of the request asks for it."""
    id_length: int | None = None
    """The number of letters and digits that its chat templates require in a call id."""

    @property
    def opening(self) -> str:
        """The text with which a section starts."""
        return self.trigger or (self.section_prefix + self.call_prefix)[:1]

    @property
    def texts(self) -> str:
        """All marks, one after another; they may be special tokens."""
        marks = (self.trigger, *self.other_triggers, self.section_prefix, self.call_prefix)
        marks += (self.name_separator, self.call_suffix, self.call_separator)
        marks += (self.section_suffix, self.closing, self.arguments.texts, self.loose_pattern)
        return "\0".join(marks)

    @property
    def streams_arguments(self) -> bool:
        """Whether the text of enforced arguments is what a client gets."""
        return isinstance(self.arguments, JsonArguments) and "{index}" not in self.call_prefix + (
            self.name_separator + self.call_suffix
        )

    @property
    def is_json(self) -> bool:
        """Whether a call is a JSON object."""
        return self.call_prefix.startswith("{")

    # --- writing --------------------------------------------------------------------------------

    def format_calls(self, calls: Sequence[FunctionCall]) -> str:
        """The calls as the model writes them."""
        parts = []
        for index, call in enumerate(calls):
            arguments = self.arguments.write(call.arguments)
            head, tail = self.call_prefix + call.name + self.name_separator, self.call_suffix
            parts.append(f"{_number(head, index)}{arguments}{_number(tail, index)}")
        return f"{self.section_prefix}{self.call_separator.join(parts)}{self.section_suffix}"

    def describe_call(self) -> str:
        """A call with placeholders, for a prompt."""
        is_json = isinstance(self.arguments, JsonArguments)
        arguments = "{ARGUMENTS}" if is_json else self.arguments.write('{"KEY": "VALUE"}')
        call = f"{self.call_prefix}NAME{self.name_separator}{arguments}{self.call_suffix}"
        return _number(f"{self.section_prefix}{call}{self.section_suffix}", 0)

    # --- reading --------------------------------------------------------------------------------

    def read_calls(
        self, text: str, schemas: FunctionSchemas, *, is_cut: bool = False
    ) -> list[ParsedCall | str]:
        """The calls of a section, and text that is none.

        Text is only what stands beside at least one call; without a call the list is empty.
        ``is_cut``: the model did not end the section itself. Then a call is one only if its
        arguments are complete, and a further call that is not is text, the last of the list.
        """
        found: list[ParsedCall | str] = []
        if isinstance(self.arguments, PythonArguments):
            found = self._read_python(text, schemas, is_cut=is_cut)
        elif self.is_json:
            found = self._read_json(text, schemas)
        else:
            found = self._read_marked(text, schemas, is_cut=is_cut)
        if is_cut and found and isinstance(found[-1], str) and self._is_end(found[-1]):
            found.pop()
        return found if any(isinstance(one, ParsedCall) for one in found) else []

    def _is_end(self, text: str) -> bool:
        """Whether text after a call is the beginning of the marks that end it."""
        ends = (f"{self.call_suffix}{self.section_suffix}", self.section_suffix, self.closing)
        rest = "".join(text.split())
        return any("".join(end.split()).startswith(rest) for end in ends)

    def _read_marked(
        self, text: str, schemas: FunctionSchemas, *, is_cut: bool
    ) -> list[ParsedCall | str]:
        """Calls between the marks of a call."""
        found: list[ParsedCall | str] = []
        position = 0
        for match in _build_call_pattern(self).finditer(text):
            found += self._list_text(text[position : match.start()])
            # Without their end mark, tags may go on, and so may arguments that have not begun.
            is_open = is_cut and not text[match.end("body") :].strip()
            if is_open and (isinstance(self.arguments, TagArguments) or not match["body"].strip()):
                found.append(match[0])
            else:
                found.append(self._read_match(match, schemas))
            position = match.end()
        return found + self._list_text(text[position:])

    def _read_match(self, match: re.Match[str], schemas: FunctionSchemas) -> ParsedCall | str:
        name = match["name"].strip()
        try:
            return _make_call(
                name, self.arguments.read(match["body"], schemas.get(name, {})), schemas
            )
        except PARSE_ERRORS:
            return match[0]

    def _list_text(self, text: str) -> list[ParsedCall | str]:
        """The text between two calls, unless it consists of marks and white space."""
        rest = text
        marks = {self.section_prefix, self.call_separator, self.section_suffix, self.closing,
                 self.trigger, *self.other_triggers}  # fmt: skip
        for mark in sorted((one.strip() for one in marks), key=len, reverse=True):
            rest = rest.replace(mark, "") if mark else rest
        return [text] if rest.strip(" \n\r\t,;[]") else []

    def _read_json(self, text: str, schemas: FunctionSchemas) -> list[ParsedCall | str]:
        """JSON objects, alone, in a list, or one after another."""
        found: list[ParsedCall | str] = []
        position = 0
        while (start := text.find("{", position)) >= 0:
            found += self._list_text(text[position:start])
            position = find_json_end(text, start)
            try:
                name, arguments = _read_json_call(decode_json(text[start:position]))
                found.append(_make_call(name, arguments, schemas))
            except PARSE_ERRORS:
                found.append(text[start:position])
        return found + self._list_text(text[position:])

    def _read_python(
        self, text: str, schemas: FunctionSchemas, *, is_cut: bool
    ) -> list[ParsedCall | str]:
        """Python calls with named literals, in a list, or one per line."""
        body = text.strip()
        for mark in (self.trigger if self.trigger != "[" else "", self.closing):
            body = body.removeprefix(mark.strip()).removesuffix(mark.strip()).strip()
        try:
            statements = ast.parse(body).body
        except PARSE_ERRORS:
            return self._read_finished_python(body, schemas) if is_cut else []
        nodes: list[ast.AST] = []
        for statement in statements:
            value: ast.AST = statement.value if isinstance(statement, ast.Expr) else statement
            nodes += value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        found: list[ParsedCall | str] = []
        for node in nodes:
            try:
                found.append(_read_python_call(node, schemas))
            except PARSE_ERRORS:
                found.append(ast.unparse(node))
        return found

    def _read_finished_python(self, body: str, schemas: FunctionSchemas) -> list[ParsedCall | str]:
        """The longest part of a list of calls, or of lines, that is complete, and the rest."""
        end, closing = len(body), "]" if body.startswith("[") else ""
        for _ in range(_MAX_CUTS):
            end = body.rfind(")", 0, end)
            if end < 0:
                break
            found = self._read_python(body[: end + 1] + closing, schemas, is_cut=False)
            if found:
                rest = body[end + 1 :].strip()
                return [*found, rest] if rest.strip("],` \n") else found
        return []

    def find_end(self, text: str) -> int:
        """Where a section without a closing mark ends; -1: not in this text."""
        if self.at_start:
            return -1
        start = re.search(r"\[\s*\{|\{" if self.is_json else r"\{", text)
        if start is None:
            return -1
        end = find_json_end(text, start.start())
        return end if _is_json(text[start.start() : end]) else -1

    # --- the grammar ----------------------------------------------------------------------------

    def build_rule(
        self,
        writer: GrammarWriter,
        functions: Sequence[FunctionDefinition],
        *,
        parallel: bool,
        skip: str = "",
    ) -> str:
        """The expression of a section with calls of these functions.

        ``skip`` is the start of the section that has been written already. Raises
        RequestRejectedError.
        """
        bodies = [
            (one, self.arguments.build_rule(writer, read_parameters(one), strict=one.strict))
            for one in functions
        ]
        first = self._build_call(
            writer, bodies, (self.section_prefix + self.call_prefix)[len(skip) :]
        )
        end = writer.quote(self.section_suffix)
        if not parallel:
            return f"{first} {end}"
        further = self._build_call(writer, bodies, self.call_separator + self.call_prefix)
        return f"{first} {further}{{0,{MAX_CALLS - 1}}} {end}"

    def _build_call(
        self, writer: GrammarWriter, bodies: Sequence[tuple[FunctionDefinition, str]], head: str
    ) -> str:
        tail = writer.quote(self.call_suffix)
        return writer.add_choice(
            f"{writer.quote(head + function.name + self.name_separator)} {body} {tail}"
            for function, body in bodies
        )


def read_parameters(function: FunctionDefinition) -> dict[str, Any]:
    """A function's schema, always of type object. Raises RequestRejectedError."""
    try:
        schema = decode_json(function.parameters, kind=dict[str, Any])
    except msgspec.ValidationError as error:
        text = f"the parameters of {function.name} must be a JSON Schema"
        raise RequestRejectedError("invalid", text, param="tools") from error
    if schema.setdefault("type", "object") != "object":
        text = f"the parameters of {function.name} must have type object"
        raise RequestRejectedError("invalid", text, param="tools")
    return schema


def decode_parameters(function: FunctionDefinition) -> Mapping[str, Any]:
    """The JSON schema of a function's parameters, for reading calls."""
    schema = decode_json(function.parameters)
    return schema if isinstance(schema, dict) else {}


def find_json_end(text: str, start: int) -> int:
    """The position after the object or list at ``start``."""
    depth = 0
    for match in _JSON_TOKEN.finditer(text, start):
        depth += (match[0] in "{[" and 1) or (match[0] in "}]" and -1) or 0
        if not depth:
            return match.end()
    return len(text)


def _is_json(text: str) -> bool:
    try:
        decode_json(text)
    except msgspec.DecodeError:
        return False
    return True


def _number(mark: str, index: int) -> str:
    return mark.replace("{index}", str(index))


def _make_call(name: Any, arguments: Any, schemas: FunctionSchemas) -> ParsedCall:
    if name not in schemas or not isinstance(arguments, dict):
        raise ValueError("the function is not offered, or its arguments are no object")
    return ParsedCall(name, msgspec.json.encode(arguments).decode())


def _read_json_call(value: Any) -> tuple[Any, Any]:
    value = value.get("function", value) if isinstance(value.get("function"), dict) else value
    if len(value) == 1:
        [(name, arguments)] = value.items()
        if isinstance(arguments, dict):
            return name, arguments
    name = value.get("name") or value["tool_name"]
    arguments = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    return name, decode_json(arguments) if isinstance(arguments, str) else arguments


def _read_python_call(node: ast.AST, schemas: FunctionSchemas) -> ParsedCall:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
        node = node.args[0]  # Gemma prints what it calls
    if not isinstance(node, ast.Call):
        raise TypeError("an expression is no call")
    return _make_call(ast.unparse(node.func), read_keywords(node), schemas)


@functools.lru_cache(64)
def _build_call_pattern(call_format: CallFormat) -> re.Pattern[str]:
    """The pattern of one call: white space around the marks may differ."""
    if call_format.loose_pattern:
        return re.compile(call_format.loose_pattern, re.DOTALL)
    head, middle, tail = (
        _escape_spaced(one)
        for one in (call_format.call_prefix, call_format.name_separator, call_format.call_suffix)
    )
    end = rf"(?:\s*{tail}|\s*\Z)" if tail else rf"(?=\s*{head}|\s*\Z)"
    return re.compile(
        rf"{head}\s*(?P<name>[^\s<>\"'(){{}}\[\]|]+)\s*{middle}(?P<body>.*?){end}", re.DOTALL
    )


def _escape_spaced(mark: str) -> str:
    """The pattern of a mark with any white space, or none, in place of its own."""
    words = (
        re.escape(word).replace(r"\{index\}", r"\w+") for word in re.split(r"\s+", mark.strip())
    )
    return r"\s*".join(words)


# --- the families -------------------------------------------------------------------------------

_TAGS: Final = TagArguments("<parameter={key}>\n", "\n</parameter>\n")
_INVOKE_TAGS: Final = TagArguments('<parameter name="{key}">', "</parameter>\n")
_DSML_TAGS: Final = TagArguments(
    '<｜DSML｜parameter name="{key}" string="{is_string}">', "</｜DSML｜parameter>\n"
)
_KEY_TAGS: Final = TagArguments("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n")
_NAME: Final = '{"name": "'
_ARGUMENTS: Final = '", "arguments": '
_DEEPSEEK: Final = "<｜tool▁calls▁begin｜>"
_HARMONY_HEADER: Final = (
    r"(?:<\|start\|>assistant)?(?:\s*<\|channel\|>(?:commentary|analysis))?\s*to=(?:functions\.)?"
    r"(?P<name>[\w.-]+)[^{]*?<\|message\|>(?P<body>.*?)(?:<\|call\|>|<\|end\|>|\Z)"
)


def _make_mistral(sign: str, section_prefix: str) -> CallFormat:
    return CallFormat(
        family="Mistral",
        template_sign=sign,
        trigger="[TOOL_CALLS]",
        call_prefix=_NAME,
        name_separator=_ARGUMENTS,
        call_suffix="}",
        call_separator=", ",
        section_prefix=section_prefix,
        section_suffix="]",
        constrains_free_choice=True,
        id_length=9,
    )


HERMES_FORMAT: Final = CallFormat(
    "Hermes", "<tool_call>", "<tool_call>",
    f"<tool_call>\n{_NAME}", _ARGUMENTS, "}\n</tool_call>", "\n",
    closing="</tool_call>", constrains_free_choice=True,
)  # fmt: skip
CALL_FORMATS: Final = (
    CallFormat(
        "Mistral Small 3.2", "[CALL_ID]", "[TOOL_CALLS]", "[TOOL_CALLS]",
        "[CALL_ID]{index}[ARGS]", "", "", id_length=9,
    ),
    CallFormat(
        "Mistral", "[ARGS]", "[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", "", "",
        constrains_free_choice=True, id_length=9,
    ),
    _make_mistral("[TOOL_CALLS] [", "[TOOL_CALLS] ["),
    _make_mistral("[TOOL_CALLS]", "[TOOL_CALLS]["),
    CallFormat(
        "Llama 3", '"parameters": dictionary', "", _NAME, '", "parameters": ', "}", "; ",
        at_start=True, constrains_free_choice=True,
    ),
    CallFormat(
        "gpt-oss", "<|channel|>", "<|channel|>commentary to=",
        "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>", "",
        closing="<|call|>", loose_pattern=_HARMONY_HEADER,
        other_triggers=("<|start|>assistant to=functions.", " to=functions.",
                        "<|channel|>analysis to=functions."),
    ),
    CallFormat(
        "DeepSeek V3, R1", f"```json + {_DEEPSEEK}", _DEEPSEEK,
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n",
        "\n```<｜tool▁call▁end｜>", "\n", _DEEPSEEK, "<｜tool▁calls▁end｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    CallFormat(
        "DeepSeek V3.1", _DEEPSEEK, _DEEPSEEK,
        "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "",
        _DEEPSEEK, "<｜tool▁calls▁end｜>", closing="<｜tool▁calls▁end｜>",
    ),
    CallFormat(
        "DeepSeek V3.2", "function_calls>\n + DSML", "<｜DSML｜function_calls>",
        '<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n", "", "<｜DSML｜function_calls>\n",
        "</｜DSML｜function_calls>", closing="</｜DSML｜function_calls>", arguments=_DSML_TAGS,
    ),
    CallFormat(
        "DeepSeek V4", "DSML", "<｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n", "", "<｜DSML｜tool_calls>\n",
        "</｜DSML｜tool_calls>", closing="</｜DSML｜tool_calls>", arguments=_DSML_TAGS,
    ),
    CallFormat(
        "Kimi K2", "<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.", ":{index}<|tool_call_argument_begin|>",
        "<|tool_call_end|>", "", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        closing="<|tool_calls_section_end|>",
        loose_pattern=(
            r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*"
            r"<\|tool_call_argument_begin\|>(?P<body>.*?)<\|tool_call_end\|>"
        ),
    ),
    CallFormat(
        "Kimi K3", "<|open|>", "<|open|>tools<|sep|>", '<|open|>call tool="',
        '" index="{index}"<|sep|>', "<|close|>call<|sep|>", "", "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>", closing="<|close|>tools<|sep|>",
        arguments=TagArguments(
            '<|open|>argument key="{key}" type="{type}"<|sep|>', "<|close|>argument<|sep|>"
        ),
    ),
    CallFormat(
        "MiniMax M2", "<minimax:tool_call>", "<minimax:tool_call>",
        '<invoke name="', '">\n', "</invoke>\n", "", "<minimax:tool_call>\n",
        "</minimax:tool_call>", closing="</minimax:tool_call>", arguments=_INVOKE_TAGS,
    ),
    CallFormat(
        "MiniMax M3", "]<]minimax[>[", "]<]minimax[>[<tool_call>", ']<]minimax[>[<invoke name="',
        '">', "]<]minimax[>[</invoke>\n", "", "]<]minimax[>[<tool_call>\n",
        "]<]minimax[>[</tool_call>", closing="]<]minimax[>[</tool_call>",
        arguments=TagArguments("]<]minimax[>[<{key}>", "]<]minimax[>[</{key}>", "item"),
    ),
    CallFormat(
        "Apriel", "<tool_calls>[", "<tool_calls>", _NAME, _ARGUMENTS, "}", ", ", "<tool_calls>[",
        "]</tool_calls>", closing="</tool_calls>",
    ),
    CallFormat(
        "MiniMax M1", "<tool_calls>", "<tool_calls>", _NAME, _ARGUMENTS, "}", "\n",
        "<tool_calls>\n", "\n</tool_calls>", closing="</tool_calls>",
    ),
    CallFormat(
        "Seed-OSS", "<seed:tool_call>", "<seed:tool_call>", "<function=", ">\n", "</function>",
        "\n</seed:tool_call>\n<seed:tool_call>\n", "<seed:tool_call>\n", "\n</seed:tool_call>",
        closing="</seed:tool_call>",
        arguments=TagArguments("<parameter={key}>", "</parameter>\n"),
    ),
    CallFormat(
        "Functionary 3.1", "<function=example_function_name>", "<function=", "<function=", ">",
        "</function>", "", closing="</function>",
    ),
    CallFormat(
        "Qwen3-Coder", "<function=", "<tool_call>", "<function=",
        ">\n", "</function>", "\n</tool_call>\n<tool_call>\n", "<tool_call>\n", "\n</tool_call>",
        closing="</tool_call>", arguments=_TAGS, other_triggers=("<function=",),
    ),
    CallFormat(
        "Hunyuan 3", "<tool_calls:opensource>", "<tool_calls:opensource>",
        "<tool_call:opensource>", "<tool_sep:opensource>\n", "</tool_call:opensource>\n", "",
        "<tool_calls:opensource>\n", "</tool_calls:opensource>",
        closing="</tool_calls:opensource>",
        arguments=TagArguments(
            "<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>",
            "</arg_value:opensource>\n",
        ),
    ),
    CallFormat(
        "GLM 4.7", "<tool_call>{function-name}<arg_key>", "<tool_call>",
        "<tool_call>", "", "</tool_call>", "", closing="</tool_call>",
        arguments=TagArguments("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"),
    ),
    CallFormat(
        "GLM-4.5", "<arg_key>", "<tool_call>", "<tool_call>", "\n", "</tool_call>", "\n",
        closing="</tool_call>", arguments=_KEY_TAGS,
    ),
    CallFormat(
        "Nemotron", "<TOOLCALL>", "<TOOLCALL>", _NAME, _ARGUMENTS, "}", ", ", "<TOOLCALL>[",
        "]</TOOLCALL>", closing="</TOOLCALL>",
    ),
    CallFormat(
        "LFM2", "<|tool_list_start|>", "<|tool_call_start|>", "", "(", ")", ", ",
        "<|tool_call_start|>[", "]<|tool_call_end|>", closing="<|tool_call_end|>",
        arguments=PythonArguments(),
    ),
    CallFormat(
        "InternLM 2.5", "<|action_start|>", "<|action_start|>", _NAME, '", "parameters": ', "}",
        "<|action_end|>\n<|action_start|><|plugin|>\n", "<|action_start|><|plugin|>\n",
        "<|action_end|>", closing="<|action_end|>",
    ),
    CallFormat(
        "Command A, R7B", "<|START_ACTION|>", "<|START_ACTION|>",
        '{"tool_call_id": "{index}", "tool_name": "', '", "parameters": ', "}", ",\n    ",
        "<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>", closing="<|END_ACTION|>",
    ),
    CallFormat(
        "Command R", "directly_answer", "Action: ```json", '{"tool_name": "', '", "parameters": ',
        "}", ",\n", "Action: ```json\n[", "]\n```", closing="```",
        other_triggers=("Action:\n```json",),
    ),
    CallFormat(
        "FunctionGemma", "<start_function_call>", "<start_function_call>",
        "<start_function_call>call:", "", "<end_function_call>", "",
        closing="<end_function_call>", arguments=GemmaArguments("<escape>"),
    ),
    CallFormat(
        "Gemma 4", "<|tool_call>", "<|tool_call>", "<|tool_call>call:", "", "<tool_call|>", "",
        closing="<tool_call|>", arguments=GemmaArguments('<|"|>'),
    ),
    CallFormat(
        "Gemma 3", "```tool_code", "```tool_code", "", "(", ")", "\n", "```tool_code\n", "\n```",
        closing="```", arguments=PythonArguments(),
    ),
    CallFormat(
        "Phi-4-mini", "<|/tool|>", "<|tool_call|>", _NAME, _ARGUMENTS, "}", ", ",
        "<|tool_call|>[", "]<|/tool_call|>", closing="<|/tool_call|>",
    ),
    CallFormat(
        "Phi-4", "functools[", "functools", _NAME, _ARGUMENTS, "}", ", ", "functools[", "]",
    ),
    CallFormat(
        "Granite 3", "<|tool_call|>", "<|tool_call|>", _NAME, _ARGUMENTS, "}", ", ",
        "<|tool_call|>[", "]",
    ),
    CallFormat(
        "Apertus", "<|tools_prefix|>", "<|tools_prefix|>", '{"', '": ', "}", ", ",
        "<|tools_prefix|>[", "]<|tools_suffix|>", closing="<|tools_suffix|>",
    ),
    CallFormat(
        "MiniCPM5", '<function name="', '<function name="', '<function name="', '">',
        "</function>", "\n", closing="</function>",
        arguments=TagArguments('<param name="{key}">', "</param>"),
    ),
    CallFormat(
        "GigaChat 3.1", "<|function_call|>", "<|function_call|>", _NAME, _ARGUMENTS, "}",
        "<|function_call|>", "<|function_call|>", "",
    ),
    CallFormat(
        "GigaChat 3", "function call<|role_sep|>", "<|message_sep|>\n\nfunction call<|role_sep|>",
        _NAME, _ARGUMENTS, "}", "<|message_sep|>\n\nfunction call<|role_sep|>\n",
        "<|message_sep|>\n\nfunction call<|role_sep|>\n", "",
        other_triggers=("function call<|role_sep|>",),
    ),
    CallFormat(
        "Solar Open", "<|tool_call:begin|>", "<|tool_calls|>",
        "<|tool_call:begin|>{index}<|tool_call:name|>", "<|tool_call:args|>",
        "<|tool_call:end|>", "", "<|tool_calls|>", "<|calls|>", closing="<|calls|>",
    ),
    CallFormat(
        "Llama 4", "[func_name1(", "", "", "(", ")", ", ", "[", "]", at_start=True,
        arguments=PythonArguments(),
    ),
    HERMES_FORMAT,
)  # fmt: skip
"""From the templates and outputs of the model cards. The first sign in a template describes it."""


def has_sign(template: str, sign: str) -> bool:
    """Whether a template has a family's sign: all of its texts, which `` + `` separates."""
    return all(text in template for text in sign.split(" + "))


@functools.lru_cache(64)
def detect_by_sign(template: str) -> CallFormat | None:
    """The format whose sign is in a chat template."""
    return next((one for one in CALL_FORMATS if has_sign(template, one.template_sign)), None)
