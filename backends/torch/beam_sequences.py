"""Beam search over sequences: the beams of a prompt advance together, each with a KV cache.

``beam_search`` decides which beams continue. Here its hypotheses are sequences: a beam that
continues in the slot of another one gets a fork of its text and of its KV cache.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from backends.torch.beam_search import Beam, BeamSearch
from backends.torch.grammar_manager import fail_without_tokens, mask_logits
from backends.torch.ipc import (
    BeamSearchParams,
)
from backends.torch.kv_cache import BLOCK_SIZE
from backends.torch.rejection import RequestRejectedError
from backends.torch.sampling import (
    SampledLogprob,
    apply_penalties,
    apply_watermark,
    get_logprobs,
)
from backends.torch.sequence import (
    EngineRequest,
    SequenceGroup,
    TokenSequence,
)

_PENALTY_RANGES = (("length_penalty", 40.0), ("diversity_penalty", 1e6))
"""Larger values would make scores infinite or NaN."""
AppendToken = Callable[[TokenSequence, int, SampledLogprob | None], bool]
"""Appends a token to a sequence; returns whether the sequence has ended."""


def make_beam_searches(
    beams: BeamSearchParams, end_token_count: int
) -> list[BeamSearch[TokenSequence]]:
    """One search for each group of beams; ``end_token_count``: tokens that end a hypothesis.

    Raises RequestRejectedError.
    """
    for name, limit in _PENALTY_RANGES:
        value = getattr(beams, name)
        if not abs(value) <= limit:
            raise RequestRejectedError(
                "invalid",
                f"{name} is {value}; it must be between {-limit:g} and {limit:g}",
                param=name,
            )
    size = beams.width // beams.groups
    return [
        BeamSearch(size, end_token_count, beams.length_penalty, beams.diversity_penalty)
        for _ in range(beams.groups)
    ]


def compute_max_length(context: int, blocks: int, request: EngineRequest) -> int:
    """The maximum length of a sequence; beams share the KV cache equally."""
    if request.command.beams is None:
        return context
    return min(context, blocks // request.command.beams.width * BLOCK_SIZE)


def select_best_beams(group: SequenceGroup) -> list[TokenSequence]:
    """The best finished beams, best first; repeated if there are fewer than choices."""
    pairs = (pair for search in group.beam_searches for pair in search.finished)
    best = [sequence for _, sequence in sorted(pairs, key=lambda pair: -pair[0])]
    return [best[rank % len(best)].fork() for rank in range(group.request.command.n)]


def step_beams(
    logits: torch.Tensor, sequences: Sequence[TokenSequence], append_token: AppendToken
) -> list[TokenSequence]:
    """Advance each beam of a prompt by one token. Returns the sequences that have ended.

    ``logits`` has a row for each beam. The search scores are the model's log probabilities after
    biases, penalties, grammars and the watermark; temperature and truncation have no effect.
    """
    log_probs = logits.log_softmax(-1)
    scores = log_probs.clone()
    mask_logits(scores, sequences)
    for row_logits, sequence in zip(scores, sequences, strict=True):
        sampling_input = sequence.make_sampling_input()
        apply_penalties(row_logits, sampling_input)
        if (watermark := sampling_input.rules.watermark) is not None:
            apply_watermark(row_logits, watermark, sampling_input.history.tail(watermark.width))
    previous_tokens: list[int] = []
    finished: list[TokenSequence] = []
    for search, slots in _group_by_search(sequences):
        step = _BeamStep([sequences[i] for i in slots], log_probs[slots], append_token)
        length = len(step.sequences[0].output) + 1
        assigned = search.advance(scores[slots], length, step.extend_beam, previous_tokens)
        step.apply_beams(assigned)
        previous_tokens += [beam.hypothesis.output[-1] for beam in assigned]
        if search.is_done:
            finished += step.sequences
        if search.is_done and not search.finished:
            fail_without_tokens(step.sequences[0])
    return finished


def _group_by_search(
    sequences: Sequence[TokenSequence],
) -> Iterator[tuple[BeamSearch[TokenSequence], list[int]]]:
    """The unfinished searches, each with the indices of its sequences."""
    for number, search in enumerate(sequences[0].group.beam_searches):
        if not search.is_done:
            samples = enumerate(sequence.sample for sequence in sequences)
            yield search, [i for i, sample in samples if sample // search.size == number]


class _BeamStep:
    """The sequences of one search in one step, and the model's own log probabilities for each."""

    def __init__(
        self, sequences: list[TokenSequence], log_probs: torch.Tensor, append_token: AppendToken
    ) -> None:
        self.sequences = sequences
        self._log_probs = log_probs
        self._append_token = append_token
        self._top_logprobs = sequences[0].group.request.command.logprobs

    def extend_beam(self, slot: int, token: int) -> tuple[TokenSequence, bool]:
        """See ``BeamSearch.advance``."""
        sequence, logprob = self.sequences[slot].fork(), None
        if self._top_logprobs is not None:
            (logprob,) = get_logprobs(
                self._log_probs[slot : slot + 1], [token], [self._top_logprobs]
            )
        return sequence, self._append_token(sequence, token, logprob)

    def apply_beams(self, assigned: Sequence[Beam[TokenSequence]]) -> None:
        """Assign beams to sequences; a beam from another slot forks that slot's KV cache."""
        for slot, (sequence, beam) in enumerate(zip(self.sequences, assigned, strict=False)):
            if beam.parent != slot:
                sequence.cache.free()
                sequence.cache = self.sequences[beam.parent].cache.fork()
            sequence.continue_from(beam.hypothesis)
