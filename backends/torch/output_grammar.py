"""The grammar of an output: its format, its tool calls, and the reasoning before them.

An output with a format alone has the grammar of the format. Otherwise one Lark grammar joins the
parts: reasoning, then a section of calls, an answer in the format, or text after which calls may
follow. Special tokens are written as ids, which no text can match.
"""

import re
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from backends.torch.call_formats import CallFormat
from backends.torch.grammar_source import GrammarPart, GrammarSource, GrammarWriter, quote_literal
from backends.torch.ipc import FunctionChoice, FunctionDefinition, OutputRule
from backends.torch.output_formats import ReasoningMark
from backends.torch.rejection import RequestRejectedError
from protocols.core.json_text import decode_json


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
