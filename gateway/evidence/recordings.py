"""Two sets of recorded requests: which measures differ, by how much, and how certainly.

Requests are compared in pairs where the second set replays the first, or both are replays of the
same requests. The intervals of a report hold all together with the stated confidence (Bonferroni),
and each verdict follows from its interval.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Final

from msgspec import Struct

from gateway.evidence.judge import Judging, measure_judging
from gateway.evidence.measures import Better, MeasureResult, Unit, judge, sort_results
from gateway.evidence.observation import Observation, Pair, describe_prompt, observe
from gateway.evidence.statistics import (
    ExactSample,
    Interval,
    binomial_p_value,
    difference_interval,
    fisher_p_value,
    mean_interval,
    normal_quantile,
    required_per_version,
    welch_interval,
    wilson_interval,
    z_score,
)
from gateway.observability.recording import RecordedRequest

_RELEVANT_SHARE: Final = 0.05
"""The difference of two shares that matters, for "not enough data"."""
_RELEVANT_RATIO: Final = 1.1
"""The ratio of two amounts that matters."""
_POWER: Final = 0.8
_MIN_PAIRS: Final = 2
_MAX_EXAMPLES: Final = 12
_MAX_TEXT: Final = 2000
"""Characters of a text in an example, and of those whose similarity is computed."""
_MAX_SIMILARITIES: Final = 500
_MAX_TARGETS: Final = 3


class Measure(Struct, frozen=True):
    """Something that each request has or has not (a share), or an amount."""

    name: str
    unit: Unit
    better: Better
    read: Callable[[Observation], float | None]
    """The value; for shares 0 or 1. None: it does not apply."""
    is_time: bool = False
    """Whether it depends on the machine at that moment."""


def _is_cut(one: Observation) -> float | None:
    return "length" in one.finish_reasons if one.is_answered else None


_CUT: Final = "responses cut at their limit"
_FAILED: Final = "failed requests"
_EARLY: Final = "responses that end early"
_TOKENS: Final = "completion tokens"
_DURATION: Final = "duration"
_RELATIVE_DURATION: Final = "duration per token"

MEASURES: Final = (
    Measure("refused requests", "share", "lower", lambda one: one.is_refused),
    Measure(_FAILED, "share", "lower", lambda one: one.is_failed),
    Measure("requests that lose parameters", "share", "lower", lambda one: bool(one.losses)),
    Measure("responses that call a tool", "share", "not lower", lambda one: one.calls_tools),
    Measure("valid tool arguments", "share", "higher", lambda one: one.has_valid_arguments),
    Measure("valid JSON", "share", "higher", lambda one: one.is_json),
    Measure("responses with a stop string", "share", "lower", lambda one: one.ignores_stop),
    Measure("responses beyond their limit", "share", "lower", lambda one: one.exceeds_limit),
    Measure("empty responses", "share", "lower", lambda one: one.is_empty),
    Measure("responses that decline", "share", "lower", lambda one: one.declines),
    Measure(_CUT, "share", "lower", _is_cut),
    Measure(_TOKENS, "tokens", "neither", lambda one: one.completion_tokens),
    Measure(_DURATION, "seconds", "lower", lambda one: one.duration, is_time=True),
    Measure(
        "time to the first token", "seconds", "lower", lambda one: one.first_token, is_time=True
    ),
    Measure(
        _RELATIVE_DURATION, "seconds", "lower", lambda one: one.duration_per_token, is_time=True
    ),
)
_ENDS_EARLY: Final = Measure(_EARLY, "share", "lower", lambda _: None)
"""Of pairs: the text is the beginning of the other side's."""


class Example(Struct):
    """A pair of responses."""

    id: str
    reason: str
    prompt: str
    a: str
    b: str


class TextComparison(Struct):
    """How similar the texts of pairs are."""

    n: int
    equal: float
    """The share of equal texts."""
    equal_normalised: float
    """The share of those that are equal but for case and white space."""
    similarity: float
    """The mean similarity, from 0 to 1."""
    method: str


class CompareSide(Struct):
    """One of the two sets."""

    name: str
    requests: int
    targets: list[str]
    """What answered: workers, or models with their versions."""
    first_at: float
    """When the first request came, in Unix seconds."""
    last_at: float


class CompareReport(Struct):
    """The comparison of two recordings."""

    a: CompareSide
    b: CompareSide
    pairs: int
    """0 if the requests are not compared in pairs."""
    is_simultaneous: bool
    """Whether both sides answered at the same time, so that times can be compared."""
    confidence: float
    measures: list[MeasureResult]
    """Those that differ first."""
    losses: list[tuple[str, int, int]]
    """Lost parameters, and how many requests of each side lose them."""
    errors: list[tuple[str, int, int]]
    """Statuses and classes of errors."""
    finish_reasons: list[tuple[str, int, int]]
    texts: TextComparison | None
    examples: list[Example]
    distributions: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    """The sorted values of each amount of both sides, for plots."""
    judging: Judging | None = None


class Similarity(Struct, frozen=True):
    """How similar texts are."""

    compute: Callable[[Sequence[tuple[str, str]]], Sequence[float]]
    """The similarity of pairs of texts, from 0 to 1."""
    method: str


def compare_text(pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
    """The share of characters that both texts have in common, in their order."""
    return [
        SequenceMatcher(None, a[:_MAX_TEXT], b[:_MAX_TEXT], autojunk=False).ratio()
        for a, b in pairs
    ]


COMMON_CHARACTERS: Final = Similarity(compare_text, "common characters")


def pair_requests(
    a: Iterable[RecordedRequest], b: Iterable[RecordedRequest]
) -> tuple[list[Observation], list[Observation], list[Pair]]:
    """The requests of both sides, and the pairs of each request with its replay.

    Two replays of one run are pairs; without replays, requests with the same id are.
    """
    side_a, side_b = [observe(one) for one in a], [observe(one) for one in b]
    originals = dict[tuple[str, str], Observation]()
    for one in side_a:
        originals[one.recorded.replay_run, one.recorded.replay_of or one.recorded.id] = one
    pairs = []
    for one in side_b:
        original_id = one.recorded.replay_of or one.recorded.id
        original = originals.pop((one.recorded.replay_run, original_id), None)
        if original is None:
            original = originals.pop(("", original_id), None)
        if original is not None:
            pairs.append((original, one))
    return side_a, side_b, pairs


def compare(
    names: tuple[str, str],
    a: Iterable[RecordedRequest],
    b: Iterable[RecordedRequest],
    *,
    confidence: float = 0.95,
    similarity: Similarity = COMMON_CHARACTERS,
    share_traffic: bool = False,
    judging: Judging | None = None,
) -> CompareReport:
    """Compare two sets of requests. ``share_traffic``: a split sent both at the same time.

    ``judging``: what a judge says of the pairs, which is one more row.
    """
    side_a, side_b, pairs = pair_requests(a, b)
    is_simultaneous = share_traffic
    if pairs:
        side_a, side_b = [one for one, _ in pairs], [one for _, one in pairs]
        is_simultaneous = all(_are_simultaneous(*pair) for pair in pairs)
    texts, similarities = _compare_texts(pairs, similarity)
    return CompareReport(
        a=_describe_side(names[0], side_a),
        b=_describe_side(names[1], side_b),
        pairs=len(pairs),
        is_simultaneous=is_simultaneous,
        confidence=confidence,
        measures=_measure(
            (side_a, side_b), pairs, confidence, judging, is_simultaneous=is_simultaneous
        ),
        losses=_count(side_a, side_b, lambda one: one.losses),
        errors=_count(side_a, side_b, _describe_error),
        finish_reasons=_count(side_a, side_b, lambda one: one.finish_reasons),
        texts=texts,
        examples=_choose_examples(pairs, similarities),
        distributions={
            measure.name: (_sorted_values(measure, side_a), _sorted_values(measure, side_b))
            for measure in MEASURES
            if measure.unit != "share"
        },
        judging=judging,
    )


def _are_simultaneous(a: Observation, b: Observation) -> bool:
    return a.recorded.replay_run == b.recorded.replay_run != ""


def _describe_side(name: str, side: Sequence[Observation]) -> CompareSide:
    targets = Counter(
        one.recorded.replay_target or f"{one.recorded.model}@{one.recorded.version}".rstrip("@")
        for one in side
    )
    times = [one.recorded.at for one in side]
    return CompareSide(
        name, len(side), [target for target, _ in targets.most_common(_MAX_TARGETS) if target],
        min(times, default=0.0), max(times, default=0.0),
    )  # fmt: skip


def describe_side(side: CompareSide) -> str:
    """The side in words: its name, what answered, how many requests, and when."""
    targets = (
        f" ({', '.join(side.targets)})" if side.targets and side.targets != [side.name] else ""
    )
    first, last = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) for at in (side.first_at, side.last_at)
    )
    return f"{side.name}{targets}, {side.requests:,} requests, {first} to {last} UTC"


_Values = tuple[Sequence[float], Sequence[float]]


def _measure(
    sides: tuple[Sequence[Observation], Sequence[Observation]],
    pairs: Sequence[Pair],
    confidence: float,
    judging: Judging | None,
    *,
    is_simultaneous: bool,
) -> list[MeasureResult]:
    """All measures that apply, with intervals that hold together, those that differ first."""
    found = [(measure, _read_values(measure, *sides, pairs)) for measure in MEASURES]
    found.append((_ENDS_EARLY, _read_beginnings(pairs)))
    found = [(measure, values) for measure, values in found if values[0] and values[1]]
    level = 1 - (1 - confidence) / max(1, len(found) + (judging is not None))
    results = [] if judging is None else [measure_judging(judging, level)]
    for measure, values in found:
        kind = "shares" if measure.unit == "share" else "amounts"
        result = _COMPARE[kind, bool(pairs)](measure, values, level)
        judge(result, _RELEVANT_SHARE if measure.unit == "share" else _RELEVANT_RATIO)
        if measure.is_time and not is_simultaneous:
            result.verdict, result.difference, result.missing = "not judged", None, 0
            result.note = "the sides answered at different times: replay to both in one run"
        results.append(result)
    _relate({result.measure: result for result in results})
    return sort_results(results)


def _read_values(
    measure: Measure, a: Sequence[Observation], b: Sequence[Observation], pairs: Sequence[Pair]
) -> _Values:
    """The values of both sides; of pairs, those to which the measure applies on both."""
    if not pairs:
        first, second = (
            [float(value) for one in side if (value := measure.read(one)) is not None]
            for side in (a, b)
        )
        return first, second
    read = [(measure.read(one), measure.read(other)) for one, other in pairs]
    both = [(float(x), float(y)) for x, y in read if x is not None and y is not None]
    return [x for x, _ in both], [y for _, y in both]


def _read_beginnings(pairs: Sequence[Pair]) -> _Values:
    """Of each pair, whether the one text is only the beginning of the other.

    It is not if the other text goes on past a stop string or the limit, which it should not.
    """
    values = [
        (_is_beginning(a.text, b.text), _is_beginning(b.text, a.text))
        for a, b in pairs
        if a.is_answered and b.is_answered and not (_goes_on(a) or _goes_on(b))
        if a.text and b.text
    ]
    return [x for x, _ in values], [y for _, y in values]


def _is_beginning(text: str, other: str) -> float:
    return float(len(text) < len(other) and other.startswith(text))


def _goes_on(one: Observation) -> bool:
    return bool(one.ignores_stop or one.exceeds_limit)


def _relate(results: Mapping[str, MeasureResult]) -> None:
    """Fewer tokens are worse where answers are cut, and no gain in speed by themselves."""
    tokens, duration = results.get(_TOKENS), results.get(_DURATION)
    if tokens is None or tokens.verdict != "different" or tokens.is_higher:
        return
    if any(
        name in results and results[name].verdict == "worse" for name in (_CUT, _EARLY, _FAILED)
    ):
        tokens.verdict, tokens.note = "worse", "the responses are cut"
    per_token = results.get(_RELATIVE_DURATION)
    if duration is not None and duration.verdict == "better":
        duration.note = f"the responses are shorter: see {_RELATIVE_DURATION}"
        if per_token is None or per_token.verdict != "better":
            duration.verdict = "different"


def _compare_paired_shares(measure: Measure, values: _Values, confidence: float) -> MeasureResult:
    """The interval of Agresti and Min, which includes 0 unless McNemar's exact test rejects it.

    Half a pair is added to each number of pairs. Source: Statistics in Medicine 24 (2005), 729-740.
    """
    a, b = values
    n = len(a)
    gained = sum(x < y for x, y in zip(a, b, strict=True))
    lost = sum(x > y for x, y in zip(a, b, strict=True))
    d, total = gained - lost, n + 2
    spread = math.sqrt(max(gained + lost + 1 - d * d / total, 0)) / total
    half = z_score(confidence) * spread
    interval = Interval(d / n, max(-1.0, d / total - half), min(1.0, d / total + half))
    p = binomial_p_value(gained, gained + lost)
    discordant = max((gained + lost) / n, _RELEVANT_SHARE)
    needed = math.ceil(_sum_of_quantiles(confidence) ** 2 * discordant / _RELEVANT_SHARE**2)
    return MeasureResult(
        measure=measure.name,
        unit=measure.unit,
        better=measure.better,
        n=n,
        a=sum(a) / n,
        b=sum(b) / n,
        difference=_include_zero(interval, p, confidence),
        method="McNemar",
        missing=max(needed - n, 0),
    )


def _compare_paired_amounts(measure: Measure, values: _Values, confidence: float) -> MeasureResult:
    """Student's interval of the logarithms' differences, and so of the ratio of geometric means.

    Where all differences are equal, the sign test says how certain that is.
    """
    differences = [_log(y) - _log(x) for x, y in zip(*values, strict=True)]
    sample = ExactSample()
    sample.extend(differences)
    mean = sample.mean()
    assert mean is not None  # noqa: S101 - there are values
    interval = mean_interval(mean, confidence) if mean.n >= _MIN_PAIRS else None
    if interval is not None and interval.low == interval.high:
        higher = sum(one > 0 for one in differences)
        p = binomial_p_value(higher, sum(one != 0 for one in differences))
        interval = _include_zero(interval, p, confidence)
    needed = math.ceil(
        mean.variance * (_sum_of_quantiles(confidence) / math.log(_RELEVANT_RATIO)) ** 2
    )
    return _build_amount(measure, values, interval, max(needed, _MIN_PAIRS), "Student, log")


def _compare_shares(measure: Measure, values: _Values, confidence: float) -> MeasureResult:
    """Newcombe's interval, which includes 0 unless Fisher's exact test rejects it."""
    a, b = values
    hits = (round(sum(a)), round(sum(b)))
    first, second = (
        wilson_interval(count, len(side), confidence)
        for count, side in zip(hits, values, strict=True)
    )
    share = sum(hits) / (len(a) + len(b))
    variance = max(share * (1 - share), _RELEVANT_SHARE * (1 - _RELEVANT_SHARE))
    needed = required_per_version(variance, _RELEVANT_SHARE, confidence)
    p = fisher_p_value(hits[0], len(a), hits[1], len(b))
    return MeasureResult(
        measure=measure.name,
        unit=measure.unit,
        better=measure.better,
        n=min(len(a), len(b)),
        a=first.value,
        b=second.value,
        difference=_include_zero(difference_interval(first, second), p, confidence),
        method="Newcombe",
        missing=max(needed - min(len(a), len(b)), 0),
    )


def _compare_amounts(measure: Measure, values: _Values, confidence: float) -> MeasureResult:
    """Welch's interval of the logarithms, and so of the ratio of geometric means."""
    means = []
    for side in values:
        sample = ExactSample()
        sample.extend([_log(value) for value in side])
        means.append(sample.mean())
    interval = welch_interval(means[0], means[1], confidence)
    variance = sum(mean.variance for mean in means if mean is not None) / 2
    needed = required_per_version(variance, math.log(_RELEVANT_RATIO), confidence)
    return _build_amount(measure, values, interval, needed, "Welch, log")


_COMPARE: Final = {
    ("shares", True): _compare_paired_shares,
    ("shares", False): _compare_shares,
    ("amounts", True): _compare_paired_amounts,
    ("amounts", False): _compare_amounts,
}


def _include_zero(interval: Interval, p: float, confidence: float) -> Interval:
    """The interval, with 0 unless the exact test with this p-value rejects it."""
    if p <= 1 - confidence:
        return interval
    return Interval(interval.value, min(interval.low, 0.0), max(interval.high, 0.0))


def _build_amount(
    measure: Measure, values: _Values, interval: Interval | None, needed: int, method: str
) -> MeasureResult:
    """``interval`` is that of the difference of the logarithms."""
    n = min(map(len, values))
    a, b = map(_median, values)
    ratio = None
    if interval is not None:
        ratio = Interval(
            *(math.exp(each) for each in (interval.value, interval.low, interval.high))
        )
    return MeasureResult(
        measure=measure.name,
        unit=measure.unit,
        better=measure.better,
        scale="ratio",
        n=n,
        a=a,
        b=b,
        difference=ratio,
        method=method,
        missing=max(needed - n, 0),
    )


def _log(value: float) -> float:
    """The logarithm; amounts of zero are possible."""
    return math.log(max(value, 1e-6))


def _median(values: Sequence[float]) -> float:
    sample = ExactSample()
    sample.extend(values)
    return sample.quantile(0.5)


def _sum_of_quantiles(confidence: float) -> float:
    return z_score(confidence) + normal_quantile(_POWER)


def _count(
    a: Sequence[Observation],
    b: Sequence[Observation],
    read: Callable[[Observation], Iterable[str]],
) -> list[tuple[str, int, int]]:
    """How many requests of each side have each value, the largest differences first."""
    first = Counter(value for one in a for value in set(read(one)))
    second = Counter(value for one in b for value in set(read(one)))
    names = sorted({*first, *second}, key=lambda name: (-abs(second[name] - first[name]), name))
    return [(name, first[name], second[name]) for name in names]


def _describe_error(one: Observation) -> Sequence[str]:
    if one.is_answered:
        return ()
    return (f"{one.recorded.status} {one.recorded.error or one.recorded.outcome}",)


def _sorted_values(measure: Measure, side: Sequence[Observation]) -> Sequence[float]:
    return sorted(float(value) for one in side if (value := measure.read(one)) is not None)


def _compare_texts(
    pairs: Sequence[Pair], similarity: Similarity
) -> tuple[TextComparison | None, Mapping[str, float]]:
    """The comparison of the texts, and the similarity of each pair by the id of its request."""
    answered = [
        (a, b)
        for a, b in pairs
        if a.is_answered and b.is_answered and (a.text.strip() or b.text.strip())
    ]
    if not answered:
        return None, {}
    texts = [(a.text, b.text) for a, b in answered]
    values = similarity.compute(texts[:_MAX_SIMILARITIES])
    normalised = [(" ".join(a.split()).lower(), " ".join(b.split()).lower()) for a, b in texts]
    return (
        TextComparison(
            len(texts),
            sum(a == b for a, b in texts) / len(texts),
            sum(a == b for a, b in normalised) / len(texts),
            sum(values) / len(values),
            similarity.method,
        ),
        {a.recorded.id: value for (a, _), value in zip(answered, values, strict=False)},
    )


_FLAGS: Final[Sequence[tuple[str, Callable[[Observation], bool]]]] = (
    ("is refused now", lambda one: one.is_refused),
    ("fails now", lambda one: one.is_failed),
    ("is no valid JSON now", lambda one: one.is_json is False),
    ("has invalid tool arguments now", lambda one: one.has_valid_arguments is False),
    ("calls no tool now", lambda one: one.calls_tools is False),
    ("contains a stop string now", lambda one: one.ignores_stop is True),
    ("is empty now", lambda one: one.is_empty is True),
    ("declines now", lambda one: one.declines is True),
    ("loses parameters now", lambda one: bool(one.losses)),
)


def _choose_examples(pairs: Sequence[Pair], similarities: Mapping[str, float]) -> list[Example]:
    """Pairs with the worst changes, a few of each kind, and those with the least similarity."""
    chosen = dict[str, Example]()
    for reason, has_flag in _FLAGS:
        found = [
            (a, b)
            for a, b in pairs
            if has_flag(b) and not has_flag(a) and a.recorded.id not in chosen
        ]
        for a, b in found[:_EXAMPLES_OF_A_KIND]:
            chosen[a.recorded.id] = _build_example(a, b, reason)
    by_similarity = sorted(
        ((similarities[a.recorded.id], number) for number, (a, _) in enumerate(pairs)
         if a.recorded.id in similarities and a.recorded.id not in chosen)
    )  # fmt: skip
    for value, number in by_similarity:
        a, b = pairs[number]
        if len(chosen) >= _MAX_EXAMPLES or value >= 1:
            break
        chosen[a.recorded.id] = _build_example(a, b, f"similarity {value:.2f}")
    return [*chosen.values()][:_MAX_EXAMPLES]


_EXAMPLES_OF_A_KIND: Final = 2


def _build_example(a: Observation, b: Observation, reason: str) -> Example:
    return Example(
        a.recorded.id,
        reason,
        describe_prompt(a.recorded.request)[-_MAX_TEXT:],
        _describe_response(a),
        _describe_response(b),
    )


def _describe_response(one: Observation) -> str:
    if not one.is_answered:
        [error] = _describe_error(one)
        return f"({error})"
    answer = one.recorded.answer
    calls = [
        f"→ {call.name}({call.arguments})"
        for choice in (answer.choices if answer is not None else [])
        for call in choice.tool_calls
    ]
    return "\n".join([one.text, *calls]).strip()[:_MAX_TEXT]
