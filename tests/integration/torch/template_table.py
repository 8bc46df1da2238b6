"""Generates the documentation's table of chat templates.

``python -m tests.integration.torch.template_table`` writes it.

The templates are llama.cpp's, from the source package of xllamacpp, which pip downloads. Each
template renders conversations with tool calls, and its rendering of the model's output is parsed
again: the cases come from the templates, not from the parser's own table. ``XLLAMACPP_SOURCE`` may
name the package.
"""

import functools
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from transformers.utils.chat_template_utils import render_jinja_template

from backends.torch.argument_syntax import write_json
from backends.torch.detokenizer import ReadyText
from backends.torch.output_formats import OutputRules
from backends.torch.parsed_output import ParsedCallArguments, ParsedCallStart, ParsedReasoning
from backends.torch.template_features import TemplateFeatures, inspect_template

PAGE: Final = Path(__file__).parents[3] / "docs" / "model-families.md"
PIN: Final = Path(__file__).parents[2] / "bench_engine" / "peers" / "llama.txt"
_START: Final = "<!-- the table: python -m tests.integration.torch.template_table -->"
_END: Final = "<!-- end of the table -->"
_QUESTION: Final = "what is it?"
_SCHEMAS: Final[dict[str, Any]] = {
    "lookup": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "a text"},
            "maybe": {"type": ["string", "null"], "description": "a text or nothing"},
            "other": {
                "anyOf": [{"type": "string"}, {"type": "null"}],
                "type": "string",
                "description": "the same",
            },
            "count": {"type": "integer", "description": "a number"},
            "ratio": {"type": "number", "description": "a number"},
            "deep": {"type": "boolean", "description": "a flag"},
            "tags": {"type": "array", "items": {"type": "string"}, "description": "texts"},
            "place": {
                "type": "object",
                "properties": {"lat": {"type": "number"}, "name": {"type": "string"}},
                "description": "a place",
            },
        },
        "required": ["text"],
    },
    "now": {"type": "object", "properties": {}, "required": []},
}
_TOOLS: Final = [
    {
        "type": "function",
        "function": {"name": name, "description": f"does {name}", "parameters": schema},
    }
    for name, schema in _SCHEMAS.items()
]
Call = tuple[str, dict[str, Any]]


class Case(NamedTuple):
    """An assistant's message: text, reasoning and tool calls."""

    name: str
    calls: tuple[Call, ...]
    content: str = ""
    reasoning: str = ""


CASES: Final = (
    Case("text", (("lookup", {"text": "Rome"}),)),
    Case("digits in a text", (("lookup", {"text": "12345"}),)),
    Case("words of JSON in a text", (("lookup", {"text": "true"}),)),
    Case("nullable text", (("lookup", {"text": "x", "maybe": "1e5", "other": "12345"}),)),
    Case("null", (("lookup", {"text": "x", "maybe": None}),)),
    Case("numbers", (("lookup", {"text": "x", "count": -14, "ratio": 2.5, "deep": True}),)),
    Case("list and object", (("lookup", {"text": "x", "tags": ["a", "b c"],
                                         "place": {"lat": 1.5, "name": "é"}}),)),
    Case("marks in a text", (("lookup", {"text": 'a "b" {c} [d] <e> (f), g: \'h\' é'}),)),
    Case("lines", (("lookup", {"text": "def f():\n    return 1\n\n  # end"}),)),
    Case("no arguments", (("now", {}),)),
    Case("two calls", (("lookup", {"text": "Rome"}), ("now", {}))),
    Case("content before a call", (("lookup", {"text": "Rome"}),), content="Let me see."),
    Case("reasoning before a call", (("lookup", {"text": "Rome"}),), reasoning="I think so."),
)  # fmt: skip


def load_templates() -> dict[str, str]:
    """Return the templates by name. Raises RuntimeError if the package can't be downloaded."""
    source = os.environ.get("XLLAMACPP_SOURCE")
    if source:
        return _read_templates(Path(source))
    pin = next(line for line in PIN.read_text("utf-8").splitlines() if "xllamacpp==" in line)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--no-binary", "xllamacpp", "-d", folder, pin.split(" ")[0].strip("\\ ")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        files = list(Path(folder).glob("xllamacpp-*.tar.gz"))
        if not files:
            raise RuntimeError(f"pip can't download xllamacpp's source: {done.stderr[-300:]}")
        return _read_templates(files[0])


def _read_templates(package: Path) -> dict[str, str]:
    templates: dict[str, str] = {}
    with tarfile.open(package) as archive:
        for member in archive:
            if re.search(r"models/templates/[^/]+\.jinja$", member.name):
                file = archive.extractfile(member)
                if file is not None:
                    templates[Path(member.name).stem] = file.read().decode()
    return dict(sorted(templates.items(), key=lambda one: one[0].lower()))


def render(template: str, messages: Any, tools: Any, **variables: Any) -> str:
    """Render a conversation with the template."""
    marks: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>"}
    arguments: dict[str, Any] = {"add_generation_prompt": True, **marks, **variables}
    rendered: Any = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=template, **arguments
    )
    text: str = rendered[0][0]
    return text


class TemplateResult(NamedTuple):
    """How many of a template's outputs are parsed to the original message."""

    features: TemplateFeatures
    wrong: list[str]
    cases: int


def check_template(template: str) -> TemplateResult:
    """Render assistant messages with a template and parse them as model output."""
    features = inspect_template(template, functools.partial(render, template))
    wrong, count = list[str](), 0
    if features.call_format is None or not features.writes_calls:
        return TemplateResult(features, wrong, count)
    for case in CASES:
        script = _write_output(template, features, case)
        if script is None:
            continue
        count += 1
        expected = ([*case.calls], case.content, case.reasoning)
        if any(_parse(features, script, size) != expected for size in (len(script), 1, 3)):
            wrong.append(case.name)
    return TemplateResult(features, wrong, count)


def _write_output(template: str, features: TemplateFeatures, case: Case) -> str | None:
    """Return the rendered assistant message, or None if the template rejects or drops a part."""
    calls = [
        {
            "id": f"a1b2c3d4{index}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": write_json(value) if features.text_arguments else value,
            },
        }
        for index, (name, value) in enumerate(case.calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": case.content, "tool_calls": calls}
    if case.reasoning:
        if features.reasoning_key is None or features.reasoning is None:
            return None
        message[features.reasoning_key] = case.reasoning
    user = {"role": "user", "content": _QUESTION}
    try:
        start = render(template, [user], _TOOLS)
        whole = render(template, [user, message], _TOOLS, add_generation_prompt=False)
    except Exception:  # noqa: BLE001 - a template may refuse two calls, or content beside one
        return None
    script = _cut_end(features, whole[_find_start(start, whole) :])
    keys = [f"{key}" for _, value in case.calls for key in value]
    is_whole = all(text in script for text in (case.content, case.reasoning, *keys))
    mark = features.reasoning
    if mark is not None and case.content and f"{mark.opening}{case.content}" in script:
        return None  # the template renders it as reasoning
    return script if is_whole and case.calls[-1][0] in script else None


def _find_start(prompt: str, whole: str) -> int:
    """Return where the output starts: after the prompt, or after the marks that both share."""
    position = next(
        (at for at, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]),
        len(prompt),
    )
    while position < len(prompt) and position and whole[position - 1] not in ">\n]":
        position -= 1
    return position


def _cut_end(features: TemplateFeatures, text: str) -> str:
    """Return the text without the end mark of the message."""
    call_format = features.call_format
    closing = "" if call_format is None else call_format.closing
    if closing and closing in text:
        return text[: text.rfind(closing) + len(closing)]
    for mark in ("<eos>", "<|message_sep|>\n\n", "<|eom_id|>", "<|eot_id|>", "<|im_end|>\n"):
        text = text.removesuffix(mark)
    return text


def _parse(features: TemplateFeatures, script: str, size: int) -> tuple[list[Call], str, str]:
    mark = features.reasoning
    starts_open = (
        mark is not None
        and not mark.answer_opening
        and mark.opening not in script
        and not script.lstrip().startswith(mark.closing)
        and mark.closing in script
    )
    rules = OutputRules(mark, features.call_format, _SCHEMAS, starts_open, frozenset())
    parser = rules.make_parser()
    outputs = [
        one
        for at in range(0, len(script), size)
        for one in parser.feed(ReadyText(script[at : at + size], []))
    ]
    outputs += parser.close()
    calls = [
        (
            start.name,
            msgspec.json.decode(
                "".join(
                    one.text
                    for one in outputs
                    if isinstance(one, ParsedCallArguments) and one.call == start.call
                )
            ),
        )
        for start in outputs
        if isinstance(start, ParsedCallStart)
    ]
    text = "".join(one.text for one in outputs if isinstance(one, ReadyText)).strip()
    reasoning = "".join(one.text for one in outputs if isinstance(one, ParsedReasoning)).strip()
    return calls, text, reasoning


def build_table(templates: Mapping[str, str]) -> str:
    """Build the table in Markdown."""
    return "".join(_list_rows(templates))


def _list_rows(templates: Mapping[str, str]) -> Iterator[str]:
    yield "| template | format of calls | found by | right | wrong |\n"
    yield "| --- | --- | --- | --- | --- |\n"
    for name, template in templates.items():
        features, wrong, count = check_template(template)
        call_format = features.call_format
        family = "not known" if call_format is None else call_format.family
        evidence = features.problem if call_format is None else features.evidence
        right = f"{count - len(wrong)} of {count}" if count else "writes no calls"
        yield f"| {name} | {family} | {evidence} | {right} | {', '.join(wrong)} |\n"


def replace_table(page: str, table: str) -> str:
    """Return the page with this table."""
    before, _, rest = page.partition(_START)
    return f"{before}{_START}\n\n{table}\n{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text("utf-8"), build_table(load_templates())), "utf-8")
