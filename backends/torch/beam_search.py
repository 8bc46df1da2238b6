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

HypothesisT = TypeVar("HypothesisT")
_LOG_ZERO = float("-inf")


class Beam(NamedTuple, Generic[HypothesisT]):
    """An unfinished hypothesis: the sum of its log probabilities, and the slot that it extends."""

    score: float
    parent: int
    hypothesis: HypothesisT


class BeamSearch(Generic[HypothesisT]):
    """One beam search. Each unfinished hypothesis has a slot; the caller chooses its type."""

    def __init__(
        self, size: int, end_token_count: int, length_penalty: float, diversity: float = 0.0
    ) -> None:
        """``end_token_count``: tokens that end a hypothesis; ``diversity``: see advance."""
        self.size = size
        self._diversity = diversity
        self._candidate_count = max(2, 1 + end_token_count) * size
        self._length_penalty = length_penalty
        # All slots start with the same hypothesis, so only one of them may be extended.
        self._scores = [0.0, *[_LOG_ZERO] * (size - 1)]
        self.finished: list[tuple[float, HypothesisT]] = []
        """The best finished hypotheses with their scores, best first."""
        self.is_done = False

    def advance(
        self,
        log_probs: Tensor,
        length: int,
        extend: Callable[[int, int], tuple[HypothesisT, bool]],
        previous_tokens: Sequence[int] = (),
    ) -> list[Beam[HypothesisT]]:
        """The beams of the slots after this step; the best extension of a slot stays in it.

        ``log_probs`` has shape (slots, vocabulary); ``length`` is the number of generated tokens
        after this step. ``extend`` returns a slot's hypothesis with one more token, and whether
        that finishes it. Each occurrence of a token in ``previous_tokens``, which earlier groups
        selected in the same step, lowers its log probability by the diversity penalty.
        """
        if previous_tokens:
            counts = torch.bincount(torch.tensor(previous_tokens), minlength=log_probs.shape[1])
            log_probs = log_probs - self._diversity * counts.to(log_probs.device)
        running: list[Beam[HypothesisT]] = []
        for rank, (score, parent, token) in enumerate(self._select_candidates(log_probs)):
            hypothesis, is_finished = extend(parent, token)
            if not is_finished:
                running.append(Beam(score, parent, hypothesis))
            elif rank < self.size:
                self.finished.append((score / length**self._length_penalty, hypothesis))
            if len(running) == self.size:
                break
        self.finished.sort(key=lambda pair: -pair[0])
        del self.finished[self.size :]
        best = running[0].score / length**self._length_penalty if running else _LOG_ZERO
        is_full = len(self.finished) == self.size
        self.is_done = not running or (is_full and best <= self.finished[-1][0])
        assigned = [] if self.is_done else self._assign_slots(running)
        self._scores = [beam.score for beam in assigned]
        return assigned

    def _select_candidates(self, log_probs: Tensor) -> list[tuple[float, int, int]]:
        """The best candidates: score, slot and token."""
        width = min(self._candidate_count, log_probs.shape[1])
        values, tokens = log_probs.topk(width)
        scores = values + torch.tensor(self._scores, device=values.device)[:, None]
        best = scores.flatten().topk(min(self._candidate_count, scores.numel()))
        return [
            (score, index // width, int(tokens[index // width, index % width]))
            for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            if score > _LOG_ZERO
        ]

    def _assign_slots(self, running: list[Beam[HypothesisT]]) -> list[Beam[HypothesisT]]:
        """The beams by slot. Missing ones are copies of the first with a score of -inf."""
        slots: dict[int, Beam[HypothesisT]] = {}
        unassigned: list[Beam[HypothesisT]] = []
        for beam in running:
            if beam.parent in slots:
                unassigned.append(beam)
            else:
                slots[beam.parent] = beam
        unassigned += [running[0]._replace(score=_LOG_ZERO)] * (self.size - len(running))
        return [slots[slot] if slot in slots else unassigned.pop() for slot in range(self.size)]
