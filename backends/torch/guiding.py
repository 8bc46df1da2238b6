"""Answers that have a form, and those that may call functions: from the request to the rows."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

import torch

from backends.torch.families import ToolCallFormat, build_function_schema, detect_tool_call_format
from backends.torch.forms import build_calls_grammar, build_format_grammar
from backends.torch.grammar import NO_TOKEN_ALLOWED, GrammarCompiler, GrammarSource, GrammarState
from backends.torch.listening import ResponseTemplateRules, get_response_template
from backends.torch.reading import InputProcessor, RequestRejectedError
from backends.torch.rows import EngineRequest, TokenSequence
from backends.torch.spec import GenerateCommand
from backends.torch.speech import ToolCallRules
from backends.torch.wishes import FunctionChoice

_log = logging.getLogger(__name__)

COMPILE_TIMEOUT: Final = 10.0
"""Seconds that a request waits for its grammar."""
MAX_PENDING_REQUESTS: Final = 256
"""Requests that wait for one."""


class GrammarManager:
    """Readies jobs whose answers have a form; they wait here for their grammars."""

    def __init__(self, tokenizer: Any, reader: InputProcessor, grammars: GrammarCompiler) -> None:
        self._input_processor = reader
        self._compiler = grammars
        added = tokenizer.added_tokens_decoder.items()
        self._special_tokens = {str(token): int(number) for number, token in added if token.special}
        self._tokenizer = tokenizer
        self._response_template = get_response_template(tokenizer)
        self._waiting: dict[EngineRequest, Future[GrammarState]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def start_compilation(self, job: EngineRequest) -> bool:
        """Whether the job has to wait until it is ``settled``. Raises Refused."""
        spec = job.command
        if spec.output_format is None and spec.function_choice is None:
            return False
        if self._response_template is not None and _is_unconstrained(spec):
            job.parser_rules = self._make_template_rules(job, self._response_template)
            return False
        if len(self._waiting) >= MAX_PENDING_REQUESTS:
            raise RequestRejectedError(
                "overloaded", "too many answers with a form are being prepared"
            )
        self._waiting[job] = self._compiler.compile_grammar(self._build_grammar(job))
        return True

    def _build_grammar(self, job: EngineRequest) -> GrammarSource:
        spec, calling = job.command, job.command.function_choice
        if calling is None:
            return () if spec.output_format is None else build_format_grammar(spec.output_format)
        family = detect_tool_call_format(self._input_processor.get_chat_template(spec.input))
        job.parser_rules = self._make_tool_call_rules(family, calling, spec)
        functions = [one for one in spec.input.functions if one.name in calling.names]
        return build_calls_grammar(
            calling, functions, family, self._special_tokens, spec.output_format
        )

    def pop_finished(self, now: float) -> list[tuple[EngineRequest, RequestRejectedError | None]]:
        """The jobs that wait no longer, with what is wrong where something is."""
        found = []
        for job, asked in list(self._waiting.items()):
            if asked.done():
                found.append((job, _get_compile_result(job, asked)))
            elif now - job.arrived_at >= COMPILE_TIMEOUT:
                text = f"the form of the answer could not be prepared within {COMPILE_TIMEOUT:g} s"
                found.append(
                    (
                        job,
                        RequestRejectedError(
                            "unsupported", text, param=_get_grammar_param(job.command)
                        ),
                    )
                )
        for job, _ in found:
            del self._waiting[job]
        return found

    def remove(self, job: EngineRequest) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(job, None)

    def _make_tool_call_rules(
        self, family: ToolCallFormat, calling: FunctionChoice, spec: GenerateCommand
    ) -> ToolCallRules:
        texts = (
            family.format_calls([])
            + family.call_prefix
            + family.name_separator
            + family.call_suffix
        )
        marks = frozenset(number for text, number in self._special_tokens.items() if text in texts)
        free = bool(family.trigger) and not calling.required and spec.output_format is None
        return ToolCallRules(family, calling.names, free, marks)

    def _make_template_rules(self, job: EngineRequest, template: Any) -> ResponseTemplateRules:
        prompt = self._tokenizer.decode(job.groups[0].prompt, skip_special_tokens=False)
        tools = [
            {"type": "function", "function": build_function_schema(one)}
            for one in job.command.input.functions
        ]
        return ResponseTemplateRules(
            template, prompt, tools, frozenset(self._special_tokens.values())
        )


def _is_unconstrained(spec: GenerateCommand) -> bool:
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


def _get_compile_result(
    job: EngineRequest, asked: Future[GrammarState]
) -> RequestRejectedError | None:
    error = asked.exception()
    if error is None:
        job.grammar_state = asked.result()
        return None
    if isinstance(error, RequestRejectedError):
        return _add_param(error, job)
    _log.error("a grammar could not be compiled", exc_info=error)
    return RequestRejectedError("failed", f"the local model failed: {type(error).__name__}")


def _add_param(refused: RequestRejectedError, job: EngineRequest) -> RequestRejectedError:
    return RequestRejectedError(
        refused.failure_kind, str(refused), param=_get_grammar_param(job.command)
    )


def _get_grammar_param(spec: GenerateCommand) -> str:
    """The field to blame for a grammar."""
    return "tools" if spec.output_format is None else spec.output_format.param


# --- in the step --------------------------------------------------------------------------------


def mask_logits(logits: torch.Tensor, rows: Sequence[TokenSequence]) -> None:
    """Leaves each row of ``logits`` (rows, vocabulary) only what its grammar allows, in place."""
    for line, row in zip(logits, rows, strict=True):
        if row.grammar_state is None:
            continue
        try:
            barred = torch.from_numpy(row.grammar_state.get_forbidden_tokens())
        except RequestRejectedError as refused:
            row.rejection = _add_param(refused, row.group.request)
        else:
            line.masked_fill_(barred.to(line.device), float("-inf"))


def accept_token(row: TokenSequence, token: int) -> bool:
    """Whether this token may come next, by the row's grammar."""
    if row.grammar_state is not None and row.rejection is None:
        try:
            row.grammar_state.accept_token(token)
        except RequestRejectedError as refused:
            row.rejection = _add_param(refused, row.group.request)
    return row.rejection is None


def fail_without_tokens(row: TokenSequence) -> None:
    """No token may come in any of a search's rows."""
    row.rejection = _add_param(RequestRejectedError("invalid", NO_TOKEN_ALLOWED), row.group.request)
