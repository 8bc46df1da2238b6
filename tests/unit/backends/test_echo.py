"""The scripted echo backend answers as the conformance cases require."""

from contextlib import aclosing
from typing import Any

import pytest

from backends.echo import EchoBackend, ScriptedFailure
from backends.interfaces import (
    BackendRequest,
    Deadline,
    PreparedRequest,
    RequestContext,
    ignore_memory,
)
from protocols.core.aggregate import ResponseAccumulator, UnaryResponse
from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    UnsupportedFeature,
    WorkerFailed,
)
from protocols.core.events import TokenList
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AnyRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    ImagePart,
    LogprobsOptions,
    Message,
    NamedTool,
    RerankRequest,
    StopConditions,
    TextPart,
    TokenizeRequest,
    Tool,
)

HELLO = EchoBackend(script=["Hello", " world", "!"])


def clock() -> float:
    return 0.0


CONTEXT = RequestContext("r", Deadline(clock, 1), clock, ignore_memory)


def make_chat(text: str = "say hi", **fields: Any) -> GenerationRequest:
    fields.setdefault("messages", (Message("user", (TextPart(text),)),))
    return GenerationRequest(model="m", kind="chat", **fields)


async def collect_response(backend: EchoBackend, request: AnyRequest) -> UnaryResponse:
    fold = ResponseAccumulator()
    async with aclosing(backend.send(PreparedRequest(request), CONTEXT)) as batches:
        async for _, batch in batches:
            fold.add(batch)
    return fold.result()


async def test_echo_returns_its_script_and_counts_words() -> None:
    response = await collect_response(HELLO, make_chat())

    assert (response.choices[0].text, response.choices[0].finish_reason) == ("Hello world!", "eos")
    assert response.usage is not None
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (2, 3)


async def test_echo_without_a_script_returns_the_prompt() -> None:
    backend = EchoBackend()
    prompts = GenerationRequest(model="m", kind="completion", prompts=("a b", (1, 2)), n=2)

    assert (await collect_response(backend, make_chat("so be it"))).choices[0].text == "so be it"
    assert [c.text for c in (await collect_response(backend, prompts)).choices] == [
        "a b",
        "a b",
        "1 2",
        "1 2",
    ]


@pytest.mark.parametrize(
    ("stopping", "text", "reason"),
    [
        (StopConditions(max_tokens=2), "Hello world", "length"),
        (StopConditions(max_tokens=3), "Hello world!", "eos"),
        (StopConditions(stop=("lo wor",)), "Hel", "stop"),
        (StopConditions(stop=(" world",), include_stop=True), "Hello world", "stop"),
        (StopConditions(stop=("!?",)), "Hello world!", "eos"),
    ],
)
async def test_echo_applies_stop_conditions(
    stopping: StopConditions, text: str, reason: str
) -> None:
    [choice] = (await collect_response(HELLO, make_chat(stopping=stopping))).choices

    assert (choice.text, choice.finish_reason) == (text, reason)


async def test_echo_returns_logprobs_with_alternatives() -> None:
    [choice] = (await collect_response(HELLO, make_chat(logprobs=LogprobsOptions(2)))).choices

    assert [one.token for one in choice.logprobs] == ["Hello", " world", "!"]
    assert [(top.token, top.logprob) for top in choice.logprobs[0].top] == [
        ("Hello", -0.5),
        ("alt1", -1.5),
    ]


async def test_a_call_of_a_custom_tool_keeps_its_type() -> None:
    [response] = (
        await collect_response(HELLO, make_chat("use a tool", tools=(Tool("f", kind="custom"),)))
    ).choices
    assert [(call.name, call.kind) for call in response.tool_calls] == [("f", "custom")]


@pytest.mark.parametrize(
    ("text", "choice", "called"),
    [
        ("use a tool", None, "f"),
        ("use a tool", "auto", "f"),
        ("say hi", "auto", None),
        ("say hi", "required", "f"),
        ("say hi", NamedTool("g"), "g"),
        ("use a tool", "none", None),
    ],
)
async def test_echo_calls_tools_on_request(text: str, choice: Any, called: str | None) -> None:
    request = make_chat(text, tools=(Tool("f"), Tool("g")), tool_choice=choice)

    [response] = (await collect_response(HELLO, request)).choices

    assert [call.name for call in response.tool_calls] == ([called] if called else [])
    assert response.finish_reason == ("tool_calls" if called else "eos")
    if called:
        assert response.tool_calls[0].arguments == '{"x":1}'


async def test_echo_rejects_or_truncates_a_long_prompt() -> None:
    backend = EchoBackend(script=["x"], context=8)
    long = "w " * 20

    with pytest.raises(ContextTooLong) as e:
        await collect_response(backend, make_chat(long))
    assert (e.value.param, e.value.tokens, e.value.limit) == ("messages", 20, 8)

    cut = await collect_response(
        backend, make_chat(long, stopping=StopConditions(overflow="truncate"))
    )
    assert cut.choices[0].finish_reason == "length"


async def test_echo_embedding_is_computed_from_the_text() -> None:
    request = EmbeddingRequest(model="m", inputs=("a b", (1, 2)), instruction="q: ")

    response = await collect_response(HELLO, request)

    assert response.embeddings == [(6.0, 3.0, 0.5, -0.25), (2.0, 2.0, 0.5, -0.25)]
    assert response.usage is not None
    assert response.usage.prompt_tokens == 5


@pytest.mark.parametrize("prompt", ["a b", (1, 2)])
@pytest.mark.parametrize("logprobs", [None, LogprobsOptions()])
async def test_echo_returns_the_prompt_with_logprobs(
    prompt: Any, logprobs: LogprobsOptions | None
) -> None:
    request = GenerationRequest(
        model="m", kind="completion", prompts=(prompt,), echo=True, logprobs=logprobs
    )

    [choice] = (await collect_response(HELLO, request)).choices

    text = "a b" if prompt == "a b" else "1 2"
    assert (choice.text, choice.echo_length) == (text + "Hello world!", 3)

    every = [None, -0.5, -0.5, -0.5, -0.5] if logprobs else []
    assert [one.logprob for one in choice.logprobs] == every


async def test_echo_tokenizes_words() -> None:
    request = TokenizeRequest(model="m", prompt="a b  c")
    response = await collect_response(HELLO, request)
    assert response.tokens == TokenList((0, 1, 2), ("a", " b", " c"))


@pytest.mark.parametrize(("context", "most"), [(3, 3), (None, 131_072)])
async def test_echo_lists_no_more_tokens_than_its_context(context: int | None, most: int) -> None:
    """Four million took seconds, in which nobody else was served."""
    backend = EchoBackend(context=context)
    fitting = await collect_response(backend, TokenizeRequest(model="m", prompt="a " * most))
    assert fitting.tokens is not None
    assert len(fitting.tokens.ids) == most

    with pytest.raises(ContextTooLong) as error:
        await collect_response(backend, TokenizeRequest(model="m", prompt="a " * (most + 1)))

    assert (error.value.param, error.value.limit) == ("prompt", most)


async def test_echo_scores_documents_by_shared_words() -> None:
    documents = ("green pear", "red apple", "red car", "")
    one = RerankRequest(model="m", queries=("Red apple",), documents=documents)
    pairs = RerankRequest(model="m", queries=("red", "green"), documents=("red", "red"))

    response = await collect_response(HELLO, one)

    assert response.scores == [0.0, 1.0, 0.5, 0.0]
    assert response.usage is not None
    assert response.usage.prompt_tokens == 14
    assert (await collect_response(HELLO, pairs)).scores == [1.0, 0.0]


async def test_echo_splits_a_query_once_for_all_documents() -> None:
    """A query of a MiB with 10,000 documents took minutes."""

    class Query(str):
        """Counts how often it is split."""

        __slots__ = ()
        splits = 0

        def lower(self) -> str:
            Query.splits += 1
            return super().lower()

    request = RerankRequest(model="m", queries=(Query("a b"),), documents=("a", "b", "c"))
    response = await collect_response(HELLO, request)

    assert (response.scores, Query.splits) == ([1.0, 1.0, 0.0], 1)


async def test_echo_rejects_detokenization() -> None:
    with pytest.raises(UnsupportedFeature, match="Detokenize API"):
        await collect_response(HELLO, DetokenizeRequest(model="m", token_ids=(1,)))


async def test_echo_reports_images_as_lost() -> None:
    parts = (TextPart("see"), ImagePart("data:"))
    request = make_chat(messages=(Message("user", parts),))

    prepared = HELLO.prepare(BackendRequest(lambda: (request, {})))

    lost = UnsupportedParameter("messages[0].content[1]", "dropped", "images", "messages")
    assert prepared.unsupported_parameters == (lost,)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("error", WorkerFailed),
        ("disconnect", StreamBroken),
        ("rate_limit", RateLimitExceeded),
        ("unavailable", Overloaded),
    ],
)
@pytest.mark.parametrize("after", [0, 2])
async def test_echo_raises_scripted_failures(
    how: Any, error: type[GatewayError], after: int
) -> None:
    backend = EchoBackend(script=["a", "b", "c"], delay=0.001, fail=ScriptedFailure(how, after))

    with pytest.raises(error):
        await collect_response(backend, make_chat())
    assert backend.running == 0
