"""Beam search, compared with transformers' and with a simple reference."""

from typing import Any

import pytest
import torch

from backends.torch.beam_search import BeamSearch

V = 259
EOS = 256
STEPS = 12


@torch.inference_mode()
def compute_logprobs(model: Any, prompt: list[int], texts: list[list[int]]) -> torch.Tensor:
    """Return log probabilities of the next token of each text: (texts, vocabulary)."""
    ids = torch.tensor([prompt + text for text in texts])
    logits: torch.Tensor = model(ids).logits[:, -1]
    return logits.log_softmax(-1)


def run_search(
    model: Any, prompt: list[int], width: int, ends: set[int], penalty: float
) -> list[tuple[float, list[int]]]:
    """Return all texts that the search finds in at most STEPS tokens."""
    texts: list[list[int]] = [[] for _ in range(width)]
    search: BeamSearch[list[int]] = BeamSearch(width, len(ends), penalty)

    def grow(slot: int, token: int) -> tuple[list[int], bool]:
        text = [*texts[slot], token]
        return text, token in ends or len(text) == STEPS

    for length in range(1, STEPS + 1):
        placed = search.advance(compute_logprobs(model, prompt, texts), length, grow)
        if search.is_done:
            break
        texts = [beam.hypothesis for beam in placed]
    assert search.is_done
    return search.finished


@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0, 2.5])
@pytest.mark.parametrize("ends", [(), (EOS,), (EOS, 97, 110)])
@pytest.mark.parametrize("width", [2, 5])
def test_beam_search_matches_transformers(
    reference: Any, tokenizer: Any, width: int, ends: tuple[int, ...], penalty: float
) -> None:
    for text in ("Hello", "a", "what comes next?"):
        prompt = tokenizer.encode(text)
        with torch.inference_mode():
            theirs = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=STEPS,
                num_beams=width,
                num_return_sequences=width,
                length_penalty=penalty,
                do_sample=False,
                eos_token_id=list(ends) or None,
                pad_token_id=V - 1,
                return_dict_in_generate=True,
                output_scores=True,
            )
        mine = run_search(reference, prompt, width, set(ends), penalty)
        for (score, tokens), line, wanted in zip(
            mine, theirs.sequences.tolist(), theirs.sequences_scores.tolist(), strict=True
        ):
            assert line[len(prompt) :][: len(tokens)] == tokens
            assert set(line[len(prompt) + len(tokens) :]) <= {V - 1}
            assert score == pytest.approx(wanted, rel=1e-4)


def test_first_continuation_of_a_beam_keeps_its_slot() -> None:
    search: BeamSearch[tuple[int, int]] = BeamSearch(3, 1, 1.0)
    first = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(3, 4)
    placed = search.advance(first, 1, lambda slot, token: ((slot, token), False))

    assert sorted(beam.hypothesis for beam in placed) == [(0, 0), (0, 1), (0, 2)]
    assert placed[0].hypothesis == (0, 0)

    lines = torch.tensor([[0.1, 0.1, 0.1, 0.7], [0.9, 0.1, 0, 0], [0.6, 0.4, 0, 0]]).log()
    slots = {beam.hypothesis[1]: slot for slot, beam in enumerate(placed)}
    placed = search.advance(
        lines[[placed[s].hypothesis[1] for s in range(3)]], 2, lambda s, t: ((s, t), False)
    )

    # 0.5 x 0.7, 0.3 x 0.9 and 0.15 x 0.6: each has its own child.
    assert [beam.parent for beam in placed] == [0, 1, 2]
    assert {beam.hypothesis for beam in placed} == {(slots[0], 3), (slots[1], 0), (slots[2], 0)}


def test_beams_repeat_after_a_forced_token_and_diverge_later() -> None:
    """After a forced beginning the beams are equal, until there is a choice again."""
    search: BeamSearch[tuple[int, ...]] = BeamSearch(3, 1, 1.0)
    texts: list[tuple[int, ...]] = [(), (), ()]

    def grow(slot: int, token: int) -> tuple[tuple[int, ...], bool]:
        return (*texts[slot], token), False

    forced = torch.full((3, 4), float("-inf"))
    forced[:, 2] = 0.0
    texts = [beam.hypothesis for beam in search.advance(forced, 1, grow)]

    assert texts == [(2,)] * 3

    free = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(3, 4)
    texts = [beam.hypothesis for beam in search.advance(free, 2, grow)]
    assert sorted(texts) == [(2, 0), (2, 1), (2, 2)]


def test_finished_beam_outside_the_width_is_dropped() -> None:
    search: BeamSearch[int] = BeamSearch(1, 1, 1.0)
    line = torch.tensor([[0.6, 0.4]]).log()

    (beam,) = search.advance(line, 1, lambda _, token: (token, token == 1))

    assert (beam.hypothesis, search.finished, search.is_done) == (0, [], False)


def test_diversity_penalizes_tokens_of_earlier_groups() -> None:
    def run_search(taken: list[int]) -> list[int]:
        search: BeamSearch[int] = BeamSearch(2, 1, 1.0, diversity=0.5)
        line = torch.tensor([[-1.0, -1.4, -1.7, -2.1]] * 2)
        return [
            beam.hypothesis
            for beam in search.advance(line, 1, lambda _, token: (token, False), taken)
        ]

    assert run_search([]) == [0, 1]
    assert run_search([0]) == [1, 0]
    assert run_search([0, 0]) == [1, 2]
