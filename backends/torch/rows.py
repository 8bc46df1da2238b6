"""What one request, one prompt and one choice are to the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from backends.torch.forward import Kv
from backends.torch.sampler import Drawn, Past, Rules
from backends.torch.spec import Ended, Generate, Piece, Token
from backends.torch.text import Release, Transcript

Reason = Literal["eos", "stop", "length"]


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

    @property
    def deadline(self) -> float:
        """When it must be over."""
        limit = self.spec.timeout
        return float("inf") if limit is None else self.arrived + limit

    @property
    def samples(self) -> int:
        """How many samples each prompt gets."""
        return max(self.spec.n, self.spec.best_of)

    @property
    def chooses(self) -> bool:
        """Whether it returns only the best of its samples, and so nothing before their end."""
        return self.samples > self.spec.n

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
    kv: Kv = field(default_factory=Kv)
    logits: torch.Tensor | None = None
    """After the prompt's last token."""
    scored: list[Token] = field(default_factory=list)
    started: int = 0
    ended: list["Row"] = field(default_factory=list)

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

    @property
    def choice(self) -> int:
        """The index of its choice in the answer, unless the best are yet to be chosen."""
        return self.group.number * self.group.job.spec.n + self.sample

    def drawn(self) -> Drawn:
        """Its part in the next draw."""
        spec = self.group.job.spec
        early = len(self.output) < spec.ending.min_tokens
        past = Past(self.group.prompt, self.output, self.held if early else ())
        return Drawn(self.group.job.rules, self.seed, past)

    def piece(self, release: Release, choice: int) -> Piece:
        """What is sent of a release."""
        spec = self.group.job.spec
        return Piece(
            spec.job,
            choice,
            release.text,
            len(release.tokens),
            tuple(taken.id for taken in release.tokens) if spec.token_ids else (),
            tuple(taken.detail for taken in release.tokens if taken.detail is not None),
        )

    def end(self, choice: int) -> Ended:
        """How it ended."""
        return Ended(self.group.job.spec.job, choice, self.reason, self.stop)
