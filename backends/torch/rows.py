"""What one request, one prompt and one choice are to the engine."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from backends.torch.beams import Search
from backends.torch.grammar import Guide
from backends.torch.kv import Kv
from backends.torch.listening import Ear, Heard
from backends.torch.reading import Refused
from backends.torch.sampler import Drawn, Past, Rules
from backends.torch.spec import Argued, Called, Ended, Generate, Piece, Thinking, Token
from backends.torch.speech import Argument, Begun, Mused, Said, Speech, Voice
from backends.torch.text import Release, Transcript

Reason = Literal["eos", "stop", "length", "tool_calls"]
Told = Piece | Called | Argued | Thinking | Ended
"""What is sent of a choice."""


@dataclass(slots=True, eq=False)
class Job:
    """One request. Its choices are spread over its prompts' groups."""

    spec: Generate
    rules: Rules
    seed: int
    arrived: float
    groups: list["Group"] = field(default_factory=list)
    credit: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    admitted: float | None = None
    prefilled: float | None = None
    batch: int = 1
    guide: Guide | None = None
    """The beginning of an answer after its form."""
    voice: Voice | Ear | None = None
    """What an answer may call."""

    @property
    def deadline(self) -> float:
        """When it must be over."""
        limit = self.spec.timeout
        return float("inf") if limit is None else self.arrived + limit

    @property
    def samples(self) -> int:
        """How many samples, or beams, each prompt gets."""
        if self.spec.beams is not None:
            return self.spec.beams.width
        return max(self.spec.n, self.spec.best_of)

    @property
    def chooses(self) -> bool:
        """Whether it returns only the best of its samples, and so nothing before their end."""
        return self.samples > self.spec.n or self.spec.beams is not None

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return all(group.done for group in self.groups)


@dataclass(slots=True, eq=False)
class Group:
    """One prompt of a job: read once, however many samples start from it."""

    job: Job
    number: int
    prompt: list[int]
    kv: Kv
    hashes: Sequence[bytes] = ()
    """Of the prompt's whole blocks."""
    arrival: int = 0
    found: int | None = None
    """So many of the prompt's tokens were known when it was first to be read."""
    logits: torch.Tensor | None = None
    """After the prompt's last token."""
    scored: list[Token] = field(default_factory=list)
    started: int = 0
    ended: list["Row"] = field(default_factory=list)
    searches: Sequence[Search["Row"]] = ()
    """Of beams, one for each of their groups."""

    awaited = True
    """Somebody wants to know what comes after its last token."""

    @property
    def group(self) -> "Group":
        """Itself, as a row has one."""
        return self

    @property
    def rank(self) -> tuple[int, ...]:
        """Its place in the order of all."""
        return self.job.spec.priority, self.arrival

    @property
    def past(self) -> list[int]:
        """The tokens whose keys and values it needs."""
        return self.prompt

    @property
    def scores(self) -> bool:
        """Whether log probabilities of the prompt are wanted, so that all of it must be read."""
        return self.job.spec.prompt_logprobs is not None

    @property
    def places(self) -> int:
        """How many must be free for its next sample: beams begin together."""
        return self.job.samples - self.started if self.searches else 1

    @property
    def done(self) -> bool:
        """Whether all its samples have ended."""
        return len(self.ended) >= self.job.samples

    def best(self) -> list["Row"]:
        """The likeliest samples, by the sum of their tokens' log probabilities."""
        ranked = sorted(self.ended, key=lambda row: -row.likelihood)
        return ranked[: self.job.spec.n]


@dataclass(slots=True, eq=False)
class Row:
    """One sample: a choice in the making."""

    group: Group
    sample: int
    seed: int
    kv: Kv
    transcript: Transcript
    limit: int
    """At most so many tokens."""
    held: Sequence[int]
    """What may not come before ``min_tokens``."""
    output: list[int] = field(default_factory=list)
    likelihood: float = 0.0
    reason: Reason = "length"
    stop: str | int | None = None
    kept: list[Release] = field(default_factory=list)
    """What is not sent before the best are known."""
    guide: Guide | None = None
    speech: Speech | Heard | None = None
    shunned: Sequence[int] = ()
    """What may come only where its form allows nothing else."""
    refused: Refused | None = None
    """Why it can't go on, which is why its whole job can't."""

    awaited = False
    scores = False

    @property
    def rank(self) -> tuple[int, ...]:
        """Its place in the order of all."""
        return (*self.group.rank, self.sample)

    @property
    def past(self) -> list[int]:
        """The tokens whose keys and values it needs: the last one's come with the next pass."""
        return self.group.prompt + self.output[:-1]

    def fork(self) -> "Row":
        """The same text, to go on otherwise; it has no past of its own."""
        return replace(
            self,
            output=list(self.output),
            transcript=self.transcript.copy(),
            guide=None if self.guide is None else self.guide.copy(),
            speech=copy.deepcopy(self.speech),
            kept=list(self.kept),
        )

    def become(self, other: "Row") -> None:
        """Go on from another's text."""
        self.output, self.transcript, self.guide = other.output, other.transcript, other.guide

    @property
    def choice(self) -> int:
        """The index of its choice in the answer, unless the best are yet to be chosen."""
        return self.group.number * self.group.job.spec.n + self.sample

    def drawn(self) -> Drawn:
        """Its part in the next draw."""
        spec = self.group.job.spec
        early = len(self.output) < spec.ending.min_tokens
        held = (*self.shunned, *self.held) if early else self.shunned
        past = Past(self.group.prompt, self.output, held)
        return Drawn(self.group.job.rules, self.seed, past)

    def told(self, release: Release, choice: int) -> Iterator[Told]:
        """What is sent of a release: text, and the calls in it."""
        said = [release] if self.speech is None else self.speech.add(release)
        return (self._news(one, choice) for one in said)

    def last(self, choice: int) -> Iterator[Told]:
        """What is sent at the end: what was held back, and how it ended."""
        reason: Reason = self.reason
        if self.speech is not None:
            yield from (self._news(one, choice) for one in self.speech.close())
            reason = "tool_calls" if reason == "eos" and self.speech.calls else reason
        yield Ended(self.group.job.spec.job, choice, reason, self.stop)

    def _news(self, said: Said, choice: int) -> Piece | Called | Argued | Thinking:
        spec = self.group.job.spec
        match said:
            case Begun(call, number, name, tokens):
                return Called(spec.job, choice, call, number, name, tokens)
            case Argument(call, text, tokens):
                return Argued(spec.job, choice, call, text, tokens)
            case Mused(text, tokens):
                return Thinking(spec.job, choice, text, tokens)
            case Release(text, tokens):
                return Piece(
                    spec.job,
                    choice,
                    text,
                    len(tokens),
                    tuple(taken.id for taken in tokens) if spec.token_ids else (),
                    tuple(taken.detail for taken in tokens if taken.detail is not None),
                )
