"""The measures of two sets of recorded requests: which differ, by how much, and how certainly.

Requests are compared in pairs where the second set replays the first. All tests together name a
difference where there is none with the stated probability at most (Holm's correction).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Final, Literal

from msgspec import Struct

from gateway.observability.recording import RecordedRequest
from gateway.tools.ab.statistics import (
    ExactSample,
    Interval,
    Mean,
    difference_interval,
    normal_quantile,
    required_per_version,
    t_cdf,
    t_quantile,
    welch_interval,
    wilson_interval,
    z_score,
)
from gateway.tools.compare.observation import Observation, describe_prompt, observe

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

Better = Literal["lower", "higher", "neither"]
Verdict = Literal["worse", "better", "different", "no difference found", "not enough data"]
Pair = tuple[Observation, Observation]


class Measure(Struct, frozen=True):
    """Something that each request has or has not (``share``), or an amount."""

    name: str
    kind: Literal["share", "amount"]
    better: Better
    read: Callable[[Observation], float | None]
    """The value; for shares 0 or 1. None: it does not apply."""
    unit: str = ""


MEASURES: Final = (
    Measure("refused requests", "share", "lower", lambda one: one.is_refused),
    Measure("failed requests", "share", "lower", lambda one: one.is_failed),
    Measure("requests that lose parameters", "share", "lower", lambda one: bool(one.losses)),
    Measure("responses that call a tool", "share", "neither", lambda one: one.calls_tools),
    Measure("valid tool arguments", "share", "higher", lambda one: one.has_valid_arguments),
    Measure("valid JSON", "share", "higher", lambda one: one.is_json),
    Measure("responses with a stop string", "share", "lower", lambda one: one.ignores_stop),
    Measure("responses beyond their limit", "share", "lower", lambda one: one.exceeds_limit),
    Measure("empty responses", "share", "lower", lambda one: one.is_empty),
    Measure("responses that decline", "share", "lower", lambda one: one.declines),
    Measure(
        "responses cut at their limit",
        "share",
        "neither",
        lambda one: "length" in one.finish_reasons if one.is_answered else None,
    ),
    Measure("completion tokens", "amount", "neither", lambda one: one.completion_tokens),
    Measure("duration", "amount", "lower", lambda one: one.duration, "s"),
    Measure("time to the first token", "amount", "lower", lambda one: one.first_token, "s"),
)


class MeasureResult(Struct):
    """A measure of both sides."""

    name: str
    kind: Literal["share", "amount"]
    better: Better
    unit: str
    n: int
    """The pairs, or the requests of the smaller side, to which it applies."""
    a: float
    """The share, or the median."""
    b: float
    difference: Interval | None
    """Of shares, b - a. Of amounts, the ratio b / a of their geometric means. None if it can't be
    estimated."""
    p: float
    verdict: Verdict = "no difference found"
    missing: int = 0
    """About how many more pairs or requests are needed to find a difference that matters."""

    @property
    def is_worse(self) -> bool:
        """Whether the verdict speaks against the second side."""
        return self.verdict == "worse"


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


class CompareReport(Struct):
    """The comparison of two recordings."""

    a: str
    b: str
    a_requests: int
    b_requests: int
    pairs: int
    """0 if the requests are not compared in pairs."""
    confidence: float
    measures: list[MeasureResult]
    losses: list[tuple[str, int, int]]
    """Lost parameters, and how many requests of each side lose them."""
    errors: list[tuple[str, int, int]]
    """Statuses and classes of errors."""
    finish_reasons: list[tuple[str, int, int]]
    texts: TextComparison | None
    examples: list[Example]
    distributions: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    """The sorted values of each amount of both sides, for plots."""


Similarity = Callable[[Sequence[tuple[str, str]]], Sequence[float]]
"""Computes the similarity of pairs of texts, from 0 to 1."""


def compare_text(pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
    """The share of characters that both texts have in common, in their order."""
    return [
        SequenceMatcher(None, a[:_MAX_TEXT], b[:_MAX_TEXT], autojunk=False).ratio()
        for a, b in pairs
    ]


def pair_requests(
    a: Iterable[RecordedRequest], b: Iterable[RecordedRequest]
) -> tuple[list[Observation], list[Observation], list[Pair]]:
    """The requests of both sides, and the pairs of each request with its replay.

    Without replays, requests with the same id are pairs.
    """
    side_a, side_b = [observe(one) for one in a], [observe(one) for one in b]
    originals = {one.recorded.replay_of or one.recorded.id: one for one in side_a}
    pairs = []
    for one in side_b:
        original = originals.pop(one.recorded.replay_of or one.recorded.id, None)
        if original is not None:
            pairs.append((original, one))
    return side_a, side_b, pairs


def compare(
    names: tuple[str, str],
    a: Iterable[RecordedRequest],
    b: Iterable[RecordedRequest],
    *,
    confidence: float = 0.95,
    similarity: Similarity = compare_text,
    similarity_method: str = "common characters",
) -> CompareReport:
    """Compare two sets of requests."""
    side_a, side_b, pairs = pair_requests(a, b)
    if pairs:
        side_a, side_b = [one for one, _ in pairs], [one for _, one in pairs]
        found = [_measure_pairs(measure, pairs, confidence) for measure in MEASURES]
    else:
        found = [_measure_sides(measure, side_a, side_b, confidence) for measure in MEASURES]
    results = [result for result in found if result is not None]
    _judge(results, 1 - confidence)
    texts, similarities = _compare_texts(pairs, similarity, similarity_method)
    return CompareReport(
        a=names[0],
        b=names[1],
        a_requests=len(side_a),
        b_requests=len(side_b),
        pairs=len(pairs),
        confidence=confidence,
        measures=results,
        losses=_count(side_a, side_b, lambda one: one.losses),
        errors=_count(side_a, side_b, _describe_error),
        finish_reasons=_count(side_a, side_b, lambda one: one.finish_reasons),
        texts=texts,
        examples=_choose_examples(pairs, similarities),
        distributions={
            measure.name: (_sorted_values(measure, side_a), _sorted_values(measure, side_b))
            for measure in MEASURES
            if measure.kind == "amount"
        },
    )


# One measure.


def _measure_pairs(
    measure: Measure, pairs: Sequence[Pair], confidence: float
) -> MeasureResult | None:
    values = [
        (float(first), float(second))
        for a, b in pairs
        if (first := measure.read(a)) is not None and (second := measure.read(b)) is not None
    ]
    if not values:
        return None
    if measure.kind == "share":
        return _compare_paired_shares(measure, values, confidence)
    return _compare_paired_amounts(measure, values, confidence)


def _compare_paired_shares(
    measure: Measure, values: Sequence[tuple[float, float]], confidence: float
) -> MeasureResult:
    """McNemar's exact test, and the interval of Agresti and Min.

    Half a pair is added to each number of pairs. Source: Statistics in Medicine 24 (2005), 729-740.
    """
    n = len(values)
    gained = sum(a < b for a, b in values)
    lost = sum(a > b for a, b in values)
    d, total = gained - lost, n + 2
    spread = math.sqrt(max(gained + lost + 1 - d * d / total, 0)) / total
    half = z_score(confidence) * spread
    discordant = max((gained + lost) / n, _RELEVANT_SHARE)
    needed = math.ceil(_sum_of_quantiles(confidence) ** 2 * discordant / _RELEVANT_SHARE**2)
    return MeasureResult(
        name=measure.name,
        kind=measure.kind,
        better=measure.better,
        unit=measure.unit,
        n=n,
        a=sum(a for a, _ in values) / n,
        b=sum(b for _, b in values) / n,
        difference=Interval(d / n, max(-1.0, d / total - half), min(1.0, d / total + half)),
        p=binomial_p_value(gained, gained + lost),
        missing=max(needed - n, 0),
    )


def _compare_paired_amounts(
    measure: Measure, values: Sequence[tuple[float, float]], confidence: float
) -> MeasureResult:
    """Student's test of the logarithms' differences."""
    differences = [_log(b) - _log(a) for a, b in values]
    sample = ExactSample()
    sample.extend(differences)
    mean = sample.mean()
    assert mean is not None  # noqa: S101 - there are values
    interval, p = _test_mean(mean, confidence)
    needed = required_pairs(mean.variance, math.log(_RELEVANT_RATIO), confidence)
    sides = [a for a, _ in values], [b for _, b in values]
    return _build_amount(measure, sides, (interval, p), needed)


def _measure_sides(
    measure: Measure, a: Sequence[Observation], b: Sequence[Observation], confidence: float
) -> MeasureResult | None:
    first = [float(value) for one in a if (value := measure.read(one)) is not None]
    second = [float(value) for one in b if (value := measure.read(one)) is not None]
    if not first or not second:
        return None
    if measure.kind == "share":
        hits = (round(sum(first)), round(sum(second)))
        intervals = [
            wilson_interval(count, len(values), confidence)
            for count, values in zip(hits, (first, second), strict=True)
        ]
        share = sum(hits) / (len(first) + len(second))
        variance = max(share * (1 - share), _RELEVANT_SHARE * (1 - _RELEVANT_SHARE))
        needed = required_per_version(variance, _RELEVANT_SHARE, confidence)
        return MeasureResult(
            name=measure.name,
            kind=measure.kind,
            better=measure.better,
            unit=measure.unit,
            n=min(len(first), len(second)),
            a=intervals[0].value,
            b=intervals[1].value,
            difference=difference_interval(intervals[0], intervals[1]),
            p=fisher_p_value(hits[0], len(first), hits[1], len(second)),
            missing=max(needed - min(len(first), len(second)), 0),
        )
    means = []
    for values in (first, second):
        sample = ExactSample()
        sample.extend([_log(value) for value in values])
        means.append(sample.mean())
    interval = welch_interval(means[0], means[1], confidence)
    p = 1.0 if interval is None else _p_of_interval(interval, means)
    variance = sum(mean.variance for mean in means if mean is not None) / 2
    needed = required_per_version(variance, math.log(_RELEVANT_RATIO), confidence)
    return _build_amount(measure, (first, second), (interval, p), needed)


def _build_amount(
    measure: Measure,
    values: tuple[Sequence[float], Sequence[float]],
    test: tuple[Interval | None, float],
    needed: int,
) -> MeasureResult:
    """``test`` is the interval of the difference of the logarithms, and the p-value."""
    (a, b), (interval, p) = values, test
    n = min(len(a), len(b))
    ratio = None
    if interval is not None:
        ratio = Interval(
            *(math.exp(each) for each in (interval.value, interval.low, interval.high))
        )
    return MeasureResult(
        name=measure.name,
        kind=measure.kind,
        better=measure.better,
        unit=measure.unit,
        n=n,
        a=_median(a),
        b=_median(b),
        difference=ratio,
        p=p,
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


# Tests. Each gives the probability of a difference at least as large where there is none.


def binomial_p_value(hits: int, total: int) -> float:
    """Of ``hits`` among ``total`` where both ways are equally likely, two-sided and exact."""
    if not total:
        return 1.0
    tail = sum(math.comb(total, k) for k in range(min(hits, total - hits) + 1))
    p: float = 2 * tail / 2**total  # of integers: exact, whatever their size
    return min(1.0, p)


def fisher_p_value(a_hits: int, a_total: int, b_hits: int, b_total: int) -> float:
    """Fisher's exact test of two shares, two-sided: tables that are at most as likely."""
    hits, total = a_hits + b_hits, a_total + b_total

    def log_probability(k: int) -> float:
        return _log_comb(a_total, k) + _log_comb(b_total, hits - k) - _log_comb(total, hits)

    observed = log_probability(a_hits)
    lowest, highest = max(0, hits - b_total), min(hits, a_total)
    return min(
        1.0,
        sum(
            math.exp(each)
            for k in range(lowest, highest + 1)
            if (each := log_probability(k)) <= observed + 1e-7
        ),
    )


def _log_comb(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _test_mean(mean: Mean, confidence: float) -> tuple[Interval | None, float]:
    """The interval of a mean, and the p-value of its being 0."""
    if mean.n < _MIN_PAIRS:
        return None, 1.0
    error = math.sqrt(mean.variance / mean.n)
    if not error:
        return Interval(mean.value, mean.value, mean.value), 1.0 if not mean.value else 0.0
    half = t_quantile((1 + confidence) / 2, mean.n - 1) * error
    p = 2 * (1 - t_cdf(abs(mean.value) / error, mean.n - 1))
    return Interval(mean.value, mean.value - half, mean.value + half), p


def _p_of_interval(interval: Interval, means: Sequence[Mean | None]) -> float:
    """The p-value of Welch's test with this interval."""
    first, second = means
    assert first is not None and second is not None  # noqa: S101, PT018 - the interval is known
    error_a, error_b = first.variance / first.n, second.variance / second.n
    error = error_a + error_b
    if not error:
        return 1.0 if not interval.value else 0.0
    freedom = error * error / (error_a**2 / (first.n - 1) + error_b**2 / (second.n - 1))
    return 2 * (1 - t_cdf(abs(interval.value) / math.sqrt(error), freedom))


def required_pairs(variance: float, difference: float, confidence: float) -> int:
    """How many pairs tell a mean difference from 0, whose variance this is."""
    needed = math.ceil(variance * (_sum_of_quantiles(confidence) / difference) ** 2)
    return max(_MIN_PAIRS, needed)


# Verdicts.


def _judge(results: Sequence[MeasureResult], error_rate: float) -> None:
    """Holm's procedure: the k-th smallest of m p-values is compared with error_rate / (m - k)."""
    is_rejected = True
    for number, result in enumerate(sorted(results, key=lambda one: one.p)):
        is_rejected = is_rejected and result.p <= error_rate / (len(results) - number)
        if is_rejected:
            result.verdict = _name_difference(result)
            result.missing = 0
        elif result.missing:
            result.verdict = "not enough data"


def _name_difference(result: MeasureResult) -> Verdict:
    if result.better == "neither" or result.difference is None:
        return "different"
    neutral = 1.0 if result.kind == "amount" else 0.0
    is_higher = result.difference.value > neutral
    return "better" if is_higher == (result.better == "higher") else "worse"


# Tables and examples.


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
    pairs: Sequence[Pair], similarity: Similarity, method: str
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
    values = similarity(texts[:_MAX_SIMILARITIES])
    normalised = [(" ".join(a.split()).lower(), " ".join(b.split()).lower()) for a, b in texts]
    return (
        TextComparison(
            len(texts),
            sum(a == b for a, b in texts) / len(texts),
            sum(a == b for a, b in normalised) / len(texts),
            sum(values) / len(values),
            method,
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
