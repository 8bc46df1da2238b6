"""Beam search.

The algorithm is transformers': of each step's candidates, the finished ones among the best ``size``
are collected, up to ``size``, and the best unfinished ones continue. The search ends when no
unfinished beam has a better score, at its current length, than the worst finished one.

Source: transformers 5.23, ``GenerationMixin._beam_search`` with ``early_stopping=False``.
"""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

TextT = TypeVar("TextT")
_LOG_ZERO = float("-inf")


class Beam(NamedTuple, Generic[TextT]):
    """A text that goes on: the sum of its log probabilities, and the slot of its last step."""

    score: float
    parent: int
    text: TextT


class BeamSearch(Generic[TextT]):
    """One search. What a text is, is its user's affair; each that goes on has a slot."""

    def __init__(self, size: int, ends: int, length_penalty: float, diversity: float = 0.0) -> None:
        """``ends`` is how many tokens end a text; ``diversity`` is a penalty: see ``step``."""
        self.size = size
        self._diversity = diversity
        self._candidate_count = max(2, 1 + ends) * size
        self._length_penalty = length_penalty
        # All slots begin with the same text: only one of them may count.
        self._scores = [0.0, *[_LOG_ZERO] * (size - 1)]
        self.finished: list[tuple[float, TextT]] = []
        """The best that ended, with their scores, best first."""
        self.is_done = False

    def advance(
        self,
        log_probs: Tensor,
        length: int,
        grow: Callable[[int, int], tuple[TextT, bool]],
        taken: Sequence[int] = (),
    ) -> list[Beam[TextT]]:
        """What the slots hold next; the first that goes on from a slot stays in it.

        ``log_probs`` is (slots, vocabulary), and ``length`` how many tokens a text has after this
        step. ``grow`` gives a slot's text with one more token, and whether that ends it. Each
        mention of a token in ``taken``, by earlier groups in the same step, makes it less likely.
        """
        if taken:
            counts = torch.bincount(torch.tensor(taken), minlength=log_probs.shape[1])
            log_probs = log_probs - self._diversity * counts.to(log_probs.device)
        running: list[Beam[TextT]] = []
        for rank, (score, parent, token) in enumerate(self._select_candidates(log_probs)):
            text, ended = grow(parent, token)
            if not ended:
                running.append(Beam(score, parent, text))
            elif rank < self.size:
                self.finished.append((score / length**self._length_penalty, text))
            if len(running) == self.size:
                break
        self.finished.sort(key=lambda found: -found[0])
        del self.finished[self.size :]
        best = running[0].score / length**self._length_penalty if running else _LOG_ZERO
        full = len(self.finished) == self.size
        self.is_done = not running or (full and best <= self.finished[-1][0])
        placed = [] if self.is_done else self._assign_slots(running)
        self._scores = [beam.score for beam in placed]
        return placed

    def _select_candidates(self, log_probs: Tensor) -> list[tuple[float, int, int]]:
        """The likeliest continuations: score, slot and token."""
        wide = min(self._candidate_count, log_probs.shape[1])
        values, tokens = log_probs.topk(wide)
        scores = values + torch.tensor(self._scores, device=values.device)[:, None]
        found = scores.flatten().topk(min(self._candidate_count, scores.numel()))
        return [
            (score, at // wide, int(tokens[at // wide, at % wide]))
            for score, at in zip(found.values.tolist(), found.indices.tolist(), strict=True)
            if score > _LOG_ZERO
        ]

    def _assign_slots(self, running: list[Beam[TextT]]) -> list[Beam[TextT]]:
        """By slot. Where there are too few, the first comes again, without a chance of its own."""
        slots: dict[int, Beam[TextT]] = {}
        others: list[Beam[TextT]] = []
        for beam in running:
            if beam.parent in slots:
                others.append(beam)
            else:
                slots[beam.parent] = beam
        others += [running[0]._replace(score=_LOG_ZERO)] * (self.size - len(running))
        return [slots[slot] if slot in slots else others.pop() for slot in range(self.size)]
