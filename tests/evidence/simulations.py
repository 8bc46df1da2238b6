"""Simulates many A/B tests at once, with a decision after every value.

It computes the intervals of ``gateway.evidence.sequential`` for all runs together. A unit test
shows that both raise their alarms at the same values of the same runs.
"""

import math
import random
from typing import Any, Final

import numpy as np

from gateway.evidence.quantiles import compare_quantiles, count_times, list_odds

Array = np.ndarray[Any, np.dtype[Any]]

VALUES: Final = 20_000
"""Values of a run, of both versions together."""
_ERROR_RATE: Final = 0.05
_CHUNK: Final = 50
"""Runs at a time: some hundred MB."""

SPLITS: Final = (0.5, 0.25, 0.1, 0.05, 0.01)
"""The share of the second version."""
RATES: Final = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
RATE_CELLS: Final = tuple((split, rate) for split in SPLITS for rate in RATES)
SIGMAS: Final = (0.5, 1.0, 1.5, 2.0)
PAIRS_CELLS: Final = tuple((split, sigma) for split in SPLITS for sigma in (0.0, *SIGMAS))
"""``sigma`` of a lognormal distribution; 0 stands for ratings from 1 to 5, which often tie."""


def _build_log_gamma(size: int) -> Array:
    """Return ``log Gamma`` of k / 2 for each k."""
    steps = np.log(np.arange(1, size + 1) / 2)
    table = np.zeros(size + 3)
    table[1] = 0.5 * np.log(np.pi)
    for parity in (1, 2):
        terms = steps[parity - 1 :: 2]
        table[parity + 2 :: 2] = table[parity] + np.cumsum(terms)[: len(table[parity + 2 :: 2])]
    return table


_LOG_GAMMA: Final = _build_log_gamma(4 * VALUES + 8)


def _build_mixture(size: int) -> tuple[Array, Array]:
    """Return the parts of the log wealth that depend on the count of halves, and on ``n``."""
    halves = np.arange(2 * size + 1)
    return _LOG_GAMMA[halves + 1], -_LOG_GAMMA[2 * np.arange(size + 1) + 2] - np.log(np.pi)


_OF_HALVES, _OF_COUNT = _build_mixture(VALUES)
_COUNTS: Final = np.arange(1, VALUES + 1)
_ENTROPY: Final = np.concatenate([[0.0], _COUNTS * np.log(_COUNTS)])
"""``k * log(k)``, by k."""


def _log_mixture(halves: Array, n: Array) -> Array:
    """Return the log wealth before the likelihood of the hypothesis is subtracted."""
    wealth: Array = _OF_HALVES[halves] + _OF_HALVES[2 * n - halves]
    wealth += _OF_COUNT[n]
    return wealth


def _find_first(is_alarm: Array) -> Array:
    """Return the position of each run's first alarm, or -1."""
    return np.where(is_alarm.any(axis=1), is_alarm.argmax(axis=1), -1)


def find_rate_alarms(versions: Array, values: Array) -> Array:
    """Return where the interval of the difference of two rates first excludes 0, or -1.

    The least favourable pair of equal rates is the rate of both versions together.
    """
    n_b = np.cumsum(versions, axis=1, dtype=np.int32)
    n_a = np.arange(1, versions.shape[1] + 1) - n_b
    hits_b = np.cumsum(values & versions, axis=1, dtype=np.int32)
    hits = np.cumsum(values, axis=1, dtype=np.int32)
    n = np.arange(1, versions.shape[1] + 1)
    wealth = _log_mixture(2 * (hits - hits_b), n_a)
    wealth += _log_mixture(2 * hits_b, n_b)
    wealth -= _ENTROPY[hits] + _ENTROPY[n - hits] - _ENTROPY[n]  # the likelihood of one rate
    return _find_first((wealth >= -np.log(_ERROR_RATE)) & (n_a > 0) & (n_b > 0))


def find_number_alarms(a: Array, b: Array) -> Array:
    """Return where the interval of P(b > a) first excludes 1/2, or -1; by pairs."""
    halves = np.cumsum(2 * (b > a) + (b == a), axis=1)
    n = np.arange(1, a.shape[1] + 1)
    wealth = _log_mixture(halves, n) + n * np.log(2)
    return _find_first(wealth >= -np.log(_ERROR_RATE))


def simulate_rates(
    split: float, a: float, b: float, *, runs: int, values: int = VALUES, seed: int = 0
) -> Array:
    """Return the first alarm of each run between versions with the rates ``a`` and ``b``."""
    rng = np.random.default_rng([seed, round(split * 1000), round(a * 10000), round(b * 10000)])
    alarms = []
    for start in range(0, runs, _CHUNK):
        shape = min(_CHUNK, runs - start), values
        versions = rng.random(shape, np.float32) < split
        outcomes = rng.random(shape, np.float32) < np.where(versions, np.float32(b), np.float32(a))
        alarms.append(find_rate_alarms(versions, outcomes))
    return np.concatenate(alarms)


def simulate_numbers(
    split: float, sigma: float, *, shift: float = 0.0, runs: int, seed: int = 0
) -> Array:
    """Return the first alarm of each run, in pairs; ``shift`` moves version b."""
    rng = np.random.default_rng([seed, round(split * 1000), round(sigma * 10), round(shift * 1000)])
    pairs = int(VALUES * min(split, 1 - split))
    alarms = []
    for start in range(0, runs, _CHUNK):
        shape = min(_CHUNK, runs - start), pairs
        if sigma:
            a, b = (np.exp(rng.normal(by, sigma, shape)) for by in (0.0, shift))
        else:
            a, b = (rng.choice(5, shape, p=[0.1, 0.05, 0.1, 0.25, 0.5]) for _ in range(2))
        alarms.append(find_number_alarms(a, b))
    return np.concatenate(alarms)


def count_alarms_of_rates(split: float, rate: float, *, runs: int) -> int:
    """Return in how many runs two versions with an equal rate are reported as different."""
    return int((simulate_rates(split, rate, rate, runs=runs) >= 0).sum())


def count_alarms_of_numbers(split: float, sigma: float, *, runs: int) -> int:
    """Return in how many runs two versions with equal numbers are reported as different."""
    return int((simulate_numbers(split, sigma, runs=runs) >= 0).sum())


QUANTILES: Final = (0.5, 0.95)
_LOOK: Final = 10
"""Values between two looks at quantiles."""


def _log_bet(p: float, sign: int, hits: Array, count: Array) -> Array:
    """Return the log wealth of the bet that a share is above ``p``, or below for -1."""
    total = np.ones(hits.shape)
    for hit, miss in list_odds(p, sign):
        total += np.exp(np.minimum(hits * hit + (count - hits) * miss, 700.0))
    wealth: Array = np.log(total / (len(list_odds(p, sign)) + 1))
    return wealth


def count_alarms_of_quantiles(split: float, p: float, *, runs: int) -> int:
    """Return in how many runs the wealth at the true quantile of equal versions passes the bound.

    Only then can the versions be reported as different, whatever the distribution of the times is.
    """
    rng = np.random.default_rng([3, round(split * 1000), round(p * 1000)])
    limit, alarms = -np.log(_ERROR_RATE / 2), 0
    for start in range(0, runs, _CHUNK):
        shape = min(_CHUNK, runs - start), VALUES
        versions = rng.random(shape, np.float32) < split
        below = rng.random(shape) < p
        looks = slice(_LOOK - 1, None, _LOOK)
        n_b = np.cumsum(versions, axis=1, dtype=np.int32)[:, looks]
        n_a = np.arange(1, VALUES + 1)[looks] - n_b
        hits_b = np.cumsum(below & versions, axis=1, dtype=np.int32)[:, looks]
        hits_a = np.cumsum(below, axis=1, dtype=np.int32)[:, looks] - hits_b
        slower = _log_bet(p, 1, hits_a, n_a) + _log_bet(p, -1, hits_b, n_b)
        faster = _log_bet(p, -1, hits_a, n_a) + _log_bet(p, 1, hits_b, n_b)
        alarms += int((np.maximum(slower, faster) >= limit).any(axis=1).sum())
    return alarms


def find_slower_version(sigma: float, p: float, *, allowed: float, requests: int, seed: int) -> int:
    """Return after how many requests a version twice as slow is found, or 0.

    Times are lognormal; one looks after every 20 requests.
    """
    rng = random.Random(f"{seed}, {sigma}, {p}")
    sides: tuple[list[float], list[float]] = ([], [])
    for number in range(1, requests + 1):
        side = rng.random() < 0.5
        sides[side].append(math.exp(rng.gauss(0, sigma)) * (1 + side))
        if number % 20 == 0:
            a, b = map(count_times, sides)
            low, _ = compare_quantiles(a, b, p, 1 - _ERROR_RATE / 8)
            if low > allowed:
                return number
    return 0
