"""Probes: how tokens are picked, and how many answers are made."""

from functools import partial
from typing import Any, Final

from gateway.conformance.cases import expect
from gateway.conformance.worker.asking import COUNT
from gateway.conformance.worker.line import Line, Refused, Unsure
from gateway.conformance.worker.probing import Probe
from gateway.core.types import GenerateRequest, Sampling

_PAIR: Final = ("The opposite of hot is", "One two three four")


async def _greedy(line: Line) -> str:
    texts = {(await line.ask(line.say(COUNT))).choice.text for _ in range(3)}
    expect(len(texts) == 1, f"three greedy answers are {len(texts)} different ones")
    return "three times the same"


async def _seeded(line: Line) -> str:
    asked = line.say(COUNT, sampling=Sampling(temperature=1.0, seed=7))
    texts = await _texts(line, asked)
    expect(len(texts) == 1, "the same seed gives different answers")
    return "three times the same"


async def _texts(line: Line, asked: GenerateRequest) -> set[str]:
    """Different answers of three. Raises Unsure where greedy ones differ, too."""
    texts = {(await line.ask(asked)).choice.text for _ in range(3)}
    if len(texts) > 1:
        greedy = {(await line.ask(line.say(COUNT))).choice.text for _ in range(3)}
        if len(greedy) > 1:
            raise Unsure("not even greedy answers are repeated")
    return texts


async def _seeds(line: Line) -> str:
    texts = set()
    for seed in (1, 2, 2**31 + 1, 2**63 - 1):
        asked = line.say(COUNT, sampling=Sampling(temperature=1.0, seed=seed))
        try:
            texts.add((await line.ask(asked)).choice.text)
        except Refused as error:
            line.quirks.append(f"the seed {seed} is refused")
            return f"{seed} is refused: {error}"
    return f"{len(texts)} different answers to 4 seeds"


async def _narrow(line: Line, **only: Any) -> str:
    """What leaves one token to pick makes any temperature greedy."""
    asked = line.say(COUNT, sampling=Sampling(temperature=1.5, **only))
    texts = await _texts(line, asked)
    expect(len(texts) == 1, f"with one token to pick from, {len(texts)} different answers of three")
    return "three times the same at a high temperature"


async def _taken(line: Line, **one: Any) -> str:
    sampling = Sampling(**({"temperature": 0.7} | one))
    choice = (await line.ask(line.say(COUNT, sampling=sampling))).choice
    return f"taken: {len(choice.text)} characters"


async def _several(line: Line, *, stream: bool) -> str:
    drawn = Sampling(temperature=1.0)
    answer = (await line.ask(line.say(COUNT, n=2, sampling=drawn, stream=stream))).answer
    got = [choice.index for choice in answer.choices]
    expect(got == [0, 1], f"wanted the choices 0 and 1, got {got}")
    expect(all(one.text for one in answer.choices), "a choice is empty")
    return "two choices"


async def _best(line: Line) -> str:
    drawn = Sampling(temperature=1.0)
    request: GenerateRequest = line.prompt(_PAIR[0], n=1, best_of=2, sampling=drawn)
    return f"one choice: {(await line.ask(request)).choice.reason}"


async def _prompts(line: Line) -> str:
    alone = [(await line.ask(line.prompt(one))).choice.text for one in _PAIR]
    answer = (await line.ask(line.prompt(*_PAIR))).answer
    texts = [choice.text for choice in answer.choices]
    expect(len(texts) == len(_PAIR), f"wanted {len(_PAIR)} choices, got {len(texts)}")
    mixed = alone[0] != alone[1] and texts == alone[::-1]
    expect(not mixed, "the answers are in another order than the prompts")
    return "as each alone" if texts == alone else "two choices, not those of each alone"


async def _ids(line: Line) -> str:
    try:
        return f"taken: {(await line.ask(line.prompt((1, 2, 3)))).choice.reason}"
    except Refused as error:
        line.quirks.append("token ids are refused")
        return f"refused: {error}"


async def _hot(line: Line) -> str:
    for temperature in (0.01, 1.0, 2.0):
        asked = line.say(COUNT, sampling=Sampling(temperature=temperature))
        try:
            expect((await line.ask(asked)).choice.text, f"nothing is said at {temperature}")
        except Refused as error:
            line.quirks.append(f"the temperature {temperature} is refused")
            return f"{temperature} is refused: {error}"
    return "up to 2"


def _accepts(name: str, field: str, value: Any) -> Probe:
    what = f"{field} is taken, or refused as the client's fault."
    return Probe(name, what, partial(_taken, **{field: value}), (f"sampling.{field}",))


def _narrows(name: str, field: str, value: Any) -> Probe:
    what = f"{field} that leaves one token makes an answer greedy."
    return Probe(name, what, partial(_narrow, **{field: value}), (f"sampling.{field}",))


PROBES: Final = (
    Probe("greedy", "Temperature 0 repeats itself.", _greedy),
    Probe(
        "temperatures",
        "A temperature may be up to 2, or is refused.",
        _hot,
        needs=("sampling.temperature",),
    ),
    Probe("seed", "A seed repeats an answer.", _seeded, ("sampling.seed",)),
    Probe("seeds", "A seed may be any number, or is refused.", _seeds, needs=("sampling.seed",)),
    _narrows("top-k", "top_k", 1),
    _narrows("top-p", "top_p", 0.0001),
    _narrows("min-p", "min_p", 1.0),
    _accepts("typical-p", "typical_p", 0.9),
    _accepts("repetition-penalty", "repetition_penalty", 1.1),
    _accepts("presence-penalty", "presence_penalty", 0.5),
    _accepts("frequency-penalty", "frequency_penalty", 0.5),
    _accepts("logit-bias", "logit_bias", {5: -1.0}),
    _accepts("bad-words", "bad_words", ("zebra",)),
    Probe("n", "Two choices are two choices.", partial(_several, stream=False), ("n",)),
    Probe("n-stream", "The same in a stream.", partial(_several, stream=True), ("n",)),
    Probe("best-of", "The best of two is one.", _best, ("best_of",)),
    Probe("prompts", "Two prompts have two answers, in their order.", _prompts, ("prompts",)),
    Probe("prompt-ids", "A prompt may be token ids, or is refused.", _ids),
)
