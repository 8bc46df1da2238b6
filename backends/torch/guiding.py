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
        self._reader = reader
        self._grammars = grammars
        added = tokenizer.added_tokens_decoder.items()
        self._special = {str(token): int(number) for number, token in added if token.special}
        self._tokenizer = tokenizer
        self._template = template_of(tokenizer)
        self._waiting: dict[Job, Future[Guide]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def holds(self, job: Job) -> bool:
        """Whether the job has to wait until it is ``settled``. Raises Refused."""
        spec = job.spec
        if spec.form is None and spec.calling is None:
            return False
        if self._template is not None and _unbound(spec):
            job.voice = self._ear(job, self._template)
            return False
        if len(self._waiting) >= MOST:
            raise Refused("overloaded", "too many answers with a form are being prepared")
        self._waiting[job] = self._grammars.ask(self._source(job))
        return True

    def _source(self, job: Job) -> Source:
        spec, calling = job.spec, job.spec.calling
        if calling is None:
            return () if spec.form is None else of_form(spec.form)
        family = family_of(self._reader.template(spec.input))
        job.voice = self._voice(family, calling, spec)
        functions = [one for one in spec.input.functions if one.name in calling.names]
        return of_calls(calling, functions, family, self._special, spec.form)

    def settled(self, now: float) -> list[tuple[Job, Refused | None]]:
        """The jobs that wait no longer, with what is wrong where something is."""
        found = []
        for job, asked in list(self._waiting.items()):
            if asked.done():
                found.append((job, _outcome(job, asked)))
            elif now - job.arrived >= PATIENCE:
                text = f"the form of the answer could not be prepared within {PATIENCE:g} s"
                found.append((job, Refused("unsupported", text, param=_param(job.spec))))
        for job, _ in found:
            del self._waiting[job]
        return found

    def remove(self, job: Job) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(job, None)

    def _voice(self, family: Family, calling: Calling, spec: Generate) -> Voice:
        texts = family.written([]) + family.opens + family.middle + family.closes
        marks = frozenset(number for text, number in self._special.items() if text in texts)
        free = bool(family.mark) and not calling.required and spec.form is None
        return Voice(family, calling.names, free, marks)

    def _ear(self, job: Job, template: Any) -> Ear:
        prompt = self._tokenizer.decode(job.groups[0].prompt, skip_special_tokens=False)
        tools = [{"type": "function", "function": told(one)} for one in job.spec.input.functions]
        return Ear(template, prompt, tools, frozenset(self._special.values()))


def _unbound(spec: Generate) -> bool:
    """Whether a request leaves it all to the model: to call or not, what, and how often."""
    calling, functions = spec.calling, spec.input.functions
    return (
        calling is not None
        and spec.form is None
        and not calling.required
        and calling.several
        and len(calling.names) == len(functions)
        and not any(one.strict for one in functions)
    )


def _outcome(job: Job, asked: Future[Guide]) -> Refused | None:
    error = asked.exception()
    if error is None:
        job.guide = asked.result()
        return None
    if isinstance(error, Refused):
        return _blamed(error, job)
    _log.error("a grammar could not be compiled", exc_info=error)
    return Refused("failed", f"the local model failed: {type(error).__name__}")


def _blamed(refused: Refused, job: Job) -> Refused:
    return Refused(refused.kind, str(refused), param=_param(job.spec))


def _param(spec: Generate) -> str:
    """The field to blame for a grammar."""
    return "tools" if spec.form is None else spec.form.param


# --- in the step --------------------------------------------------------------------------------


def bar(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Leaves each row of ``logits`` (rows, vocabulary) only what its grammar allows, in place."""
    for line, row in zip(logits, rows, strict=True):
        if row.guide is None:
            continue
        try:
            barred = torch.from_numpy(row.guide.barred())
        except Refused as refused:
            row.refused = _blamed(refused, row.group.job)
        else:
            line.masked_fill_(barred.to(line.device), float("-inf"))


def take(row: Row, token: int) -> bool:
    """Whether this token may come next, by the row's grammar."""
    if row.guide is not None and row.refused is None:
        try:
            row.guide.take(token)
        except Refused as refused:
            row.refused = _blamed(refused, row.group.job)
    return row.refused is None


def stuck(row: Row) -> None:
    """No token may come in any of a search's rows."""
    row.refused = _blamed(Refused("invalid", NOTHING), row.group.job)
