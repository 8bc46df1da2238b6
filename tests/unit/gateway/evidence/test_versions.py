"""Two versions are compared: selection, results, and warnings."""

import contextlib
import io
import re
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from msgspec.structs import replace

from gateway.cli.ab import print_report
from gateway.evidence.measures import MeasureResult, format_rounded
from gateway.evidence.sequential import Tally, rate_difference_interval, required_per_side
from gateway.evidence.sources import Evidence, UsageQuery, read_access_log
from gateway.evidence.statistics import (
    ExactSample,
    Interval,
    difference_interval,
    wilson_interval,
)
from gateway.evidence.versions import (
    Comparison,
    ComparisonError,
    build_report,
    check_split_ratio,
    compare_versions,
    plan_test,
    select_versions,
)
from gateway.observability.record import RequestRecord
from protocols.core.events import Usage
from protocols.core.loss import UnsupportedParameter

CHAT = UsageQuery("chat")
RECORD = RequestRecord(
    "r",
    started_at=1.0,
    path="/v1/chat/completions",
    model="chat",
    split="rollout",
    usage=Usage(10, 20),
    finish_reasons=("eos",),
    first_token=0.5,
)


def make_records(version: str, n: int, slower: float = 0.0) -> Iterator[RequestRecord]:
    """Make successful streams with durations evenly spread around 2 s plus ``slower``."""
    for k in range(n):
        yield replace(RECORD, version=version, duration=1.0 + slower + 2 * (k + 0.5) / n)


def read_evidence(records: Sequence[RequestRecord], query: UsageQuery = CHAT) -> Evidence:
    return read_access_log([msgspec.json.encode(record) for record in records], query)


def get_rows_by_name(comparison: Comparison) -> dict[str, MeasureResult]:
    return {row.measure: row for row in comparison.rows}


def compare_records(*records: RequestRecord, confidence: float = 0.95) -> Comparison:
    return compare_versions(read_evidence(records), "rollout", ("1", "2"), confidence)


def test_shares_are_computed_from_the_routed_requests() -> None:
    failed = replace(RECORD, version="2", outcome="worker_error", finish_reasons=(), usage=None)
    left = replace(failed, outcome="cancelled")
    cut = replace(failed, outcome="truncated", finish_reasons=("length",))
    gone = replace(RECORD, version="1", fallback_from="chat@2")
    lossy = replace(
        RECORD, version="2", unsupported_parameters=(UnsupportedParameter("top_k", "dropped"),)
    )

    rows = get_rows_by_name(
        compare_records(
            *make_records("1", 10), *make_records("2", 5), failed, left, cut, gone, lossy
        )
    )

    assert {name: (row.a, row.b) for name, row in rows.items() if row.unit in ("", "share")} == {
        "requests": (10, 10),
        "prompt tokens": (100, 60),
        "completion tokens": (200, 120),
        "failed": (0.0, 0.2),
        "refused": (0.0, 0.0),
        "cancelled by client": (0.0, 0.1),
        "answered by fallback": (0.0, 0.1),
        "with a loss": (0.0, 1 / 9),
        "ended by eos": (1.0, 6 / 7),
        "ended by length": (0.0, 1 / 7),
    }
    assert rows["failed"].method == "betting"
    assert rows["refused"].method == "betting"
    assert rows["cancelled by client"].method == "Newcombe"


def test_only_clear_differences_exclude_zero() -> None:
    comparison = compare_records(*make_records("1", 400), *make_records("2", 100, slower=0.5))

    clear = {row.measure for row in comparison.rows if row.has_difference}
    assert clear == {
        "duration",
        "duration, mean",
        "duration, p50",
        "duration, p95",
        "time per token",
        "time per token, mean",
        "time per token, p50",
        "time per token, p95",
    }
    order = get_rows_by_name(comparison)["duration"]
    assert (order.method, order.scale, order.n) == ("betting, pairs", "probability", 100)
    assert order.difference is not None
    assert order.difference.value == 1

    mean = get_rows_by_name(comparison)["duration, mean"]
    assert mean.method == "Welch"
    assert mean.difference is not None
    assert mean.difference.value == pytest.approx(0.5)
    assert mean.difference.low == pytest.approx(0.5 - 1.96 * 0.0646, abs=0.005)


def test_higher_confidence_widens_the_intervals() -> None:
    records = [*make_records("1", 50), *make_records("2", 50)]
    wide, narrow = (
        get_rows_by_name(compare_records(*records, confidence=confidence))[
            "duration, mean"
        ].difference
        for confidence in (0.99, 0.8)
    )

    assert wide is not None
    assert narrow is not None
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)


def test_too_few_values_give_no_interval() -> None:
    vectors = replace(RECORD, finish_reasons=(), first_token=None)
    rows = get_rows_by_name(
        compare_records(replace(vectors, version="1"), replace(vectors, version="2"))
    )

    assert rows["duration, mean"] == MeasureResult(
        "duration, mean", "seconds", 0.0, 0.0, None, "Welch", 0.0, 1, better="lower"
    )
    assert rows["duration"].verdict == "not enough data"
    assert rows["time to first token, p50"].a is None
    assert rows["length, mean"].b is None


def test_share_of_zero_requests_is_unknown() -> None:
    gone = replace(RECORD, version="1", fallback_from="chat@2")
    rows = get_rows_by_name(compare_records(*make_records("1", 3), gone))
    lost = rows["with a loss"]

    assert (lost.a, lost.b, lost.difference) == (0.0, None, None)


# --- selecting versions ---------------------------------------------------------------------------

THREE = [*make_records("1", 1), *make_records("2", 1), *make_records("10", 1)]
OTHER = [replace(one, split="other") for one in THREE[:2]]


@pytest.mark.parametrize(
    ("records", "split", "a", "b", "wanted"),
    [
        (THREE[:2], None, None, None, ("rollout", "1", "2")),
        (THREE[:2], None, None, "1", ("rollout", "2", "1")),
        (THREE[:2], None, "2", None, ("rollout", "2", "1")),
        (THREE, None, "10", "1", ("rollout", "10", "1")),
        ([*THREE, *OTHER], "other", None, None, ("other", "1", "2")),
    ],
)
def test_unnamed_versions_default_to_the_only_candidates(
    records: Sequence[RequestRecord],
    split: str | None,
    a: str | None,
    b: str | None,
    wanted: tuple[str, str, str],
) -> None:
    assert select_versions(read_evidence(records), split, a, b) == wanted


@pytest.mark.parametrize(
    ("records", "split", "a", "b", "message"),
    [
        (THREE, None, None, None, "name two versions with --a and --b; there is 1, 2, 10"),
        (THREE, None, "1", None, "name two versions with --a and --b; there is 1, 2, 10"),
        (THREE, None, "1", "1", "name two versions"),
        (THREE[:1], None, None, None, "name two versions with --a and --b; there is 1"),
        ([], None, None, None, "there is none that was sent requests"),
        (THREE, None, "3", None, "version '3' was sent no requests; there is 1, 2, 10"),
        (THREE, "none", "1", "2", "version '1' was sent no requests; there is nothing"),
        ([*THREE, *OTHER], None, None, None, "it had the splits other, rollout: name one with"),
    ],
)
def test_ambiguous_versions_must_be_named(
    records: Sequence[RequestRecord], split: str | None, a: str | None, b: str | None, message: str
) -> None:
    with pytest.raises(ComparisonError, match=message):
        select_versions(read_evidence(records), split, a, b)


def test_everything_ignores_the_split() -> None:
    records = [replace(one, split="") for one in THREE[:1]] + THREE[1:2]
    assert select_versions(
        read_evidence(records, UsageQuery("chat", everything=True)), None, None, None
    ) == ("", "1", "2")


# --- shares of the split --------------------------------------------------------------------------


def test_request_counts_are_checked_against_the_weights() -> None:
    evidence = read_evidence([*make_records("1", 90), *make_records("2", 10)])
    fits = check_split_ratio(evidence, "rollout", {"1": 9, "2": 1, "3": 0})

    amiss = check_split_ratio(evidence, "rollout", {"1": 5, "2": 5})

    assert (fits.sent, fits.weights, fits.likelihood, fits.is_plausible) == (
        {"1": 90, "2": 10},
        {"1": 9, "2": 1},
        1.0,
        True,
    )
    assert not amiss.is_plausible


def test_version_without_requests_is_included_in_the_ratio_check() -> None:
    ratio = check_split_ratio(read_evidence([*make_records("1", 50)]), "rollout", {"1": 1, "2": 1})
    assert ratio.sent == {"1": 50, "2": 0}
    assert not ratio.is_plausible


def test_requests_to_a_version_without_weight_are_an_error() -> None:
    with pytest.raises(ComparisonError, match="version '2' was sent requests, and has no weight"):
        check_split_ratio(read_evidence(list(make_records("2", 1))), "rollout", {"1": 1, "2": 0})


# --- output ---------------------------------------------------------------------------------------


def render_text(comparison: Comparison, evidence: Evidence, query: UsageQuery = CHAT) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_report(build_report("a.log", query, evidence, comparison))
    return out.getvalue().removesuffix("\n")


def test_comparison_table_is_formatted() -> None:
    rows = (
        MeasureResult("requests", "", 900, 100),
        MeasureResult(
            "failed", "share", 0.0123, 0.05, Interval(0.0377, -0.01, 0.1), "other", n=100,
            verdict="not enough data", note="not enough data",
        ),
        MeasureResult(
            "duration, mean", "seconds", 1.5, 12.25, Interval(10.75, 9.5, 12.0), "Welch", n=100,
            verdict="worse", note="version 2 is higher",
        ),
        MeasureResult(
            "duration, p50", "seconds", 0.5, 0.25, Interval(-0.25, -0.3, -0.2), "order"
        ),
        MeasureResult("duration, p95", "seconds", 0.5, None),
        MeasureResult("length, mean", "tokens", 0.0, 0.0, Interval(0.0, 0.0, 0.0), "Welch"),
        MeasureResult(
            "length, p50", "tokens", 1234.5, 1000.25, Interval(-234.25, -300, 0), "order"
        ),
    )  # fmt: skip
    text = render_text(Comparison("rollout", "1", "2", 0.95, rows), Evidence(exact=True))
    assert (
        text
        == """\
chat: version 2 compared with version 1, sent by the split rollout
1 of 2 measures is worse: duration, mean 1.5 s → 12.2 s. 1 has not enough data.

                  n  version 1  version 2    difference            interval  verdict          method
requests                   900        100
failed          100     1.23 %     5.00 %  +3.77 points     -1.00 to +10.00  not enough data  other
duration, mean  100      1.5 s     12.2 s       +10.8 s   +9.5 s to +12.0 s  worse            Welch
duration, p50           500 ms     250 ms       -250 ms  -300 ms to -200 ms                   order
duration, p95           500 ms          -       unknown
length, mean                 0          0            +0            +0 to +0                   Welch
length, p50              1,234      1,000          -234          -300 to +0                   order

failed: not enough data
duration, mean: version 2 is higher

The intervals of the 2 measures with a verdict hold all together with a probability of 95 %; each \
other one by itself."""
    )


def test_report_contains_all_notes() -> None:
    evidence = Evidence(exact=False, sticky=1, lines=9, skipped=2, early=1)
    evidence.excluded["pinned by the client"] = 3
    comparison = Comparison(
        "",
        "1",
        "2",
        0.9,
        (),
        check_split_ratio(read_evidence([*make_records("1", 50)]), "rollout", {"1": 1}),
    )
    everything = UsageQuery("chat", everything=True)

    text = render_text(comparison, evidence, everything)

    assert "version 2 compared with version 1, all requests" in text
    assert "Included, though not a random sample: 3 requests pinned by the client." in text
    assert "Left out: 3 requests pinned by the client." in render_text(comparison, evidence)
    assert "where few users send most of them, the intervals are too narrow" in text
    assert "A page of metrics has only the bucket of each value" in text
    assert "2 of 9 lines are not the record of a request." in text
    assert "1 of 9 lines are of requests before --since." in text
    assert "The split sent 50 to the versions 1 for the weights 1, which fits (p = 1)." in text


def test_implausible_split_ratio_is_a_warning() -> None:
    evidence = read_evidence([*make_records("1", 50), *make_records("2", 50)])
    comparison = compare_versions(evidence, "rollout", ("1", "2"), 0.95)

    comparison = replace(
        comparison, ratio=check_split_ratio(evidence, "rollout", {"1": 90, "2": 10})
    )

    assert (
        "WARNING: the split sent 50 : 50 to the versions 1, 2 for the weights 90 : 10, "
        "which does not fit (p = 1.5e-40)"
    ) in render_text(comparison, evidence)


# --- verdicts and sample sizes --------------------------------------------------------------------


FAST = [*make_records("1", 400)]


def judge_duration(*, slower: float, count: int) -> MeasureResult:
    """Judge the mean of durations of which only the buckets are known."""
    evidence = read_evidence([*FAST, *make_records("2", count, slower)])
    evidence.exact = False
    comparison = compare_versions(evidence, "rollout", ("1", "2"), 0.95)
    return get_rows_by_name(comparison)["duration, mean"]


@pytest.mark.parametrize(
    ("slower", "count", "verdict", "note"),
    [
        (0.5, 400, "worse", r"version 2 has the higher value with 100 % \(9\d % to 100 %\)"),
        (-0.5, 400, "better", r"version 2 has the higher value with 0 % \(0 % to \d"),
        (0.0, 4000, "no relevant difference", "no difference of 5 percentage points in the prob"),
        (0.0, 20, "not enough data", r"not enough data: about \d,\d+ more requests per version"),
    ],
)
def test_times_are_judged_by_pairs_in_the_order_in_which_they_came(
    slower: float, count: int, verdict: str, note: str
) -> None:
    records = [*make_records("1", count), *make_records("2", count, slower)]
    row = get_rows_by_name(compare_records(*records))["duration"]
    assert row.verdict == verdict
    assert re.match(note, row.note), row.note
    assert (row.missing > 0) == (verdict == "not enough data")


def test_quantiles_leave_the_order_of_the_values() -> None:
    """Pairs are made after the quantiles of each version."""
    sample = ExactSample()
    sample.extend([3.0, 1.0, 2.0])
    assert (sample.quantile(0.5), [*sample.values]) == (2.0, [3.0, 1.0, 2.0])
    sample.extend([9.0])
    assert (sample.quantile(1.0), [*sample.values]) == (9.0, [3.0, 1.0, 2.0, 9.0])


@pytest.mark.parametrize(
    ("slower", "count", "verdict", "note"),
    [
        (0.5, 400, "worse", r"version 2 is 25 % higher \(2\d % to 3\d %\)"),
        (-0.5, 400, "better", r"version 2 is 25 % lower \(2\d % to 3\d %\)"),
        (0.0, 400, "no relevant difference", "no difference of 10 % or more"),
        (0.0, 20, "not enough data", r"not enough data: about \d+ more requests per version for"),
    ],
)
def test_verdict_has_the_result_or_the_missing_sample_size(
    slower: float, count: int, verdict: str, note: str
) -> None:
    row = judge_duration(slower=slower, count=count)
    assert row.verdict == verdict
    assert re.match(note, row.note), row.note
    assert (row.missing > 0) == (verdict == "not enough data")


def test_shares_are_judged_by_percentage_points() -> None:
    failed = [replace(one, outcome="worker_error") for one in make_records("2", 40)]
    row = get_rows_by_name(compare_records(*FAST, *make_records("2", 360), *failed))["failed"]
    assert row.verdict == "worse"
    assert row.note.startswith("version 2 is 10 percentage points higher (")


def test_measures_that_do_not_decide_have_no_verdict() -> None:
    comparison = compare_records(*make_records("1", 30), *make_records("2", 30))
    assert [row.measure for row in comparison.verdicts] == [
        "failed", "refused", "time to first token", "duration", "time per token",
    ]  # fmt: skip


def test_version_that_refuses_all_requests_is_worse() -> None:
    """A broken template of the new version answers each request with 400."""
    refused = [replace(one, outcome="client_error") for one in make_records("2", 200)]
    row = get_rows_by_name(compare_records(*make_records("1", 200), *refused))["refused"]
    assert (row.a, row.b, row.verdict) == (0.0, 1.0, "worse")


def test_intervals_of_measures_that_decide_hold_together() -> None:
    """Five measures decide, so each interval has the level 99 %; the others have 95 %."""
    rows = get_rows_by_name(compare_records(*FAST, *make_records("2", 400)))
    none, b = Tally(0, 400), wilson_interval(0, 400, 0.95)
    assert rows["failed"].difference == rate_difference_interval(none, none, 1 - (1 - 0.95) / 5)
    assert rows["cancelled by client"].difference == difference_interval(b, b)


def test_a_test_is_planned_by_the_version_with_most_requests() -> None:
    evidence = read_evidence([*make_records("1", 50), *make_records("2", 5)])
    plan = plan_test("a.log", CHAT, evidence, 0.1, 0.95)
    assert plan.version == "1"

    by_name = {one.measure: one for one in plan.measures}
    assert by_name["failed"].difference == 0.01
    assert by_name["failed"].requests == required_per_side(0.0099, 0.01, 0.95)
    times = by_name["duration, probability of a higher value"]
    assert (times.unit, times.value, times.difference) == ("share", 0.5, 0.05)
    assert times.requests == required_per_side(0.25, 0.05, 0.95)
    assert plan.table()[0][0] == "failed"


def test_a_test_without_requests_can_not_be_planned() -> None:
    with pytest.raises(ComparisonError, match="it had no requests"):
        plan_test("a.log", CHAT, Evidence(exact=True), 0.1, 0.95)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (0.126, "0.13"),
        (-12.6, "-13"),
        (99.6, "100"),
        (204.0, "200"),
        (12_345, "12,000"),
    ],
)
def test_rounded_numbers_have_two_digits_and_no_power_of_ten(number: float, text: str) -> None:
    assert format_rounded(number) == text
