"""Probes: embeddings."""

import math
from collections.abc import Sequence
from typing import Final

from gateway.conformance.cases import expect
from gateway.conformance.worker.line import Line, Refused
from gateway.conformance.worker.probing import Probe

_TEXTS: Final = ("a cat", "the stock exchange fell by three percent", "ein Löwe")
_ALIKE: Final = 0.999
_CLOSE: Final = 1e-3


async def _one(line: Line) -> str:
    [vector] = await _vectors(line, _TEXTS[0])
    expect(vector, "it is empty")
    expect(all(math.isfinite(one) for one in vector), "it has what is no number")
    return f"{len(vector)} numbers"


async def _batch(line: Line) -> str:
    found = await _vectors(line, *_TEXTS)
    expect(len(found) == len(_TEXTS), f"wanted {len(_TEXTS)}, got {len(found)}")
    sizes = {len(one) for one in found}
    expect(len(sizes) == 1, f"of different lengths: {sorted(sizes)}")
    return f"{len(found)} of {sizes.pop()} numbers"


async def _order(line: Line) -> str:
    alone = [(await _vectors(line, one))[0] for one in _TEXTS]
    found = await _vectors(line, *_TEXTS)
    expect(len(found) == len(_TEXTS), f"wanted {len(_TEXTS)}, got {len(found)}")
    near = [max(range(len(alone)), key=lambda n: _cosine(alone[n], one)) for one in found]
    good = all(_cosine(a, b) > _ALIKE for a, b in zip(alone, found, strict=True))
    expect(good or near == [*range(len(alone))], f"they come in another order: {near}")
    return "as each alone" if good else "in their order, though not as each alone"


async def _base64(line: Line) -> str:
    [plain] = await _vectors(line, _TEXTS[0])
    heard = await line.ask(line.embed(_TEXTS[0], encoding="base64"))
    [packed] = heard.answer.vectors
    expect(len(plain) == len(packed), f"{len(packed)} numbers for {len(plain)}")
    apart = max(abs(a - b) for a, b in zip(plain, packed, strict=True))
    expect(apart <= _CLOSE, f"they are {apart:g} apart")
    return "the same numbers"


async def _usage(line: Line) -> str:
    usage = (await line.ask(line.embed(*_TEXTS))).answer.usage
    told = usage is not None and usage.source == "worker" and usage.prompt_tokens > 0
    expect(told, "no usage came")
    return f"{usage.prompt_tokens if usage else 0} tokens"


async def _empty(line: Line) -> str:
    try:
        [vector] = await _vectors(line, "")
    except Refused as error:
        return f"refused: {error}"
    return f"{len(vector)} numbers"


async def _vectors(line: Line, *texts: str) -> list[tuple[float, ...]]:
    return (await line.ask(line.embed(*texts))).answer.vectors


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b):
        return 0.0
    size = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / size if size else 0.0


PROBES: Final = (
    Probe("embedding", "A text has its vector.", _one),
    Probe("embedding-batch", "Several texts have as many vectors, of one length.", _batch,
          ("inputs",)),
    Probe("embedding-order", "Vectors come in the order of their texts.", _order, ("inputs",)),
    Probe("embedding-base64", "Packed vectors are the same.", _base64, ("encoding",)),
    Probe("embedding-usage", "Their tokens are told.", _usage),
    Probe("embedding-empty", "A text of nothing has a vector, or is refused.", _empty),
)  # fmt: skip
