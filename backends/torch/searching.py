"""Beam search over rows: the beams of a prompt go on together, each in a row of its own."""

from collections.abc import Callable, Iterator, Sequence

import torch

from backends.torch.beams import Beam, BeamSearch
from backends.torch.guiding import fail_without_tokens, mask_logits
from backends.torch.kv import BLOCK_SIZE
from backends.torch.reading import RequestRejectedError
from backends.torch.rows import EngineRequest, SequenceGroup, TokenSequence
from backends.torch.sampler import SampledLogprob, apply_penalties, get_logprobs
from backends.torch.watermark import apply_watermark
from backends.torch.wishes import BeamSearchParams

_PENALTY_RANGES = (("length_penalty", 40.0), ("diversity_penalty", 1e6))
"""Beyond them scores would be no numbers any more."""
AppendToken = Callable[[TokenSequence, int, SampledLogprob | None], bool]
"""Gives a row a token. Whether it was the row's last."""


def make_beam_searches(beams: BeamSearchParams, ends: int) -> list[BeamSearch[TokenSequence]]:
    """One for each group. ``ends`` is how many tokens end a text. Raises Refused."""
    for name, most in _PENALTY_RANGES:
        value = getattr(beams, name)
        if not abs(value) <= most:
            raise RequestRejectedError(
                "invalid", f"{name} is {value}; {-most:g} to {most:g}", param=name
            )
    rules = (beams.width // beams.groups, ends, beams.length_penalty, beams.diversity_penalty)
    return [BeamSearch(*rules) for _ in range(beams.groups)]


def compute_max_length(context: int, blocks: int, job: EngineRequest) -> int:
    """How many tokens a row may have; all beams together need their share of the memory."""
    if job.command.beams is None:
        return context
    return min(context, blocks // job.command.beams.width * BLOCK_SIZE)


def select_best_beams(group: SequenceGroup) -> list[TokenSequence]:
    """What was found, best first. Where there are fewer texts than choices they come again."""
    pairs = (pair for search in group.beam_searches for pair in search.finished)
    found = [row for _, row in sorted(pairs, key=lambda pair: -pair[0])]
    return [found[rank % len(found)].fork() for rank in range(group.request.command.n)]


def step_beams(
    logits: torch.Tensor, rows: Sequence[TokenSequence], extend: AppendToken
) -> list[TokenSequence]:
    """One token for each beam of a prompt, by its line of ``logits``. Returns the rows that ended.

    The search goes by what biases, penalties, forms and the watermark make of the model's log
    probabilities; temperature and truncations are of no concern to it.
    """
    own = logits.log_softmax(-1)
    steered = own.clone()
    mask_logits(steered, rows)
    for line, row in zip(steered, rows, strict=True):
        drawn = row.make_sampling_input()
        apply_penalties(line, drawn)
        if drawn.rules.watermark is not None:
            apply_watermark(
                line, drawn.rules.watermark, drawn.history.tail(drawn.rules.watermark.width)
            )
    taken: list[int] = []
    ended: list[TokenSequence] = []
    for search, slots in _group_by_search(rows):
        beams = _BeamStep([rows[at] for at in slots], own[slots], extend)
        length = len(beams.rows[0].output) + 1
        placed = search.advance(steered[slots], length, beams.grow_beam, taken)
        beams.apply_beams(placed)
        taken += [beam.text.output[-1] for beam in placed]
        if search.is_done:
            ended += beams.rows
        if search.is_done and not search.finished:
            fail_without_tokens(beams.rows[0])
    return ended


def _group_by_search(
    rows: Sequence[TokenSequence],
) -> Iterator[tuple[BeamSearch[TokenSequence], list[int]]]:
    """The searches that go on, and where their rows stand."""
    for number, search in enumerate(rows[0].group.beam_searches):
        if not search.is_done:
            yield search, [at for at, row in enumerate(rows) if row.sample // search.size == number]


class _BeamStep:
    """The rows of one search in one step, and the model's own ``log_probs`` for each."""

    def __init__(
        self, rows: list[TokenSequence], log_probs: torch.Tensor, extend: AppendToken
    ) -> None:
        self.rows = rows
        self._log_probs = log_probs
        self._append_token = extend
        self._top_logprobs = rows[0].group.request.command.logprobs

    def grow_beam(self, slot: int, token: int) -> tuple[TokenSequence, bool]:
        """See ``Search.step``."""
        row, likely = self.rows[slot].fork(), None
        if self._top_logprobs is not None:
            (likely,) = get_logprobs(
                self._log_probs[slot : slot + 1], [token], [self._top_logprobs]
            )
        return row, self._append_token(row, token, likely)

    def apply_beams(self, placed: Sequence[Beam[TokenSequence]]) -> None:
        """Give each row its beam. Whose beam comes from elsewhere takes over its past, too."""
        for slot, (row, beam) in enumerate(zip(self.rows, placed, strict=False)):
            if beam.parent != slot:
                row.cache.free()
                row.cache = self.rows[beam.parent].cache.fork()
            row.take_over(beam.text)
