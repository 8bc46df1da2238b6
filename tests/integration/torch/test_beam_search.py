"""Beam search in the engine equals transformers' results, alone and with other requests."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from backends.torch.ipc import (
    BeamSearchParams,
    ChoiceEndEvent,
    EngineSamplingParams,
    GenerateCommand,
    OutputRule,
    PromptInput,
    RequestFailedEvent,
    StopParams,
    TextEvent,
)
from backends.torch.kv_cache import BLOCK_SIZE
from backends.torch.loaded_model import LoadedModel
from backends.torch.scheduler import SchedulerConfig
from backends.torch.settings import WatermarkSettings

Drive = Callable[..., Any]
STEPS = 10
FILL = 258


def make_command(
    width: int = 4, *, job: int = 1, prompt: str = "Hello", n: int | None = None, **fields: Any
) -> GenerateCommand:
    search = {
        one: fields.pop(one)
        for one in ("groups", "diversity_penalty", "length_penalty")
        if one in fields
    }
    options: dict[str, Any] = {
        "sampling": EngineSamplingParams(temperature=0),
        "stopping": StopParams(max_tokens=STEPS, ignore_eos=True),
        "n": width if n is None else n,
        "token_ids": True,
        **fields,
    }
    return GenerateCommand(
        job, PromptInput(prompts=(prompt,)), beams=BeamSearchParams(width, **search), **options
    )


def get_choices(driven: Any, job: int = 1) -> list[list[int]]:
    return [driven.ids(job, choice) for choice in range(len(driven.ended(job)))]


def run_transformers_search(
    reference: Any, tokenizer: Any, width: int, prompt: str = "Hello", **options: Any
) -> list[list[int]]:
    """Return transformers' results without padding; padding is a token that no text ends with."""
    ids = tokenizer.encode(prompt)
    fields: dict[str, Any] = {"max_new_tokens": STEPS, "eos_token_id": None, **options}
    with torch.inference_mode():
        lines = reference.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            pad_token_id=FILL,
            **fields,
        )
    texts: list[list[int]] = [line[len(ids) :] for line in lines.tolist()]
    for text in texts:
        while text[-1] == FILL:
            text.pop()
    return texts


def limit_blocks(model: LoadedModel, blocks: int) -> SchedulerConfig:
    """Return settings with a KV cache of this many blocks."""
    return SchedulerConfig(cache_bytes=blocks * BLOCK_SIZE * model.runner.cache_bytes_per_token)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 3, 7])
def test_beam_search_finds_the_same_texts_as_transformers(
    driven: Drive, reference: Any, tokenizer: Any, width: int
) -> None:
    for prompt in ("Hello", "some longer prompt, read in chunks"):
        driver = driven(SchedulerConfig(max_chunk_tokens=32)).run(
            make_command(width, prompt=prompt)
        )
        assert get_choices(driver) == run_transformers_search(reference, tokenizer, width, prompt)
        assert all(end.reason == "length" for end in driver.ended().values())


def test_stop_tokens_and_length_penalty_match_transformers(
    driven: Drive, reference: Any, tokenizer: Any
) -> None:
    """Several likely stop tokens give texts of many lengths."""
    plain = run_transformers_search(reference, tokenizer, 4)
    ends = tuple({text[at] for text, at in zip(plain, (2, 4, 6, 3), strict=True)})
    lengths = set()

    for penalty in (1.0, -2.0, 3.0):
        ending = StopParams(
            max_tokens=STEPS, stop_token_ids=ends, ignore_eos=True, include_stop=True
        )
        driver = driven().run(make_command(4, stopping=ending, length_penalty=penalty))
        wanted = run_transformers_search(
            reference, tokenizer, 4, eos_token_id=list(ends), length_penalty=penalty
        )
        assert get_choices(driver) == wanted
        lengths.add(tuple(map(len, wanted)))
        for choice, text in enumerate(wanted):
            stopped = ChoiceEndEvent(1, choice, "stop", text[-1]) if text[-1] in ends else None
            assert driver.ended()[choice] == (stopped or ChoiceEndEvent(1, choice, "length"))

    assert len(lengths) > 1


def test_penalties_logit_bias_and_bad_words_apply_to_beam_search(
    driven: Drive, reference: Any, tokenizer: Any
) -> None:
    plain = run_transformers_search(reference, tokenizer, 3)
    barred, liked = plain[0][2], 65
    picking = EngineSamplingParams(
        temperature=0,
        repetition_penalty=0.6,
        logit_bias={liked: 2.5},
        bad_words=(chr(barred),),
    )
    driver = driven().run(make_command(3, sampling=picking))

    assert barred < 128
    assert get_choices(driver) != plain
    assert get_choices(driver) == run_transformers_search(
        reference,
        tokenizer,
        3,
        repetition_penalty=0.6,
        sequence_bias=[[[liked], 2.5]],
        bad_words_ids=[[barred], [32, barred]],
    )

    few = driven().run(
        make_command(3, sampling=EngineSamplingParams(temperature=0, allowed_token_ids=(65, 66)))
    )
    assert {token for text in get_choices(few) for token in text} == {65, 66}


def test_watermark_applies_to_beam_search(driven: Drive, reference: Any, tokenizer: Any) -> None:
    from transformers import WatermarkingConfig  # noqa: PLC0415

    driver = driven().run(
        make_command(3, sampling=EngineSamplingParams(temperature=0, watermark=WatermarkSettings()))
    )
    wanted = run_transformers_search(
        reference, tokenizer, 3, watermarking_config=WatermarkingConfig()
    )

    assert get_choices(driver) == wanted != run_transformers_search(reference, tokenizer, 3)


def run_reference_group_search(
    model: Any, prompt: Sequence[int], groups: int, size: int, penalty: float
) -> list[list[int]]:
    """A plain group beam search (Vijayakumar et al.) in which only the length ends a text."""
    beams: list[list[tuple[float, list[int]]]] = [[(0.0, [])] for _ in range(groups)]
    for _ in range(STEPS):
        taken: list[int] = []
        for group in range(groups):
            every = []
            for score, text in beams[group]:
                with torch.inference_mode():
                    logits = model(torch.tensor([[*prompt, *text]])).logits[0, -1]
                line = logits.log_softmax(-1).tolist()
                for token, value in enumerate(line):
                    less = penalty * taken.count(token)
                    every.append((score + value - less, [*text, token]))
            beams[group] = sorted(every, key=lambda one: -one[0])[:size]
            taken += [text[-1] for _, text in beams[group]]
    both = [one for group in beams for one in group]
    return [text for _, text in sorted(both, key=lambda one: -one[0])]


@pytest.mark.parametrize("how", [(3, 1, 2.0), (2, 2, 0.7), (3, 2, 5.0)])
def test_diverse_beam_groups_match_the_reference_algorithm(
    driven: Drive, reference: Any, tokenizer: Any, how: tuple[int, int, float]
) -> None:
    groups, size, penalty = how
    driver = driven().run(make_command(groups * size, groups=groups, diversity_penalty=penalty))

    prompt = tokenizer.encode("Hello")

    assert get_choices(driver) == run_reference_group_search(
        reference, prompt, groups, size, penalty
    )


def test_best_n_beams_are_returned_in_one_event_each(driven: Drive) -> None:
    every = driven().run(make_command(5))
    driver = driven().run(make_command(5, n=2))

    assert get_choices(driver) == get_choices(every)[:2]
    assert len(driver.select(TextEvent)) == 2
    assert driver.finished().completion_tokens == 2 * STEPS
    assert driver.finished().max_batch == 5
    assert driver.engine.active_count == 0
    assert driver.engine.block_pool.used_blocks == 0


def test_beam_logprobs_are_the_unmodified_model_logprobs(
    driven: Drive, reference: Any, tokenizer: Any
) -> None:
    picking = EngineSamplingParams(temperature=0, repetition_penalty=1.5)
    driver = driven().run(make_command(3, sampling=picking, logprobs=2, n=2))
    prompt = tokenizer.encode("Hello")
    for piece in driver.select(TextEvent):
        with torch.inference_mode():
            truth = reference(torch.tensor([[*prompt, *piece.ids]])).logits[0].log_softmax(-1)
        assert [token.id for token in piece.tokens] == list(piece.ids)
        for at, token in enumerate(piece.tokens):
            line = truth[len(prompt) - 1 + at]
            assert token.logprob == pytest.approx(float(line[token.id]), abs=1e-3)
            assert [one.id for one in token.top] == line.topk(2).indices.tolist()


def test_stop_string_ends_a_beam(driven: Drive) -> None:
    plain = driven().run(make_command(4)).text()
    stop = plain[3:5]
    ending = StopParams(max_tokens=STEPS, ignore_eos=True, stop=(stop,))
    driver = driven().run(make_command(4, stopping=ending))
    texts = [driver.text(choice=i) for i in range(4)]

    assert all(stop not in text for text in texts)
    assert ChoiceEndEvent(1, texts.index(plain[:3]), "stop", stop) in driver.ended().values()

    late = StopParams(max_tokens=STEPS, ignore_eos=True, stop=(stop,), min_tokens=STEPS)
    assert driven().run(make_command(4, stopping=late)).text() == plain


def test_min_tokens_delays_the_end_of_a_beam(driven: Drive, tokenizer: Any, reference: Any) -> None:
    first = run_transformers_search(reference, tokenizer, 3)[0][0]
    soon = StopParams(max_tokens=STEPS, stop_token_ids=(first,), ignore_eos=True, include_stop=True)
    assert [first] in get_choices(driven().run(make_command(3, stopping=soon)))

    late = msgspec.structs.replace(soon, min_tokens=6)
    choices = get_choices(driven().run(make_command(3, stopping=late)))
    assert all(first not in text[:6] for text in choices)


def test_beam_search_with_echo_and_several_prompts(driven: Drive) -> None:
    spec = msgspec.structs.replace(
        make_command(3, n=2, echo=True), input=PromptInput(prompts=("Hello", "other"))
    )
    driver = driven().run(spec)

    assert get_choices(driver)[:2] == get_choices(driven().run(make_command(3, n=2)))
    assert get_choices(driver)[2:] == get_choices(
        driven().run(make_command(3, n=2, prompt="other"))
    )


# --- structured output ----------------------------------------------------------------------------


def test_constrained_beams_are_valid_and_repeat_if_too_few_exist(driven: Drive) -> None:
    form = OutputRule("choice", '["yes","no"]')
    driver = driven().run(make_command(4, output_format=form, n=3))

    texts = [driver.text(choice=i) for i in range(3)]

    assert set(texts) == {"yes", "no"}
    assert texts[2] == texts[0]
    assert {end.reason for end in driver.ended().values()} == {"eos"}


def test_output_format_that_conflicts_with_allowed_tokens_is_an_error(driven: Drive) -> None:
    form = OutputRule("choice", '["yes","no"]')
    picking = EngineSamplingParams(temperature=0, allowed_token_ids=(65,))

    driver = driven().run(make_command(2, output_format=form, sampling=picking))

    assert driver.failed().kind == "invalid"
    assert driver.engine.active_count == 0


# --- with other requests --------------------------------------------------------------------------


def test_other_requests_do_not_change_beam_search_results(driven: Drive) -> None:
    alone = get_choices(driven().run(make_command(4)))
    hot = GenerateCommand(
        2,
        PromptInput(prompts=("a neighbour",)),
        EngineSamplingParams(temperature=1, seed=3),
        StopParams(max_tokens=30, ignore_eos=True),
        n=3,
        best_of=3,
        token_ids=True,
    )
    other = make_command(3, job=3, prompt="third", groups=3, diversity_penalty=1.0)

    driver = driven(SchedulerConfig(max_sequences=8)).run(hot, make_command(4), other)

    assert get_choices(driver) == alone
    assert get_choices(driver, 2) == get_choices(driven().run(hot), 2)
    assert get_choices(driver, 3) == get_choices(driven().run(other), 3)


def test_beam_search_waits_for_enough_batch_slots(driven: Drive) -> None:
    one = GenerateCommand(
        2,
        PromptInput(prompts=("x",)),
        EngineSamplingParams(temperature=0),
        StopParams(max_tokens=9, ignore_eos=True),
    )
    driver = driven(SchedulerConfig(max_sequences=4))
    driver.engine.submit(one)
    driver.engine.step()

    driver.run(make_command(4))

    assert driver.finished(2).max_batch == 1
    assert driver.finished().max_batch == 4
    assert get_choices(driver) == get_choices(driven().run(make_command(4)))


def test_request_without_credit_yields_its_slot_to_beam_search(driven: Drive) -> None:
    lazy = GenerateCommand(
        2,
        PromptInput(prompts=("x",)),
        EngineSamplingParams(temperature=0),
        StopParams(max_tokens=9, ignore_eos=True),
        initial_credit=2,
    )
    driver = driven(SchedulerConfig(max_sequences=4)).run(lazy, make_command(4))
    assert set(driver.ended()) == {0, 1, 2, 3}

    driver.engine.credit(2, 100)
    assert driver.run().ended(2)[0].reason == "length"


def test_more_beams_than_batch_slots_are_rejected(driven: Drive) -> None:
    driver = driven(SchedulerConfig(max_sequences=4)).run(make_command(5))
    assert (driver.failed().kind, driver.failed().param) == ("invalid", "best_of")


@pytest.mark.parametrize("name", ["length_penalty", "diversity_penalty"])
def test_extreme_or_nan_penalties_are_rejected(driven: Drive, name: str) -> None:
    def failed(value: float) -> list[RequestFailedEvent]:
        penalty: dict[str, Any] = {name: value}
        failures: list[RequestFailedEvent] = (
            driven().run(make_command(2, **penalty)).select(RequestFailedEvent)
        )
        return failures

    for value in (1e9, -1e9, float("nan")):
        (one,) = failed(value)
        assert (one.kind, one.param) == ("invalid", name)
    assert failed(39.0) == []


@pytest.mark.parametrize("blocks", [4, 6, 8])
def test_preemption_does_not_change_beam_search_results(
    driven: Drive, tiny: LoadedModel, blocks: int
) -> None:
    """Preempted beams and requests resume with the same state."""
    long = StopParams(max_tokens=50, ignore_eos=True)
    specs = [
        make_command(2, job=1, prompt="first", stopping=long),
        make_command(2, job=2, prompt="second", stopping=long),
        GenerateCommand(
            3,
            PromptInput(prompts=("third",)),
            EngineSamplingParams(temperature=0),
            long,
            token_ids=True,
            n=2,
            best_of=2,
        ),
    ]

    short = driven(limit_blocks(tiny, blocks)).run(*specs)

    assert short.engine._scheduler.preemption_count > 0
    for spec in specs:
        assert get_choices(short, spec.request_id) == get_choices(
            driven().run(spec), spec.request_id
        )
    assert short.engine.block_pool.used_blocks == 0


def test_beam_length_is_limited_by_the_kv_cache_size(driven: Drive, tiny: LoadedModel) -> None:
    driver = driven(limit_blocks(tiny, 4)).run(
        make_command(2, stopping=StopParams(max_tokens=100, ignore_eos=True), prompt="12345")
    )
    assert [len(text) for text in get_choices(driver)] == [2 * BLOCK_SIZE - 5] * 2

    refused = driven(limit_blocks(tiny, 4)).run(make_command(3, prompt="x" * BLOCK_SIZE))
    assert refused.failed().kind == "too_long"


def test_cancelled_beam_search_frees_slots_and_blocks(driven: Drive) -> None:
    driver = driven()
    driver.engine.submit(make_command(4))
    for _ in range(4):
        driver.engine.step()

    assert driver.engine.active_count == 4

    driver.engine.cancel(1)
    assert (driver.engine.active_count, driver.engine.block_pool.used_blocks) == (0, 0)
    assert not driver.engine.step()


def test_finished_beam_group_frees_its_slots_while_others_continue(driven: Drive) -> None:
    fields: dict[str, Any] = {"groups": 2, "diversity_penalty": 50.0, "length_penalty": 0.0}
    plain = get_choices(driven().run(make_command(2, **fields)))
    end = plain[0][2]
    ending = StopParams(max_tokens=STEPS, ignore_eos=True, stop_token_ids=(end,), include_stop=True)
    driver = driven()
    driver.engine.submit(make_command(2, stopping=ending, **fields))
    rows = []
    while driver.engine.step():
        rows.append(driver.engine.active_count)

    short, long = sorted(get_choices(driver), key=len)

    assert (short, long[:3], len(long)) == (plain[0][:3], plain[1][:3], STEPS)
    assert rows == [2, 2, *[1] * (STEPS - 3), 0]


@pytest.mark.parametrize("seed", [0, 1, 2, 110])
def test_concurrent_beam_searches_find_the_same_texts_as_alone(
    driven: Drive, tiny: LoadedModel, seed: int
) -> None:
    """Memory and slots are scarce, priorities differ, and clients disconnect."""
    chance = random.Random(seed)
    ending = StopParams(max_tokens=20, ignore_eos=True)
    specs = []
    for job in range(1, 13):
        width = chance.choice([1, 2, 3, 5])
        beams = None if width == 1 else BeamSearchParams(width, chance.choice([1, width]), 0.5)
        specs.append(
            GenerateCommand(
                job,
                PromptInput(prompts=("ab" * chance.randint(1, 20),)),
                EngineSamplingParams(temperature=0.8 if width == 1 else 0.0, seed=7),
                ending,
                n=1 if width == 1 else 2,
                token_ids=True,
                priority=chance.choice([1, 2]),
                beams=beams,
            )
        )
    narrow_one = msgspec.structs.replace(
        limit_blocks(tiny, 12), max_sequences=6, max_chunk_tokens=32
    )
    driver, left = driven(narrow_one), set(chance.sample(range(1, 13), 3))
    for spec in specs:
        driver.engine.submit(spec)
        for _ in range(chance.randint(0, 8)):
            driver.engine.step()
    for job in left:
        driver.engine.cancel(job)

    driver.run(steps=5000)

    for spec in specs:
        if spec.request_id not in left:
            assert get_choices(driver, spec.request_id) == get_choices(
                driven().run(spec), spec.request_id
            ), spec
    assert (
        driver.engine.active_count,
        driver.engine.waiting_count,
        driver.engine.block_pool.used_blocks,
    ) == (0, 0, 0)
