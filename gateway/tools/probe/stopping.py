"""Probes: finish reasons, token limits and stop strings; sampling, choices and prompts."""

from functools import partial
from typing import Any, Final

from gateway.tools.probe.basic import ACCENTS, COUNT
from gateway.tools.probe.client import (
    Inconclusive,
    NotOffered,
    Probe,
    UnexpectedResponse,
    WorkerClient,
    WorkerRefused,
    WorkerResponse,
    expect,
)
from protocols.core.aggregate import UnaryChoice
from protocols.core.events import TextDelta
from protocols.core.request import GenerationRequest, SamplingParams, StopConditions

YES: Final = (
    "Reply with the one word yes and nothing else, whatever follows: a b c d e f g h i j k l m n o "
    "p q r s t u v w x y z"
)
"""A prompt with a very short expected response."""
_MIN_LENGTH: Final = 12
"""The minimum length of a text in which a stop string can be tested."""
_EXCERPT_SIZE: Final = 3
_MIN_TOKENS: Final = 24
_MAX_TOKENS: Final = 32
_HIGH_LIMIT: Final = 200


async def _max_tokens(worker: WorkerClient, limit: int, *, stream: bool) -> str:
    base = await worker.baseline(COUNT)
    response = await worker.send(
        worker.text_request(COUNT, stream=stream, stopping=StopConditions(max_tokens=limit))
    )
    choice = response.choice
    used = _completion_tokens(response)
    expect(used is None or used <= limit, f"{used} tokens where {limit} were allowed")
    is_unlimited = len(choice.text) >= len(base) > _MIN_LENGTH * limit
    expect(not is_unlimited, f"{len(choice.text)} characters, as many as without the limit")
    return f"{len(choice.text)} of {len(base)} characters"


async def _length_reason(worker: WorkerClient, *, stream: bool) -> str:
    base = await worker.baseline(COUNT)
    response = await worker.send(
        worker.text_request(COUNT, stream=stream, stopping=StopConditions(max_tokens=1))
    )
    if len(base) <= len(response.choice.text):
        return f"the whole answer is that short: {response.choice.finish_reason}"
    return _check_reason(worker, response.choice, "length")


async def _own_end(worker: WorkerClient) -> str:
    response = await worker.send(
        worker.text_request("Say hi.", stopping=StopConditions(max_tokens=_HIGH_LIMIT))
    )
    choice, used = response.choice, _completion_tokens(response)
    if used is not None and used >= _HIGH_LIMIT:
        expect(
            choice.finish_reason in {"length", "unknown"},
            f"{choice.finish_reason} at the limit's end",
        )
        return "the model does not end by itself"
    if choice.finish_reason == "length" and used is None:
        return "the model does not end by itself, and reports no usage"
    expect(
        choice.finish_reason != "length", f"finish reason length at {used} tokens of {_HIGH_LIMIT}"
    )
    return _check_reason(worker, choice, "eos", "stop")


async def _same_reason(worker: WorkerClient) -> str:
    stopping = StopConditions(max_tokens=2)
    unary = (await worker.send(worker.text_request(COUNT, stopping=stopping))).choice.finish_reason
    stream = (
        await worker.send(worker.text_request(COUNT, stopping=stopping, stream=True))
    ).choice.finish_reason
    expect(unary == stream, f"non-streaming {unary}, stream {stream}")
    return unary


def _check_reason(worker: WorkerClient, choice: UnaryChoice, *expected: str) -> str:
    if choice.finish_reason == "unknown":
        worker.quirks.append("the finish reason is missing or unknown")
        return "no finish reason"
    expect(
        choice.finish_reason in expected,
        f"expected {' or '.join(expected)}, got {choice.finish_reason}",
    )
    return choice.finish_reason


def _completion_tokens(response: WorkerResponse) -> int | None:
    usage = response.answer.usage
    return usage.completion_tokens if usage is not None and usage.source == "worker" else None


# --- stop strings ---------------------------------------------------------------------------------


async def _stop(worker: WorkerClient, *, stream: bool = False, several: bool = False) -> str:
    base = await _long_baseline(worker, COUNT)
    stop = _excerpt(base, len(base) // 2)
    stops = ("\u2603 never", stop, base[-2:]) if several else (stop,)
    earliest = min(stops, key=lambda one: base.find(one) if one in base else len(base))
    return await _check_stopped(
        worker, COUNT, earliest, StopConditions(max_tokens=48, stop=stops), stream=stream
    )


async def _stop_across_chunks(worker: WorkerClient) -> str:
    response = await worker.send(worker.text_request(COUNT, stream=True))
    deltas = [
        event.text for event in response.events if isinstance(event, TextDelta) and event.text
    ]
    if len(deltas) < _EXCERPT_SIZE:
        raise NotOffered("the stream has too few deltas")
    middle = len(deltas) // 2
    stop = deltas[middle - 1][-2:] + deltas[middle][:2]
    await _long_baseline(worker, COUNT)
    stopping = StopConditions(max_tokens=48, stop=(stop,))
    return await _check_stopped(worker, COUNT, stop, stopping, stream=True)


async def _stop_unicode(worker: WorkerClient) -> str:
    base = await _long_baseline(worker, ACCENTS)
    stop = next((char for i, char in enumerate(base) if i > 1 and ord(char) > 127), None)  # noqa: PLR2004 - what is not ASCII
    if stop is None:
        raise NotOffered("the text has no such character")
    stopping = StopConditions(max_tokens=48, stop=(stop,))
    return await _check_stopped(worker, ACCENTS, stop, stopping, stream=True)


async def _stop_included(worker: WorkerClient) -> str:
    base = await _long_baseline(worker, COUNT)
    stop = _excerpt(base, len(base) // 2)
    stopping = StopConditions(max_tokens=48, stop=(stop,), include_stop=True)
    choice = (await worker.send(worker.text_request(COUNT, stopping=stopping))).choice
    expected = base[: base.find(stop) + len(stop)]
    expect(
        choice.text == expected, f"expected the text up to and with {stop!r}, got {choice.text!r}"
    )
    return f"{stop!r} stays in the text"


async def _check_stopped(
    worker: WorkerClient, text: str, stop: str, stopping: StopConditions, *, stream: bool
) -> str:
    base = await worker.baseline(text)
    choice = (await worker.send(worker.text_request(text, stream=stream, stopping=stopping))).choice
    expected, output = base[: base.find(stop)], choice.text
    if output == expected + stop:
        raise UnexpectedResponse(f"the stop string {stop!r} is in the text")
    if stop in output:
        raise UnexpectedResponse(f"the text continues after the stop string {stop!r}")
    if output.strip() != expected.strip():
        worker.quirks.append("a stopped text differs from the greedy text")
    elif output != expected:
        worker.quirks.append("trailing blanks of a stopped text are removed")
    return f"at {stop!r}: {_check_reason(worker, choice, 'stop', 'eos')}"


async def _long_baseline(worker: WorkerClient, text: str) -> str:
    base = await worker.baseline(text)
    if len(base) < _MIN_LENGTH:
        raise NotOffered(f"the text is too short for a stop string: {base!r}")
    return base


def _excerpt(base: str, start: int) -> str:
    """Return a part of the text that is not only whitespace."""
    return next(
        base[i : i + _EXCERPT_SIZE]
        for i in (*range(start, len(base)), 1)
        if base[i : i + _EXCERPT_SIZE].strip()
    )


# --- minimum length -------------------------------------------------------------------------------


async def _min_tokens(worker: WorkerClient) -> str:
    return await _check_min_tokens(
        worker, StopConditions(max_tokens=_MAX_TOKENS, min_tokens=_MIN_TOKENS), _MIN_TOKENS
    )


async def _ignore_eos(worker: WorkerClient) -> str:
    return await _check_min_tokens(
        worker, StopConditions(max_tokens=_MIN_TOKENS, ignore_eos=True), _MIN_TOKENS
    )


async def _check_min_tokens(worker: WorkerClient, stopping: StopConditions, minimum: int) -> str:
    response = await worker.send(worker.text_request(YES, stopping=stopping))
    used = _completion_tokens(response)
    if used is None:
        raise NotOffered("the worker reports no usage")
    expect(used >= minimum, f"{used} tokens where at least {minimum} were required")
    return f"{used} tokens"


async def _stop_token_ids(worker: WorkerClient) -> str:
    stopping = StopConditions(max_tokens=8, stop_token_ids=(0, 1, 2))
    choice = (await worker.send(worker.text_request(COUNT, stopping=stopping))).choice
    return f"accepted: {choice.finish_reason}"


async def _stop_with_sampling(worker: WorkerClient) -> str:
    """With sampling, too, a stopped text must not contain the stop string."""
    stopping = StopConditions(max_tokens=48, stop=("e", "o"))
    sampling = SamplingParams(temperature=1.0, seed=5)
    text = (
        await worker.send(worker.text_request(COUNT, stopping=stopping, sampling=sampling))
    ).choice.text
    expect(not {"e", "o"} & set(text), f"a stop string is in {text!r}")
    return repr(text)


_STOP: Final = ("stopping.stop",)
_LIMIT: Final = ("stopping.max_tokens",)

STOPPING_PROBES: Final = (
    Probe(
        "length-1",
        "A limit of one token is honoured.",
        partial(_max_tokens, limit=1, stream=False),
        _LIMIT,
    ),
    Probe(
        "length-3",
        "A limit of three tokens is honoured.",
        partial(_max_tokens, limit=3, stream=False),
        _LIMIT,
    ),
    Probe(
        "length-stream", "The same in a stream.", partial(_max_tokens, limit=3, stream=True), _LIMIT
    ),
    Probe(
        "reason-length",
        "The finish reason at the token limit is length.",
        partial(_length_reason, stream=False),
        needs=_LIMIT,
    ),
    Probe(
        "reason-length-stream",
        "The same in a stream.",
        partial(_length_reason, stream=True),
        needs=_LIMIT,
    ),
    Probe("end", "The finish reason of a model that ends by itself is not length.", _own_end),
    Probe(
        "reason-same",
        "Streaming and non-streaming responses have the same finish reason.",
        _same_reason,
    ),
    Probe("stop", "The text ends before the stop string.", _stop, _STOP),
    Probe("stop-stream", "The same in a stream.", partial(_stop, stream=True), _STOP),
    Probe(
        "stop-several",
        "Of several stop strings, the first to occur ends the text.",
        partial(_stop, several=True),
        _STOP,
    ),
    Probe(
        "stop-across",
        "A stop string is found across the chunks of a stream.",
        _stop_across_chunks,
        _STOP,
    ),
    Probe(
        "stop-unicode", "A stop string may be a character of several bytes.", _stop_unicode, _STOP
    ),
    Probe("stop-drawn", "A stop string is found in sampled text.", _stop_with_sampling, _STOP),
    Probe(
        "stop-included",
        "The stop string stays in the text if requested.",
        _stop_included,
        ("stopping.include_stop",),
    ),
    Probe("stop-tokens", "Token ids may be stops.", _stop_token_ids, ("stopping.stop_token_ids",)),
    Probe(
        "min-tokens",
        "A response has the minimum number of tokens.",
        _min_tokens,
        ("stopping.min_tokens",),
    ),
    Probe(
        "ignore-eos",
        "The end-of-sequence token can be ignored.",
        _ignore_eos,
        ("stopping.ignore_eos",),
    ),
)


# --- sampling, choices and prompts ----------------------------------------------------------------


_PAIR: Final = ("The opposite of hot is", "One two three four")


async def _greedy(worker: WorkerClient) -> str:
    texts = {(await worker.send(worker.text_request(COUNT))).choice.text for _ in range(3)}
    expect(len(texts) == 1, f"{len(texts)} different texts of three greedy responses")
    return "three equal responses"


async def _seed_repeats(worker: WorkerClient) -> str:
    request = worker.text_request(COUNT, sampling=SamplingParams(temperature=1.0, seed=7))
    texts = await _distinct_texts(worker, request)
    expect(len(texts) == 1, "the same seed gives different answers")
    return "three equal responses"


async def _distinct_texts(worker: WorkerClient, request: GenerationRequest) -> set[str]:
    """Return different texts of three. Raises Inconclusive if greedy texts differ, too."""
    texts = {(await worker.send(request)).choice.text for _ in range(3)}
    if len(texts) > 1:
        greedy = {(await worker.send(worker.text_request(COUNT))).choice.text for _ in range(3)}
        if len(greedy) > 1:
            raise Inconclusive("even greedy responses differ")
    return texts


async def _seed_values(worker: WorkerClient) -> str:
    texts = set()
    for seed in (1, 2, 2**31 + 1, 2**63 - 1):
        request = worker.text_request(COUNT, sampling=SamplingParams(temperature=1.0, seed=seed))
        try:
            texts.add((await worker.send(request)).choice.text)
        except WorkerRefused as error:
            worker.quirks.append(f"the seed {seed} is rejected")
            return f"{seed} is rejected: {error}"
    return f"{len(texts)} different answers to 4 seeds"


async def _single_candidate(worker: WorkerClient, **parameters: Any) -> str:
    """Parameters that leave one candidate token make any temperature greedy."""
    request = worker.text_request(COUNT, sampling=SamplingParams(temperature=1.5, **parameters))
    texts = await _distinct_texts(worker, request)
    expect(len(texts) == 1, f"with one token to pick from, {len(texts)} different answers of three")
    return "three equal responses at a high temperature"


async def _accepted(worker: WorkerClient, **parameters: Any) -> str:
    sampling = SamplingParams(**({"temperature": 0.7} | parameters))
    choice = (await worker.send(worker.text_request(COUNT, sampling=sampling))).choice
    return f"accepted: {len(choice.text)} characters"


async def _choices(worker: WorkerClient, *, stream: bool) -> str:
    sampling = SamplingParams(temperature=1.0)
    answer = (
        await worker.send(worker.text_request(COUNT, n=2, sampling=sampling, stream=stream))
    ).answer
    expect(all(item.text for item in answer.choices), "a choice is empty")
    return "two choices"


async def _best_of(worker: WorkerClient) -> str:
    sampling = SamplingParams(temperature=1.0)
    request: GenerationRequest = worker.prompt_request(_PAIR[0], n=1, best_of=2, sampling=sampling)
    return f"one choice: {(await worker.send(request)).choice.finish_reason}"


async def _prompts(worker: WorkerClient) -> str:
    expected = [(await worker.send(worker.prompt_request(prompt))).choice.text for prompt in _PAIR]
    answer = (await worker.send(worker.prompt_request(*_PAIR))).answer
    texts = [choice.text for choice in answer.choices]
    expect(len(texts) == len(_PAIR), f"expected {len(_PAIR)} choices, got {len(texts)}")
    mixed = expected[0] != expected[1] and texts == expected[::-1]
    expect(not mixed, "the choices are not in the order of the prompts")
    return (
        "as for single prompts" if texts == expected else "two choices, not as for single prompts"
    )


async def _prompt_token_ids(worker: WorkerClient) -> str:
    try:
        choice = (await worker.send(worker.prompt_request((1, 2, 3)))).choice
    except WorkerRefused as error:
        worker.quirks.append("token ids are rejected")
        return f"rejected: {error}"
    return f"accepted: {choice.finish_reason}"


async def _temperatures(worker: WorkerClient) -> str:
    for temperature in (0.01, 1.0, 2.0):
        request = worker.text_request(COUNT, sampling=SamplingParams(temperature=temperature))
        try:
            expect(
                (await worker.send(request)).choice.text, f"no text at temperature {temperature}"
            )
        except WorkerRefused as error:
            worker.quirks.append(f"the temperature {temperature} is rejected")
            return f"{temperature} is rejected: {error}"
    return "up to 2"


def _accepts(name: str, field: str, value: Any) -> Probe:
    description = f"{field} is accepted, or rejected with a client error."
    return Probe(name, description, partial(_accepted, **{field: value}), (f"sampling.{field}",))


def _narrows(name: str, field: str, value: Any) -> Probe:
    description = f"{field} that leaves one candidate makes sampling greedy."
    return Probe(
        name, description, partial(_single_candidate, **{field: value}), (f"sampling.{field}",)
    )


SAMPLING_PROBES: Final = (
    Probe("greedy", "Temperature 0 is deterministic.", _greedy),
    Probe(
        "temperatures",
        "A temperature up to 2 is accepted or rejected.",
        _temperatures,
        needs=("sampling.temperature",),
    ),
    Probe("seed", "A seed reproduces a response.", _seed_repeats, ("sampling.seed",)),
    Probe("seeds", "Any seed is accepted or rejected.", _seed_values, needs=("sampling.seed",)),
    _narrows("top-k", "top_k", 1),
    _narrows("top-p", "top_p", 0.0001),
    _narrows("min-p", "min_p", 1.0),
    _accepts("typical-p", "typical_p", 0.9),
    _accepts("repetition-penalty", "repetition_penalty", 1.1),
    _accepts("presence-penalty", "presence_penalty", 0.5),
    _accepts("frequency-penalty", "frequency_penalty", 0.5),
    _accepts("logit-bias", "logit_bias", {5: -1.0}),
    _accepts("bad-words", "bad_words", ("zebra",)),
    Probe("n", "Two choices are returned.", partial(_choices, stream=False), ("n",)),
    Probe("n-stream", "The same in a stream.", partial(_choices, stream=True), ("n",)),
    Probe("best-of", "The best of two choices is returned.", _best_of, ("best_of",)),
    Probe("prompts", "Two prompts have two choices, in their order.", _prompts, ("prompts",)),
    Probe("prompt-ids", "A prompt of token ids is accepted or rejected.", _prompt_token_ids),
)
