"""Probes: availability, responses and their usage, messages and texts, embeddings."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.tools.probe.client import (
    NotOffered,
    Probe,
    UnexpectedResponse,
    WorkerClient,
    WorkerRefused,
    WorkerResponse,
    expect,
    fold_events,
    reports_usage,
)
from protocols.core.errors import ContextTooLong, GatewayError
from protocols.core.events import PromptEcho, StreamStart, TextDelta, Usage
from protocols.core.interfaces import ModelMetadataReader
from protocols.core.json_text import decode_json
from protocols.core.request import GenerationRequest, Message, Role, StopConditions, TextPart

COUNT: Final = "Count from one to twenty in words, with a space between them and nothing else."
ACCENTS: Final = "Say this back, letter by letter: Grüße, crème brûlée, smörgåsbord, jalapeño"
_TWO_LINES: Final = "The capital of France is\nParis. The capital of Italy is"
"""A prompt of two lines, which no model repeats by chance."""
_EXTRA_TOKENS: Final = 8
"""Tokens of a prompt beyond its characters: start, end, chat template."""


async def _health(worker: WorkerClient) -> str:
    response = await worker.fetch(worker.adapter.health_request)
    expect(
        response.status in range(200, 300),
        f"{worker.adapter.health_request.path} is answered {response.status}",
    )
    return f"{worker.adapter.health_request.path} is answered {response.status}"


async def _capacity(worker: WorkerClient) -> str:
    if not isinstance(worker.adapter, ModelMetadataReader):
        raise NotOffered("the protocol has no metadata endpoints")
    model = worker.target.model or worker.target.embedder or ""
    responses = [await worker.fetch(wire) for wire in worker.adapter.metadata_requests(model)]
    bodies = [reply.body if reply.status in range(200, 300) else None for reply in responses]
    limit = worker.adapter.load_metadata(model, bodies)
    answered = sum(body is not None for body in bodies)
    expect(
        answered,
        f"none of {len(bodies)} questions is answered: {[reply.status for reply in responses]}",
    )
    summary = "without a limit of requests" if limit is None else f"takes {limit} at a time"
    return f"{answered} of {len(bodies)} metadata requests answered; {summary}"


async def _unknown_model(worker: WorkerClient) -> str:
    request = replace(worker.text_request("hi"), model="interlingua-no-such-model")
    response = await worker.send(request)
    if response.result is not None:
        worker.quirks.append("any model name is accepted")
        return "any model name is accepted"
    expect(response.is_refused, f"expected an error response, got {response.summary}")
    return f"rejected: {response.summary}"


async def _unary(worker: WorkerClient) -> str:
    choice = (await worker.send(worker.text_request(COUNT))).choice
    expect(choice.text.strip() or choice.reasoning, "the text is empty")
    return f"{len(choice.text)} characters"


async def _stream(worker: WorkerClient) -> str:
    response = await worker.send(worker.text_request(COUNT, stream=True))
    choice = response.choice
    expect(choice.text.strip() or choice.reasoning, "the text is empty")
    deltas = sum(isinstance(event, TextDelta) for event in response.events)
    if deltas == 1:
        worker.quirks.append("a stream has its text in one chunk")
    return f"{deltas} deltas in {len(response.chunks)} reads"


async def _same_text(worker: WorkerClient) -> str:
    unary = await worker.baseline(COUNT)
    streamed = (await worker.send(worker.text_request(COUNT, stream=True))).choice.text
    if streamed != unary:
        difference = next(
            (i for i, (a, b) in enumerate(zip(streamed, unary, strict=False)) if a != b), None
        )
        index = min(len(streamed), len(unary)) if difference is None else difference
        raise UnexpectedResponse(
            f"they differ from character {index}: {unary[index : index + 20]!r}, "
            f"{streamed[index : index + 20]!r}"
        )
    return "the same text"


async def _prompt(worker: WorkerClient) -> str:
    choice = (
        await worker.send(worker.prompt_request("The days of the week are Monday, Tuesday,"))
    ).choice
    return f"{len(choice.text)} characters"


async def _usage_whole(worker: WorkerClient) -> str:
    return _check_usage(await worker.send(_usage_request(worker, stream=False)))


async def _usage_stream(worker: WorkerClient) -> str:
    response = await worker.send(_usage_request(worker, stream=True))
    summary = _check_usage(response)
    positions = [i for i, event in enumerate(response.events) if isinstance(event, Usage)]
    last = max(i for i, event in enumerate(response.events) if isinstance(event, TextDelta))
    return f"{summary}; {'before' if positions[0] < last else 'after'} the last text"


async def _usage_same(worker: WorkerClient) -> str:
    unary = (await worker.send(worker.text_request(COUNT))).answer.usage
    stream = (await worker.send(worker.text_request(COUNT, stream=True))).answer.usage
    if unary is None or stream is None:
        raise NotOffered("the worker does not report usage in both modes")
    counts = [(usage.prompt_tokens, usage.completion_tokens) for usage in (unary, stream)]
    expect(
        counts[0] == counts[1],
        f"non-streaming {counts[0]}, stream {counts[1]} (prompt, completion)",
    )
    return f"{counts[0]} (prompt, completion)"


def _usage_request(worker: WorkerClient, *, stream: bool) -> GenerationRequest:
    """Raises NotOffered if the protocol has no field for usage."""
    request = worker.text_request(COUNT, stream=stream)
    if not reports_usage(worker.adapter, request):
        raise NotOffered("the protocol can't express usage")
    return request


def _check_usage(response: WorkerResponse) -> str:
    """Whether the usage is plausible for the response."""
    answer = response.answer
    usage = answer.usage
    text = answer.choices[0].text + answer.choices[0].reasoning
    if usage is None or usage.source != "worker":
        raise UnexpectedResponse("the response has no usage")
    expect(usage.prompt_tokens > 0, f"a prompt of {usage.prompt_tokens} tokens")
    limit = len(text.encode()) + _EXTRA_TOKENS
    expect(
        0 < usage.completion_tokens <= limit,
        f"{usage.completion_tokens} completion tokens for {len(text)} characters",
    )
    return f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens"


async def _no_echo(worker: WorkerClient) -> str:
    for stream in (False, True):
        response = await worker.send(worker.prompt_request(_TWO_LINES, stream=stream))
        text = response.choice.text
        expect(not text.startswith(_TWO_LINES), "the prompt precedes the text")
        expect(not any(isinstance(e, PromptEcho) for e in response.events), "the prompt is echoed")
    return "only new text"


async def _single_start(worker: WorkerClient) -> str:
    response = await worker.send(worker.text_request(COUNT, stream=True))
    expect(response.answer.choices, "the response has no choice")
    starts = sum(isinstance(event, StreamStart) for event in response.events)
    expect(starts <= 1, f"it begins {starts} times")
    return "one start, one end"


async def _content_types(worker: WorkerClient) -> str:
    media_types = []
    for stream in (False, True):
        response = await worker.send(worker.text_request("Say hi.", stream=stream))
        expect(response.result is not None, response.summary)
        content_type = response.headers.get("content-type", "")
        events = not response.body.lstrip().startswith((b"{", b"["))
        expected = "text/event-stream" if events else "application/json"
        media_type = content_type.partition(";")[0].strip().lower()
        expect(media_type == expected, f"a body of {expected} is called {content_type!r}")
        charset = content_type.lower().partition("charset=")[2].strip('" ')
        expect(charset in {"", "utf-8"}, f"the charset is {charset!r}")
        media_types.append(media_type)
    return ", ".join(media_types)


async def _unknown_field(worker: WorkerClient) -> str:
    request = worker.text_request("Say hi.")
    wire = worker.encode(request)
    fields = decode_json(wire.body)
    body = msgspec.json.encode(fields | {"interlingua_probe": 1})
    response = await worker.send_encoded(replace(wire, body=body), request)
    try:
        response.choice  # noqa: B018 - it raises if there is none
    except WorkerRefused:
        worker.quirks.append("unknown parameters are rejected")
        return f"rejected: {response.summary}"
    return "accepted and ignored"


async def _single_token(worker: WorkerClient) -> str:
    request = worker.text_request(COUNT, stream=True, stopping=StopConditions(max_tokens=1))
    choice = (await worker.send(request)).choice
    return f"{choice.text!r}, {choice.finish_reason}"


RESPONSE_PROBES: Final = (
    Probe("health", "The protocol's health endpoint answers with 200.", _health),
    Probe("capacity", "The metadata endpoints of the protocol answer.", _capacity),
    Probe("whole", "A non-streaming response follows the protocol.", _unary),
    Probe("stream", "A streaming response follows the protocol up to its end marker.", _stream),
    Probe("prompt", "The model completes a prompt.", _prompt),
    Probe("model-unknown", "An unknown model is rejected.", _unknown_model),
    Probe(
        "stream-is-whole",
        "A greedy stream has the same text as the non-streaming response.",
        _same_text,
    ),
    Probe(
        "stream-begins-once", "A stream starts once, and nothing follows its end.", _single_start
    ),
    Probe("stream-one-token", "A stream of one token is complete.", _single_token),
    Probe("usage-whole", "A non-streaming response reports usage.", _usage_whole),
    Probe("usage-stream", "A stream reports usage.", _usage_stream),
    Probe("usage-same", "Both report the same usage.", _usage_same),
    Probe("no-echo", "The prompt is not echoed unless requested.", _no_echo),
    Probe("content-types", "The content type matches the body.", _content_types),
    Probe("field-unknown", "An unknown parameter is ignored or rejected.", _unknown_field),
)


# --- messages and texts ---------------------------------------------------------------------------


_EMOJI: Final = "Say this back: 👩‍👩‍👧‍👦 🇫🇷 🏳️‍🌈 日本語 한국어 עברית 𠮷"
_CONTROLS: Final = "a\x00b\x07c\x1bd\x7fe\u2028f\ufefff"
_REPLACEMENT: Final = "\ufffd"
_OVERSIZED_WORDS: Final = 400_000
"""Characters of a prompt that is too long for almost any model: 2 MB."""


async def _round_trip(worker: WorkerClient, text: str, *, stream: bool) -> str:
    response = await worker.send(worker.text_request(text, stream=stream))
    output = response.choice.text + response.choice.reasoning
    expect(_REPLACEMENT not in output, f"characters are broken: {output!r}")
    expect(not _is_double_encoded(output), f"characters are encoded twice: {output!r}")
    if stream:
        _check_split_bytes(worker, text, response, output)
    multibyte = sum(not char.isascii() for char in output)
    return (
        f"{multibyte} characters of several bytes" if multibyte else "the model wrote none of them"
    )


def _is_double_encoded(text: str) -> bool:
    """Whether UTF-8 was decoded as Latin-1."""
    if text.isascii():
        return False
    try:
        text.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return False
    return True


def _check_split_bytes(
    worker: WorkerClient, text: str, response: WorkerResponse, output: str
) -> None:
    """Decode the same bytes one by one, as a network might deliver them."""
    decoder = worker.adapter.create_decoder(worker.text_request(text, stream=True))
    body = response.body
    try:
        events = [event for i in range(len(body)) for event in decoder.feed(body[i : i + 1])]
        answer = fold_events([*events, *decoder.close()])
    except GatewayError as error:
        expect(False, f"byte by byte: {error}")  # noqa: FBT003 - it is the only positional one
    else:
        choice = answer.choices[0]
        expect(choice.text + choice.reasoning == output, "decoded byte by byte, the text differs")


async def _answered_or_refused(worker: WorkerClient, text: str) -> str:
    """The request is answered, or rejected as a client error."""
    try:
        return f"answered: {(await worker.send(worker.text_request(text))).choice.finish_reason}"
    except WorkerRefused as error:
        return f"rejected: {error}"


async def _oversized_prompt(worker: WorkerClient) -> str:
    request = worker.text_request("word " * _OVERSIZED_WORDS, stopping=StopConditions(max_tokens=1))
    response = await worker.send(request)
    try:
        usage = response.answer.usage
    except WorkerRefused:
        if not isinstance(response.error, ContextTooLong):
            worker.quirks.append("the error for a prompt that is too long is not recognised")
        return f"rejected: {response.summary}"
    suffix = f"; usage reports {usage.prompt_tokens} tokens" if usage is not None else ""
    return f"{_OVERSIZED_WORDS} words are accepted{suffix}"


async def _long_prompt(worker: WorkerClient) -> str:
    text = "word " * 300 + "Say hi."
    usage = (await worker.send(worker.text_request(text))).answer.usage
    return "answered" if usage is None else f"answered: {usage.prompt_tokens} tokens"


def _message(role: Role, text: str) -> Message:
    return Message(role, (TextPart(text),))


async def _system_message(worker: WorkerClient) -> str:
    messages = (
        _message("system", "Answer in one word."),
        _message("user", "What is the capital of Italy?"),
    )
    return repr((await worker.send(worker.chat_request(*messages))).choice.text[:40])


async def _several_messages(worker: WorkerClient) -> str:
    messages = (
        _message("user", "My name is Ada."),
        _message("assistant", "Hello Ada."),
        _message("user", "What is my name?"),
    )
    return repr((await worker.send(worker.chat_request(*messages))).choice.text[:40])


async def _text_parts(worker: WorkerClient) -> str:
    message = Message("user", (TextPart("Say "), TextPart("hi.")))
    return repr((await worker.send(worker.chat_request(message))).choice.text[:40])


async def _assistant_first(worker: WorkerClient) -> str:
    messages = (_message("assistant", "Hello."), _message("user", "Say hi."))
    try:
        return (
            f"answered: {(await worker.send(worker.chat_request(*messages))).choice.finish_reason}"
        )
    except WorkerRefused as error:
        return f"rejected: {error}"


MESSAGE_PROBES: Final = (
    Probe("system", "A system message is accepted.", _system_message),
    Probe("turns", "Earlier turns are accepted.", _several_messages),
    Probe("text-parts", "A message of several text parts is accepted.", _text_parts),
    Probe(
        "assistant-first",
        "A conversation that starts with the assistant is accepted or rejected.",
        _assistant_first,
    ),
    Probe(
        "empty", "An empty message is accepted or rejected.", partial(_answered_or_refused, text="")
    ),
    Probe(
        "controls",
        "Control characters are accepted or rejected.",
        partial(_answered_or_refused, text=_CONTROLS),
    ),
    Probe(
        "accents",
        "Letters of two bytes are intact.",
        partial(_round_trip, text=ACCENTS, stream=False),
    ),
    Probe(
        "accents-stream",
        "The same in a stream, however it is split.",
        partial(_round_trip, text=ACCENTS, stream=True),
    ),
    Probe(
        "emoji",
        "Characters of many bytes are intact.",
        partial(_round_trip, text=_EMOJI, stream=False),
    ),
    Probe(
        "emoji-stream",
        "The same in a stream, however it is split.",
        partial(_round_trip, text=_EMOJI, stream=True),
    ),
    Probe("prompt-long", "A long prompt is accepted.", _long_prompt),
    Probe(
        "prompt-too-long",
        "A prompt over any limit is rejected with a client error, or accepted.",
        _oversized_prompt,
    ),
)


# --- embeddings -----------------------------------------------------------------------------------


_TEXTS: Final = ("a cat", "the stock exchange fell by three percent", "ein Löwe")
_SAME_COSINE: Final = 0.999
_TOLERANCE: Final = 1e-3


async def _single_embedding(worker: WorkerClient) -> str:
    [vector] = await _vectors(worker, _TEXTS[0])
    expect(vector, "the embedding is empty")
    expect(
        all(math.isfinite(component) for component in vector), "a component is not a finite number"
    )
    return f"{len(vector)} numbers"


async def _embedding_batch(worker: WorkerClient) -> str:
    vectors = await _vectors(worker, *_TEXTS)
    expect(len(vectors) == len(_TEXTS), f"expected {len(_TEXTS)}, got {len(vectors)}")
    sizes = {len(vector) for vector in vectors}
    expect(len(sizes) == 1, f"of different lengths: {sorted(sizes)}")
    return f"{len(vectors)} of {sizes.pop()} numbers"


async def _embedding_order(worker: WorkerClient) -> str:
    expected = [(await _vectors(worker, vector))[0] for vector in _TEXTS]
    vectors = await _vectors(worker, *_TEXTS)
    expect(len(vectors) == len(_TEXTS), f"expected {len(_TEXTS)}, got {len(vectors)}")
    nearest = [
        max(range(len(expected)), key=lambda n: _cosine(expected[n], vector)) for vector in vectors
    ]
    is_same = all(_cosine(a, b) > _SAME_COSINE for a, b in zip(expected, vectors, strict=True))
    expect(is_same or nearest == [*range(len(expected))], f"they are in another order: {nearest}")
    return "as for single texts" if is_same else "in order, not as for single texts"


async def _base64_embedding(worker: WorkerClient) -> str:
    [numbers] = await _vectors(worker, _TEXTS[0])
    response = await worker.send(worker.embedding_request(_TEXTS[0], encoding="base64"))
    [decoded] = response.answer.embeddings
    expect(len(numbers) == len(decoded), f"{len(decoded)} numbers for {len(numbers)}")
    difference = max(abs(a - b) for a, b in zip(numbers, decoded, strict=True))
    expect(difference <= _TOLERANCE, f"they are {difference:g} apart")
    return "the same numbers"


async def _embedding_usage(worker: WorkerClient) -> str:
    request = worker.embedding_request(*_TEXTS)
    if not reports_usage(worker.adapter, request):
        raise NotOffered("the protocol can't express usage of embeddings")
    usage = (await worker.send(request)).answer.usage
    is_reported = usage is not None and usage.source == "worker" and usage.prompt_tokens > 0
    expect(is_reported, "the response has no usage")
    return f"{usage.prompt_tokens if usage else 0} tokens"


async def _empty_embedding(worker: WorkerClient) -> str:
    try:
        [vector] = await _vectors(worker, "")
    except WorkerRefused as error:
        return f"rejected: {error}"
    return f"{len(vector)} numbers"


async def _vectors(worker: WorkerClient, *texts: str) -> list[tuple[float, ...]]:
    return (await worker.send(worker.embedding_request(*texts))).answer.embeddings


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b):
        return 0.0
    size = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / size if size else 0.0


EMBEDDING_PROBES: Final = (
    Probe("embedding", "A text has an embedding.", _single_embedding),
    Probe(
        "embedding-batch",
        "Several texts have as many embeddings, of one length.",
        _embedding_batch,
        ("inputs",),
    ),
    Probe(
        "embedding-order",
        "Embeddings are in the order of their texts.",
        _embedding_order,
        ("inputs",),
    ),
    Probe("embedding-base64", "Base64 embeddings are the same.", _base64_embedding, ("encoding",)),
    Probe("embedding-usage", "Embeddings report usage.", _embedding_usage),
    Probe("embedding-empty", "An empty text has an embedding, or is rejected.", _empty_embedding),
)
