"""Answers that have a form, and those that may call functions: from the request to the rows."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

import torch

from backends.torch.families import Family, family_of, told
from backends.torch.forms import of_calls, of_form
from backends.torch.grammar import NOTHING, Grammars, Guide, Source
from backends.torch.listening import Ear, template_of
from backends.torch.reading import Reader, Refused
from backends.torch.rows import Job, Row
from backends.torch.spec import Calling, Generate
from backends.torch.speech import Voice

_log = logging.getLogger(__name__)

PATIENCE: Final = 10.0
"""Seconds that a request waits for its grammar."""
MOST: Final = 256
"""Requests that wait for one."""


class Guiding:
    """Readies jobs whose answers have a form; they wait here for their grammars."""

    def __init__(self, tokenizer: Any, reader: Reader, grammars: Grammars) -> None:
        self._input_processor = reader
        self._compiler = grammars
        added = tokenizer.added_tokens_decoder.items()
        self._special_tokens = {str(token): int(number) for number, token in added if token.special}
        self._tokenizer = tokenizer
        self._response_template = template_of(tokenizer)
        self._waiting: dict[Job, Future[Guide]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def start_compilation(self, job: Job) -> bool:
        """Whether the job has to wait until it is ``settled``. Raises Refused."""
        spec = job.command
        if spec.output_format is None and spec.function_choice is None:
            return False
        if self._response_template is not None and _unbound(spec):
            job.parser_rules = self._make_template_rules(job, self._response_template)
            return False
        if len(self._waiting) >= MOST:
            raise Refused("overloaded", "too many answers with a form are being prepared")
        self._waiting[job] = self._compiler.compile_grammar(self._build_grammar(job))
        return True

    def _build_grammar(self, job: Job) -> Source:
        spec, calling = job.command, job.command.function_choice
        if calling is None:
            return () if spec.output_format is None else of_form(spec.output_format)
        family = family_of(self._input_processor.get_chat_template(spec.input))
        job.parser_rules = self._make_tool_call_rules(family, calling, spec)
        functions = [one for one in spec.input.functions if one.name in calling.names]
        return of_calls(calling, functions, family, self._special_tokens, spec.output_format)

    def pop_finished(self, now: float) -> list[tuple[Job, Refused | None]]:
        """The jobs that wait no longer, with what is wrong where something is."""
        found = []
        for job, asked in list(self._waiting.items()):
            if asked.done():
                found.append((job, _outcome(job, asked)))
            elif now - job.arrived_at >= PATIENCE:
                text = f"the form of the answer could not be prepared within {PATIENCE:g} s"
                found.append((job, Refused("unsupported", text, param=_param(job.command))))
        for job, _ in found:
            del self._waiting[job]
        return found

    def remove(self, job: Job) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(job, None)

    def _make_tool_call_rules(self, family: Family, calling: Calling, spec: Generate) -> Voice:
        texts = (
            family.format_calls([])
            + family.call_prefix
            + family.name_separator
            + family.call_suffix
        )
        marks = frozenset(number for text, number in self._special_tokens.items() if text in texts)
        free = bool(family.trigger) and not calling.required and spec.output_format is None
        return Voice(family, calling.names, free, marks)

    def _make_template_rules(self, job: Job, template: Any) -> Ear:
        prompt = self._tokenizer.decode(job.groups[0].prompt, skip_special_tokens=False)
        tools = [{"type": "function", "function": told(one)} for one in job.command.input.functions]
        return Ear(template, prompt, tools, frozenset(self._special_tokens.values()))


def _unbound(spec: Generate) -> bool:
    """Whether a request leaves it all to the model: to call or not, what, and how often."""
    calling, functions = spec.function_choice, spec.input.functions
    return (
        calling is not None
        and spec.output_format is None
        and not calling.required
        and calling.parallel
        and len(calling.names) == len(functions)
        and not any(one.strict for one in functions)
    )


def _outcome(job: Job, asked: Future[Guide]) -> Refused | None:
    error = asked.exception()
    if error is None:
        job.grammar_state = asked.result()
        return None
    if isinstance(error, Refused):
        return _blamed(error, job)
    _log.error("a grammar could not be compiled", exc_info=error)
    return Refused("failed", f"the local model failed: {type(error).__name__}")


def _blamed(refused: Refused, job: Job) -> Refused:
    return Refused(refused.failure_kind, str(refused), param=_param(job.command))


def _param(spec: Generate) -> str:
    """The field to blame for a grammar."""
    return "tools" if spec.output_format is None else spec.output_format.param


# --- in the step --------------------------------------------------------------------------------


def bar(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Leaves each row of ``logits`` (rows, vocabulary) only what its grammar allows, in place."""
    for line, row in zip(logits, rows, strict=True):
        if row.grammar_state is None:
            continue
        try:
            barred = torch.from_numpy(row.grammar_state.get_forbidden_tokens())
        except Refused as refused:
            row.rejection = _blamed(refused, row.group.request)
        else:
            line.masked_fill_(barred.to(line.device), float("-inf"))


def take(row: Row, token: int) -> bool:
    """Whether this token may come next, by the row's grammar."""
    if row.grammar_state is not None and row.rejection is None:
        try:
            row.grammar_state.accept_token(token)
        except Refused as refused:
            row.rejection = _blamed(refused, row.group.request)
    return row.rejection is None


def stuck(row: Row) -> None:
    """No token may come in any of a search's rows."""
    row.rejection = _blamed(Refused("invalid", NOTHING), row.group.request)
