"""The engine's state of one request, one prompt and one choice."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from backends.torch.beam_search import BeamSearch
from backends.torch.detokenizer import OutputText, ReadyText
from backends.torch.grammar_compiler import GrammarState
from backends.torch.ipc import (
    ChoiceEndEvent,
    EngineToken,
    GenerateCommand,
    ReasoningEvent,
    TextEvent,
    ToolArgumentsEvent,
    ToolCallEvent,
)
from backends.torch.kv_cache import SequenceCache
from backends.torch.output_formats import OutputParser, OutputRules
from backends.torch.parsed_output import (
    ParsedCallArguments,
    ParsedCallStart,
    ParsedOutput,
    ParsedReasoning,
)
from backends.torch.prompt_lookup import PromptLookup
from backends.torch.rejection import RequestRejectedError
from backends.torch.response_template import ResponseTemplateParser, ResponseTemplateRules
from backends.torch.sampling import SamplingInput, SamplingRules, TokenHistory

StopReason = Literal["eos", "stop", "length", "tool_calls"]
ChoiceEvent = TextEvent | ToolCallEvent | ToolArgumentsEvent | ReasoningEvent | ChoiceEndEvent
"""The events of a choice."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request, with one group of sequences for each prompt."""

    command: GenerateCommand
    sampling_rules: SamplingRules
    seed: int
    arrived_at: float
    groups: list["SequenceGroup"] = field(default_factory=list)
    credit: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    admitted_at: float | None = None
    prefilled_at: float | None = None
    max_batch: int = 1
    grammar_state: GrammarState | None = None
    """The initial state of the output's grammar."""
    parser_rules: ResponseTemplateRules | OutputRules | None = None
    """How tool calls are parsed from the output."""

    @property
    def parses_reasoning(self) -> bool:
        """Whether reasoning is separated from the answer."""
        rules = self.parser_rules
        return isinstance(rules, OutputRules) and rules.reasoning is not None

    @property
    def deadline(self) -> float:
        """The deadline, by the engine's clock."""
        limit = self.command.timeout
        return float("inf") if limit is None else self.arrived_at + limit

    @property
    def sample_count(self) -> int:
        """Samples or beams per prompt."""
        if self.command.beams is not None:
            return self.command.beams.width
        return max(self.command.n, self.command.best_of)

    @property
    def returns_best_only(self) -> bool:
        """Whether only the best samples are returned, which is after all have ended."""
        return self.sample_count > self.command.n or self.command.beams is not None

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return all(group.is_done for group in self.groups)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One prompt of a request: its prefill is shared by all samples."""

    request: EngineRequest
    number: int
    prompt: list[int]
    cache: SequenceCache
    block_hashes: Sequence[bytes] = ()
    """Hashes of the prompt's full blocks."""
    arrival: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at the first prefill."""
    logits: torch.Tensor | None = None
    """The logits after the prompt's last token."""
    prompt_logprobs: list[EngineToken] = field(default_factory=list)
    samples_started: int = 0
    finished: list["TokenSequence"] = field(default_factory=list)
    beam_searches: Sequence[BeamSearch["TokenSequence"]] = ()
    """One for each group of beams."""

    needs_logits = True
    """The logits after its last token are needed."""

    @property
    def group(self) -> "SequenceGroup":
        """Itself, so that it has the interface of a TokenSequence."""
        return self

    @property
    def rank(self) -> tuple[int, ...]:
        """The sort key in scheduling order."""
        return self.request.command.priority, self.arrival

    @property
    def context_tokens(self) -> list[int]:
        """The tokens whose keys and values are needed."""
        return self.prompt

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt logprobs are requested, so that the prefix cache can't be used."""
        return self.request.command.prompt_logprobs is not None

    @property
    def slots_needed(self) -> int:
        """Free slots needed for its next sample: beams start together."""
        return self.request.sample_count - self.samples_started if self.beam_searches else 1

    @property
    def is_done(self) -> bool:
        """Whether all its samples have ended."""
        return len(self.finished) >= self.request.sample_count

    def select_best(self) -> list["TokenSequence"]:
        """The likeliest samples, by the sum of their tokens' log probabilities."""
        ranked = sorted(self.finished, key=lambda sequence: -sequence.cumulative_logprob)
        return ranked[: self.request.command.n]


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One sample: a choice being generated."""

    group: SequenceGroup
    sample: int
    seed: int
    cache: SequenceCache
    output_text: OutputText
    max_tokens: int
    """The limit of generated tokens."""
    min_length_forbidden: Sequence[int]
    """Tokens forbidden before ``min_tokens``."""
    output: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    reason: StopReason = "length"
    stop: str | int | None = None
    withheld_text: list[ReadyText] = field(default_factory=list)
    """Text withheld until the best samples are known."""
    grammar_state: GrammarState | None = None
    output_parser: ResponseTemplateParser | OutputParser | None = None
    discouraged_tokens: Sequence[int] = ()
    """Tokens allowed only if the grammar permits no other."""
    rejection: RequestRejectedError | None = None
    """Why the sequence, and so its request, can't continue."""
    prompt_lookup: PromptLookup | None = None
    """Drafts of the next tokens; None for beams."""

    needs_logits = False
    scores_prompt = False

    @property
    def rank(self) -> tuple[int, ...]:
        """The sort key in scheduling order."""
        return (*self.group.rank, self.sample)

    @property
    def context_tokens(self) -> list[int]:
        """The tokens whose keys and values are needed: all but the last."""
        return self.group.prompt + self.output[:-1]

    def draft_tokens(self, limit: int) -> list[int]:
        """At most ``limit`` likely next tokens, within its memory, its length and its credit."""
        if self.prompt_lookup is None:
            return []
        most = min(
            limit,
            self.cache.count_free_slots() - 1,
            self.max_tokens - len(self.output) - 1,
            self.group.request.credit - 1,
        )
        return self.prompt_lookup.draft(self.output, most)

    def finish_draft(self, drafted: int, accepted: int) -> None:
        """Adapt further drafts, and forget the keys and values of wrong tokens."""
        if self.prompt_lookup is not None:
            self.prompt_lookup.record_result(drafted, accepted)
        self.cache.truncate(len(self.group.prompt) + len(self.output) - 1)

    def fork(self) -> "TokenSequence":
        """A copy that continues separately; it has no KV cache of its own."""
        return replace(
            self,
            output=list(self.output),
            output_text=self.output_text.copy(),
            grammar_state=None if self.grammar_state is None else self.grammar_state.copy(),
            output_parser=copy.deepcopy(self.output_parser),
            withheld_text=list(self.withheld_text),
        )

    def continue_from(self, other: "TokenSequence") -> None:
        """Take another sequence's tokens, text and grammar state."""
        self.output, self.output_text, self.grammar_state = (
            other.output,
            other.output_text,
            other.grammar_state,
        )

    @property
    def choice_index(self) -> int:
        """The index of the choice, unless the best samples are selected later."""
        return self.group.number * self.group.request.command.n + self.sample

    def make_sampling_input(self) -> SamplingInput:
        """The input of the next sampling step."""
        command = self.group.request.command
        is_below_minimum = len(self.output) < command.stopping.min_tokens
        forbidden = (
            (*self.discouraged_tokens, *self.min_length_forbidden)
            if is_below_minimum
            else self.discouraged_tokens
        )
        history = TokenHistory(self.group.prompt, self.output, forbidden)
        return SamplingInput(self.group.request.sampling_rules, self.seed, history)

    def map_text(self, ready: ReadyText, choice: int) -> Iterator[ChoiceEvent]:
        """The events of released text, with tool calls parsed."""
        outputs = [ready] if self.output_parser is None else self.output_parser.feed(ready)
        return (self._map_output(output, choice) for output in outputs)

    def map_end(self, choice: int) -> Iterator[ChoiceEvent]:
        """The final events: held back output and the end of the choice."""
        reason: StopReason = self.reason
        if self.output_parser is not None:
            rest = self.output_parser.close(is_cut=reason != "eos")
            yield from (self._map_output(output, choice) for output in rest)
            if self.output_parser.calls and not self.output_parser.is_in_call:
                reason = "tool_calls" if reason in ("eos", "stop") else reason
        yield ChoiceEndEvent(self.group.request.command.request_id, choice, reason, self.stop)

    def _map_output(
        self, output: ParsedOutput, choice: int
    ) -> TextEvent | ToolCallEvent | ToolArgumentsEvent | ReasoningEvent:
        command = self.group.request.command
        match output:
            case ParsedCallStart(call, number, name, tokens):
                return ToolCallEvent(command.request_id, choice, call, number, name, tokens)
            case ParsedCallArguments(call, text, tokens):
                return ToolArgumentsEvent(command.request_id, choice, call, text, tokens)
            case ParsedReasoning(text, tokens):
                self.group.request.reasoning_tokens += tokens
                return ReasoningEvent(command.request_id, choice, text, tokens)
            case ReadyText(text, tokens):
                return TextEvent(
                    command.request_id,
                    choice,
                    text,
                    len(tokens),
                    tuple(token.id for token in tokens) if command.token_ids else (),
                    tuple(token.logprob for token in tokens if token.logprob is not None),
                )
