"""The grammars of requests: compiled while the requests wait, then applied to their logits.

A request with structured output or tool calls waits outside the scheduler until its grammar is
compiled, so that no step of the engine waits. From then on each of its sequences has a copy of the
grammar's state: ``mask_logits`` forbids tokens before one is selected, and ``accept_token``
advances the state by the selected one.

What must never happen:

- An error of one grammar that ends another request: it is stored in the sequence that it is of.
- A request that waits forever: after ``COMPILE_TIMEOUT`` seconds it is rejected.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

import msgspec
import torch

from backends.torch.call_formats import CallFormat, decode_parameters
from backends.torch.grammar_compiler import NO_CANDIDATES_ERROR, GrammarCompiler, GrammarState
from backends.torch.grammar_source import GrammarSource
from backends.torch.ipc import (
    GenerateCommand,
)
from backends.torch.output_formats import OutputRules, detect_reasoning_mark
from backends.torch.output_grammar import OutputConstraint, build_output_grammar
from backends.torch.rejection import RequestRejectedError
from backends.torch.response_template import ResponseTemplateRules, get_response_template
from backends.torch.sequence import (
    EngineRequest,
    TokenSequence,
)
from backends.torch.tokenization import InputProcessor
from backends.torch.tool_calls import build_function_schema

_log = logging.getLogger(__name__)

COMPILE_TIMEOUT: Final = 10.0
"""Seconds that a request waits for its grammar to compile."""
MAX_PENDING_REQUESTS: Final = 256
"""Maximum number of requests that wait for a grammar."""
_PROMPT_TAIL: Final = 64
"""Tokens at the end of the prompt that may contain the start of reasoning."""


class GrammarManager:
    """Holds requests with structured output or tool calls until their grammars are compiled."""

    def __init__(
        self, tokenizer: Any, input_processor: InputProcessor, compiler: GrammarCompiler
    ) -> None:
        self._input_processor = input_processor
        self._compiler = compiler
        added = tokenizer.added_tokens_decoder.items()
        self._special_tokens = {str(token): int(number) for number, token in added if token.special}
        self._tokenizer = tokenizer
        self._response_template = get_response_template(tokenizer)
        self._waiting: dict[EngineRequest, Future[GrammarState]] = {}

    def __repr__(self) -> str:
        return f"<GrammarManager {len(self._waiting)} requests waiting>"

    def __len__(self) -> int:
        return len(self._waiting)

    def start_compilation(self, request: EngineRequest) -> bool:
        """Whether the request must wait for its grammar. Raises RequestRejectedError."""
        command = request.command
        calls = self._find_call_format(command)
        if command.output_format is None and command.function_choice is None:
            if command.input.turns:
                request.parser_rules = self._make_output_rules(request, None)
            return False
        if self._parses_by_template(command):
            request.parser_rules = self._make_template_rules(request, self._response_template)
            return False
        if _is_unconstrained(command) and not (calls and calls.constrains_free_choice):
            request.parser_rules = self._make_output_rules(request, calls)
            return False
        if len(self._waiting) >= MAX_PENDING_REQUESTS:
            raise RequestRejectedError(
                "overloaded", "too many requests with structured output are being prepared"
            )
        grammar = self._build_grammar(request, calls)
        self._waiting[request] = self._compiler.compile_grammar(grammar)
        return True

    def _build_grammar(self, request: EngineRequest, calls: CallFormat | None) -> GrammarSource:
        """The grammar of the output; it sets the rules of its parser."""
        command, choice = request.command, request.command.function_choice
        names = () if choice is None else choice.names
        functions = tuple(one for one in command.input.functions if one.name in names)
        rules = self._make_output_rules(request, calls)
        if rules is not None:
            request.parser_rules = msgspec.structs.replace(
                rules,
                schemas={one.name: decode_parameters(one) for one in functions},
                is_enforced=True,
                is_either=choice is not None
                and (choice.required or command.output_format is not None),
            )
        constraint = OutputConstraint(
            command.output_format,
            choice,
            functions,
            calls,
            None if rules is None else rules.reasoning,
            rules is not None and rules.is_open,
        )
        return build_output_grammar(constraint, self._special_tokens)

    def pop_finished(self, now: float) -> list[tuple[EngineRequest, RequestRejectedError | None]]:
        """The requests that no longer wait, each with its error, if any."""
        finished = []
        for request, future in list(self._waiting.items()):
            if future.done():
                finished.append((request, _get_compile_result(request, future)))
            elif now - request.arrived_at >= COMPILE_TIMEOUT:
                message = f"the output format could not be compiled within {COMPILE_TIMEOUT:g} s"
                param = _get_grammar_param(request.command)
                finished.append(
                    (request, RequestRejectedError("unsupported", message, param=param))
                )
        for request, _ in finished:
            del self._waiting[request]
        return finished

    def remove(self, request: EngineRequest) -> None:
        """Remove a request that has been cancelled."""
        self._waiting.pop(request, None)

    def _find_call_format(self, command: GenerateCommand) -> CallFormat | None:
        """The format of calls in the output; None if no function may be called.

        Raises RequestRejectedError if the format is not known.
        """
        if command.function_choice is None:
            return None
        template = self._input_processor.get_chat_template(command.input)
        features = self._input_processor.get_features(template)
        if features.call_format is not None or self._parses_by_template(command):
            return features.call_format
        if not (self._input_processor.serves_unknown_calls and _is_unconstrained(command)):
            raise RequestRejectedError(
                "unsupported",
                f"tool calls of this model are not understood: {features.problem}; "
                "tool_choice must be none",
                param="tools",
            )
        return None

    def _parses_by_template(self, command: GenerateCommand) -> bool:
        """Whether the tokenizer's response template parses the output."""
        return self._response_template is not None and _is_unconstrained(command)

    def _make_output_rules(
        self, request: EngineRequest, calls: CallFormat | None
    ) -> OutputRules | None:
        """How the output is parsed; None if it has no reasoning and no calls."""
        prompt_input = request.command.input
        reasoning = None
        if prompt_input.turns and not prompt_input.continue_final:
            reasoning = detect_reasoning_mark(self._input_processor.get_chat_template(prompt_input))
        if reasoning is None and calls is None:
            return None
        marks = "\0".join(one.texts for one in (reasoning, calls) if one is not None)
        markers = {number for text, number in self._special_tokens.items() if text in marks}
        schemas = {one.name: decode_parameters(one) for one in prompt_input.functions}
        tail = self._tokenizer.decode(
            request.groups[0].prompt[-_PROMPT_TAIL:], skip_special_tokens=False
        )
        is_open = reasoning is not None and tail.rstrip().endswith(reasoning.opening.rstrip())
        return OutputRules(reasoning, calls, schemas, is_open, frozenset(markers))

    def _make_template_rules(self, request: EngineRequest, template: Any) -> ResponseTemplateRules:
        prompt = self._tokenizer.decode(request.groups[0].prompt, skip_special_tokens=False)
        tools = [
            {"type": "function", "function": build_function_schema(function)}
            for function in request.command.input.functions
        ]
        return ResponseTemplateRules(
            template, prompt, tools, frozenset(self._special_tokens.values())
        )


def _is_unconstrained(command: GenerateCommand) -> bool:
    """Whether the model may freely choose whether, which and how many functions it calls."""
    function_choice, functions = command.function_choice, command.input.functions
    return (
        function_choice is not None
        and command.output_format is None
        and not function_choice.required
        and function_choice.parallel
        and len(function_choice.names) == len(functions)
        and not any(function.strict for function in functions)
    )


def _get_compile_result(
    request: EngineRequest, future: Future[GrammarState]
) -> RequestRejectedError | None:
    error = future.exception()
    if error is None:
        request.grammar_state = future.result()
        return None
    if isinstance(error, RequestRejectedError):
        return _add_param(error, request)
    _log.error("a grammar could not be compiled", exc_info=error)
    return RequestRejectedError("failed", f"the local model failed: {type(error).__name__}")


def _add_param(error: RequestRejectedError, request: EngineRequest) -> RequestRejectedError:
    return RequestRejectedError(
        error.failure_kind, str(error), param=_get_grammar_param(request.command)
    )


def _get_grammar_param(command: GenerateCommand) -> str:
    """The request field that the grammar comes from."""
    return "tools" if command.output_format is None else command.output_format.param


def mask_logits(logits: torch.Tensor, sequences: Sequence[TokenSequence]) -> None:
    """Mask the tokens that the grammars forbid, in place on ``logits`` (sequences, vocabulary)."""
    for row_logits, sequence in zip(logits, sequences, strict=True):
        if sequence.grammar_state is None:
            continue
        try:
            forbidden = torch.from_numpy(sequence.grammar_state.get_forbidden_tokens())
        except RequestRejectedError as error:
            sequence.rejection = _add_param(error, sequence.group.request)
        else:
            row_logits.masked_fill_(forbidden.to(row_logits.device), float("-inf"))


def accept_token(sequence: TokenSequence, token: int) -> bool:
    """Advance the sequence's grammar by a token; False if it is not allowed."""
    if sequence.grammar_state is not None and sequence.rejection is None:
        try:
            sequence.grammar_state.accept_token(token)
        except RequestRejectedError as error:
            sequence.rejection = _add_param(error, sequence.group.request)
    return sequence.rejection is None


def fail_without_tokens(sequence: TokenSequence) -> None:
    """Reject the request: no token is allowed for any beam of a search."""
    error = RequestRejectedError("invalid", NO_CANDIDATES_ERROR)
    sequence.rejection = _add_param(error, sequence.group.request)
