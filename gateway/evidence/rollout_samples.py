"""Reads the requests of a rollout's step from the usage rows, as sums that the database computes.

However many requests a step has, they are all read, and little is kept: counts, and times in bins.
A request that a fallback was asked for counts for the version that failed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gateway.config.schema import RolloutConfig
from gateway.evidence.measures import FAILED_OUTCOMES, REFUSED_OUTCOMES
from gateway.evidence.quantiles import BIN_EXPRESSION, TimeCounts
from gateway.evidence.rollout import StepSamples
from gateway.evidence.sequential import Tally
from gateway.observability.usage import UsageSources
from protocols.core.errors import QuotaExceeded, RateLimitExceeded
from protocols.core.json_text import decode_json

QueryUsage = Callable[..., Sequence[Sequence[Any]]]
"""Runs the query that a function of the sources builds, with the values of its parameters."""

_FAILED: Final = ", ".join(map(repr, (*FAILED_OUTCOMES, *REFUSED_OUTCOMES)))
_IS_FAILED: Final = (
    f"(first_outcome IN ({_FAILED}) OR first_outcome = 'cancelled' AND first_token IS NULL)"
)
"""Also refused requests, and those whose client gave up before the first token: a version that
refuses or hangs has no failure of a worker. The other versions have such requests too."""
_ANSWERED: Final = "failed_model = ''"
"""Other requests have the times and the response of a fallback."""
_LIMITED: Final = f"'{RateLimitExceeded.__name__}', '{QuotaExceeded.__name__}'"
_IS_SENT: Final = f"NOT ($5 AND shadow_of = '' AND {_ANSWERED} AND error IN ({_LIMITED}))"
"""Requests that a limit of the gateway refuses have no copy, and no split has sent them."""
_FIRST: Final = ", ".join(
    f"CASE failed_model WHEN '' THEN {name} ELSE failed_{name} END AS first_{name}"
    for name in ("model", "version", "split", "outcome")
)
_NUMBERS: Final[Mapping[str, str]] = {
    "first_token": f"{_ANSWERED} AND first_token >= 0",
    "duration": f"{_ANSWERED} AND outcome = 'ok' AND duration >= 0",
    "completion_tokens": f"{_ANSWERED} AND outcome = 'ok' AND completion_tokens > 0",
}
"""The columns of times and tokens, with the requests that have them."""


def read_samples(
    query: QueryUsage,
    rollout: RolloutConfig,
    model: str,
    split: str,
    since: float,
    *,
    is_shadow: bool,
) -> StepSamples:
    """What the usage rows since a time say; only of requests that the split sent.

    With ``is_shadow``, copies of requests count for the version, and all requests of the model for
    the others.
    """
    values = rollout.to, model, split, since, is_shadow
    rails = rollout.guardrails
    columns = sorted({name.rpartition("_p")[0] for name in rails.list_quantiles()})
    return StepSamples(
        _build_pair(query(_count_errors, *values)),
        {column: _read_numbers(query, column, values) for column in columns},
        _read_feedback(query, [*rails.feedback], values),
        _read_measures(query, [*rails.compare.list_limits()], values),
    )


def _build_requests(sources: UsageSources, value: str, condition: str = "1 = 1") -> str:
    """Counts the requests by their side and a value."""
    return (
        "SELECT CASE WHEN first_version = $1 THEN 1 ELSE 0 END AS side, "  # noqa: S608 - names of ours
        f"{value}, count(*) FROM (SELECT u.*, {_FIRST} FROM {sources.usage} AS u) AS requests "
        "WHERE first_model = $2 AND at >= $4 AND CASE "
        "WHEN $5 THEN (first_version = $1) = (shadow_of <> '') "
        f"ELSE first_split = $3 AND shadow_of = '' END AND {condition} GROUP BY 1, 2"
    )


def _count_errors(sources: UsageSources) -> str:
    return _build_requests(sources, f"CASE WHEN {_IS_FAILED} THEN 1 ELSE 0 END", _IS_SENT)


def _build_pair(rows: Sequence[Sequence[Any]]) -> tuple[Tally, Tally]:
    """Both sides, from rows with a side, a value and the number of its requests."""
    a, b = (
        Tally(
            float(sum(value * count for of, value, count in rows if of == side)),
            sum(count for of, _, count in rows if of == side),
        )
        for side in (0, 1)
    )
    return a, b


def _read_numbers(
    query: QueryUsage, column: str, values: Sequence[object]
) -> tuple[TimeCounts, TimeCounts]:
    def build_query(sources: UsageSources) -> str:
        return _build_requests(sources, BIN_EXPRESSION.format(column=column), _NUMBERS[column])

    rows = query(build_query, *values)
    a, b = ({number: count for of, number, count in rows if of == side} for side in (0, 1))
    return a, b


def _read_measures(
    query: QueryUsage, names: Sequence[str], values: Sequence[object]
) -> dict[str, tuple[Tally, Tally]]:
    """Rows with equal measures are one group: the measures are few, and each is true or false."""
    if not names:
        return {}

    def build_query(sources: UsageSources) -> str:
        return _build_requests(sources, "measures", f"{_ANSWERED} AND measures <> ''")

    rows = [
        (side, decode_json(text, kind=dict[str, bool]), count)
        for side, text, count in query(build_query, *values)
    ]
    return {
        name: _build_pair(
            [(side, found[name], count) for side, found, count in rows if name in found]
        )
        for name in names
    }


def _read_feedback(
    query: QueryUsage, names: Sequence[str], values: Sequence[object]
) -> dict[str, tuple[Tally, Tally]]:
    """The feedback of each guardrail, of which each user counts once."""
    if not names:
        return {}
    wanted = ", ".join(f"${number}" for number in range(6, 6 + len(names)))

    def build_query(sources: UsageSources) -> str:
        user = "CASE user_hash WHEN '' THEN u.id ELSE user_hash END"
        return (
            "SELECT side, name, sum(value), count(*) FROM ("  # noqa: S608 - names of ours
            "SELECT CASE WHEN u.version = $1 THEN 1 ELSE 0 END AS side, name, "
            "CASE WHEN number > 1 THEN 1 WHEN number < 0 THEN 0 ELSE number END AS value, "
            f"row_number() OVER (PARTITION BY name, {user} ORDER BY f.at, f.id) AS n "
            f"FROM {sources.feedback} AS f JOIN {sources.usage} AS u "
            "ON u.at = f.request_at AND u.id = f.id WHERE u.model = $2 AND u.at >= $4 "
            "AND CASE WHEN $5 THEN (u.version = $1) = (u.shadow_of <> '') "
            "ELSE u.split = $3 AND u.shadow_of = '' END "
            f"AND number IS NOT NULL AND name IN ({wanted})"
            ") AS first_values WHERE n = 1 GROUP BY 1, 2"
        )

    rows = query(build_query, *values, *names)
    tallies = {(name, side): Tally(float(hits), count) for side, name, hits, count in rows}
    none = Tally(0.0, 0)
    return {name: (tallies.get((name, 0), none), tallies.get((name, 1), none)) for name in names}
