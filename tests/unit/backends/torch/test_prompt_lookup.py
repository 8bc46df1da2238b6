"""Prompt-lookup decoding: drafts from earlier tokens, and the same output as without them."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from backends.torch.ipc import (
    BeamSearchParams,
    EngineSamplingParams,
    GenerateCommand,
    OutputRule,
    PromptInput,
    StopParams,
    TextEvent,
)
from backends.torch.kv_cache import BlockPool, SequenceCache
from backends.torch.loaded_model import LoadedModel
from backends.torch.model import ATTENTION_NAME, ModelRunner
from backends.torch.prompt_lookup import (
    MAX_PASS_TOKENS,
    DraftSetting,
    PromptLookup,
    choose_longest_draft,
    describe_drafts,
)
from backends.torch.scheduler import SchedulerConfig
from tests.support.tiny_model import EngineDriver, ScriptedRunner, tiny_llama

# --- drafts ---------------------------------------------------------------------------------------


def test_draft_is_what_followed_the_last_occurrence_of_the_last_tokens() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 8, 1, 2])
    assert lookup.draft([3], 8) == [5, 6, 7]
    assert lookup.draft([3], 2) == [5, 6]
    assert lookup.draft([3], 0) == []


def test_repetition_goes_on_in_the_draft() -> None:
    assert PromptLookup([9, 1, 2, 1, 2, 1]).draft([], 8) == [2, 1, 2]
    assert PromptLookup([5, 5, 5, 5]).draft([], 8) == [5, 5, 5]


def test_tokens_that_have_not_occurred_before_have_no_draft() -> None:
    lookup = PromptLookup([1, 2, 3, 4])
    assert lookup.draft([], 8) == []
    assert lookup.draft([2, 3], 8) == []
    assert PromptLookup([1]).draft([2], 8) == []


def test_output_is_part_of_what_is_looked_up() -> None:
    lookup, output = PromptLookup([7]), [1, 2, 3, 4, 5, 1, 2]
    assert lookup.draft(output, 8) == []
    assert lookup.draft([*output, 3], 8) == [4, 5, 1]


def test_draft_is_longer_after_one_that_was_right() -> None:
    lookup = PromptLookup([*range(20), 3, 4, 5])
    assert lookup.draft([], 16) == [6, 7, 8]
    lookup.record_result(3, 3)
    assert lookup.draft([6, 7, 8], 16) == [9, 10, 11, 12, 13, 14, 15]
    lookup.record_result(7, 2)
    assert lookup.draft([6, 7, 8, 9, 10], 16) == [11, 12, 13]


@pytest.mark.parametrize("longest", [1, 2, 5])
def test_no_draft_is_longer_than_the_setting(longest: int) -> None:
    lookup = PromptLookup([*range(20), 3, 4, 5], longest)
    assert lookup.draft([], 16) == [6, 7, 8][:longest]
    lookup.record_result(3, 3)
    assert lookup.draft([6, 7, 8], 16) == [9, 10, 11, 12, 13][:longest]
    lookup.record_result(longest, 0)
    assert len(lookup.draft([6, 7, 8, 9, 10, 11, 12], 16)) <= longest


@pytest.mark.parametrize(
    ("setting", "is_exact", "longest", "text"),
    [
        ("auto", True, 7, "drafts of at most 7 tokens"),
        ("auto", False, 0, "off: the logits of a token depend on the size of the step"),
        ("off", True, 0, "off by configuration"),
        ("off", False, 0, "off by configuration"),
        (4, True, 4, "drafts of at most 4 tokens"),
        (4, False, 4, "drafts of at most 4 tokens; outputs may differ from those without by"),
    ],
)
def test_setting_and_exactness_decide_and_are_described(
    setting: DraftSetting, is_exact: bool, longest: int, text: str
) -> None:
    assert choose_longest_draft(setting, is_exact=is_exact) == longest
    assert describe_drafts(setting, is_exact=is_exact).startswith(text)


@pytest.mark.parametrize(
    ("setting", "text"),
    [("auto", "on, if the logits"), ("off", "off by configuration"), (3, "drafts of at most 3")],
)
def test_drafts_of_a_model_that_is_not_loaded_are_described(
    setting: DraftSetting, text: str
) -> None:
    assert describe_drafts(setting, is_exact=None).startswith(text)


def test_wrong_drafts_become_rarer() -> None:
    """A sequence with a draft for each token, which is always wrong."""
    lookup, output, drafted = PromptLookup([]), [1] * 10, []
    for _ in range(400):
        if lookup.draft(output, 8):
            drafted.append(len(output))
            lookup.record_result(3, 0)
        output.append(1)
    pauses = [after - before for before, after in itertools.pairwise(drafted)]
    assert pauses[:6] == [2, 4, 8, 16, 32, 32]
    assert max(pauses) == 32


# --- in the engine --------------------------------------------------------------------------------

REPEATED = "the quick brown fox. the quick brown fox. the quick "
LETTERS = (97, 98, 99)
"""With so few tokens nearly all have a draft, and many drafts are wrong."""
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": EngineSamplingParams(temperature=0.0, allowed_token_ids=LETTERS)},
    "sampled": {"sampling": EngineSamplingParams(seed=5, allowed_token_ids=LETTERS, top_p=0.9)},
    "penalties": {
        "sampling": EngineSamplingParams(
            seed=5, allowed_token_ids=LETTERS, repetition_penalty=1.05, frequency_penalty=0.01
        )
    },
    "choices": {"sampling": EngineSamplingParams(seed=2, allowed_token_ids=LETTERS), "n": 3},
    "log probabilities": {
        "sampling": EngineSamplingParams(seed=2, allowed_token_ids=LETTERS),
        "logprobs": 2,
    },
    "grammar": {
        "sampling": EngineSamplingParams(seed=3),
        "output_format": OutputRule("regex", "(ab|abc){30}"),
    },
}


class PassCounter:
    """Counts the forward passes of a ModelRunner, and their tokens."""

    def __init__(self, runner: Any, *, is_batch_invariant: bool) -> None:
        self._runner = runner
        self.is_batch_invariant = is_batch_invariant
        self.token_counts: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def __call__(self, segments: Any) -> torch.Tensor:
        self.token_counts.append(sum(len(segment.tokens) for segment in segments))
        logits: torch.Tensor = self._runner(segments)
        return logits


def run(
    model: LoadedModel, *commands: GenerateCommand, drafts: bool
) -> tuple[EngineDriver, PassCounter]:
    runner = PassCounter(model.runner, is_batch_invariant=drafts)
    driver = EngineDriver(model._replace(runner=runner), SchedulerConfig())  # type: ignore[arg-type]
    driver.run(*commands)
    assert driver.engine.block_pool.used_blocks == 0
    return driver, runner


def make_command(request_id: int = 1, **fields: Any) -> GenerateCommand:
    options: dict[str, Any] = {
        "input": PromptInput(prompts=(REPEATED,)),
        "stopping": StopParams(max_tokens=60, ignore_eos=True),
        "token_ids": True,
        **fields,
    }
    return GenerateCommand(request_id=request_id, **options)


@pytest.mark.parametrize("name", REQUESTS)
def test_output_is_that_without_drafts(tiny: LoadedModel, name: str) -> None:
    command = make_command(**REQUESTS[name])
    (plain, plain_passes), (drafted, passes) = (
        run(tiny, command, drafts=drafts) for drafts in (False, True)
    )
    assert drafted.ended() == plain.ended()
    events = [driver.select(TextEvent) for driver in (plain, drafted)]
    for choice in range(command.n):
        one, other = ([e for e in each if e.choice == choice] for each in events)
        assert [i for e in other for i in e.ids] == [i for e in one for i in e.ids]
        assert "".join(e.text for e in other) == "".join(e.text for e in one)
        assert [t for e in other for t in e.tokens] == [t for e in one for t in e.tokens]
    assert drafted.finished().completion_tokens == plain.finished().completion_tokens
    assert max(passes.token_counts[2:]) > max(plain_passes.token_counts[2:])


def test_repeated_text_takes_fewer_passes(tiny: LoadedModel) -> None:
    """A choice of one token only is always the same: every draft of it is right."""
    command = make_command(sampling=EngineSamplingParams(allowed_token_ids=(97,)))
    (plain, plain_passes), (drafted, passes) = (
        run(tiny, command, drafts=drafts) for drafts in (False, True)
    )
    assert drafted.text() == plain.text() == "a" * 60
    assert len(plain_passes.token_counts) == 61
    assert len(passes.token_counts) < 20
    assert sum(passes.token_counts) < 60 + len(REPEATED) + 9
    stats, plain_stats = drafted.engine.stats, plain.engine.stats
    assert (plain_stats.draft_tokens, plain_stats.accepted_draft_tokens) == (0, 0)
    assert stats.accepted_draft_tokens == 61 - len(passes.token_counts)
    assert stats.draft_tokens >= stats.accepted_draft_tokens


@pytest.mark.parametrize(("setting", "most"), [("off", 1), (2, 3), ("auto", 8)])
def test_configured_drafts_are_made(tiny: LoadedModel, setting: DraftSetting, most: int) -> None:
    runner = PassCounter(tiny.runner, is_batch_invariant=True)
    limits = SchedulerConfig(prompt_lookup=setting)
    driver = EngineDriver(tiny._replace(runner=runner), limits)  # type: ignore[arg-type]
    driver.run(make_command(sampling=EngineSamplingParams(allowed_token_ids=(97,))))
    assert driver.text() == "a" * 60
    assert max(runner.token_counts[2:]) == most


def test_requests_in_company_have_the_output_without_drafts(tiny: LoadedModel) -> None:
    commands = [
        make_command(i, sampling=EngineSamplingParams(seed=i, allowed_token_ids=LETTERS))
        for i in range(6)
    ]
    (plain, _), (drafted, passes) = (
        run(tiny, *commands, drafts=drafts) for drafts in (False, True)
    )
    for i in range(6):
        assert drafted.ids(i) == plain.ids(i)
        assert len(drafted.ids(i)) == 60
    assert 6 < max(passes.token_counts[-20:]) <= MAX_PASS_TOKENS


def test_draft_is_within_the_credit_and_the_length(tiny: LoadedModel) -> None:
    """A client that has not read its tokens gets no more than it allowed."""
    sampling = EngineSamplingParams(allowed_token_ids=(97,))
    driver, _ = run(tiny, make_command(sampling=sampling, initial_credit=60), drafts=True)
    assert driver.text() == "a" * 60
    short = make_command(sampling=sampling, stopping=StopParams(max_tokens=13, ignore_eos=True))
    driver, _ = run(tiny, short, drafts=True)
    assert driver.text() == "a" * 13

    runner = PassCounter(tiny.runner, is_batch_invariant=True)
    driver = EngineDriver(tiny._replace(runner=runner), SchedulerConfig())  # type: ignore[arg-type]
    driver.run(make_command(sampling=sampling, initial_credit=20))
    assert driver.text() == "a" * 20


def test_stop_string_inside_a_draft_ends_the_output(tiny: LoadedModel) -> None:
    stopping = StopParams(max_tokens=60, stop=("a" * 21,), ignore_eos=True, include_stop=True)
    sampling = EngineSamplingParams(allowed_token_ids=(97,))
    driver, _ = run(tiny, make_command(sampling=sampling, stopping=stopping), drafts=True)
    assert driver.text() == "a" * 21
    assert driver.finished().completion_tokens == 21


def test_pass_that_fails_with_drafts_is_repeated_without(
    scripted: Callable[..., tuple[EngineDriver, ScriptedRunner]],
) -> None:
    """A pass with more than two tokens has too little memory."""
    driver, _ = scripted("abc" * 10, max_tokens=2)
    command = GenerateCommand(request_id=1, input=PromptInput(prompts=((97,),)))
    driver.run(command)
    assert driver.text() == "abc" * 10
    assert not driver.events[-1].__class__.__name__.startswith("RequestFailed")


def test_beams_have_no_drafts(tiny: LoadedModel) -> None:
    beams = BeamSearchParams(2)
    _, passes = run(tiny, make_command(beams=beams), drafts=True)
    assert max(passes.token_counts[2:]) == 2


def test_model_whose_tokens_depend_on_the_pass_has_no_drafts(tiny: LoadedModel) -> None:
    assert tiny.runner.is_batch_invariant
    model = tiny_llama(attn_implementation=ATTENTION_NAME)

    def add_size(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + output.shape[1] * 1e-6

    model.model.norm.register_forward_hook(add_size)
    assert not ModelRunner(model).is_batch_invariant


def test_forgotten_tokens_leave_no_values() -> None:
    """What is masked is multiplied by zero, which must not meet NaN."""
    cache = SequenceCache(BlockPool(4), 1)
    cache.reserve(40)
    values = torch.full((1, 40, 2), float("nan"))
    cache.pool.write(0, torch.tensor(cache.next_slots(40)), values, values)
    cache.advance(40)
    cache.truncate(50)
    assert cache.length == 40
    cache.truncate(5)
    assert (cache.length, cache.count_free_slots()) == (5, 59)
    keys, _ = cache.pool.read(0, cache.slot_ranges(64))
    assert keys[0, :5].isnan().all()
    assert (keys[0, 5:] == 0).all()
