"""Two arms side by side: which, what is told of them, and what has to be known of it."""

import contextlib
import io
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from msgspec.structs import replace

from gateway.cli.ab import print_report
from gateway.observability.record import RequestRecord
from gateway.tools.ab.comparison import (
    Comparison,
    ComparisonError,
    ComparisonRow,
    Verdict,
    build_report,
    check_split_ratio,
    compare_versions,
    judge_rows,
    plan_test,
    select_versions,
)
from gateway.tools.ab.sources import Evidence, UsageQuery, read_access_log
from gateway.tools.ab.statistics import Interval, required_per_version
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
    """So many well-ended streams, of durations that lie evenly around 2 s and as much as slower."""
    for k in range(n):
        yield replace(RECORD, version=version, duration=1.0 + slower + 2 * (k + 0.5) / n)


def read_evidence(records: Sequence[RequestRecord], query: UsageQuery = CHAT) -> Evidence:
    return read_access_log([msgspec.json.encode(record) for record in records], query)


def get_rows_by_name(comparison: Comparison) -> dict[str, ComparisonRow]:
    return {row.figure: row for row in comparison.rows}


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
    assert rows["failed"].method == "Newcombe"


def test_only_clear_differences_exclude_zero() -> None:
    comparison = compare_records(*make_records("1", 400), *make_records("2", 100, slower=0.5))

    clear = {
        row.figure for row in comparison.rows if row.difference and row.difference.excludes_zero
    }
    assert clear == {
        "duration, mean",
        "duration, p50",
        "duration, p95",
        "time per token, mean",
        "time per token, p50",
        "time per token, p95",
    }
    mean = get_rows_by_name(comparison)["duration, mean"]
    assert mean.method == "Welch"
    assert mean.difference is not None
    assert mean.difference.value == pytest.approx(0.5)
    assert mean.difference.low == pytest.approx(0.5 - 1.96 * 0.0646, abs=0.003)
    assert comparison.intervals == len(comparison.rows) - 3


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

    assert rows["duration, mean"] == ComparisonRow(
        "duration, mean", "seconds", 0.0, 0.0, None, "Welch", 0.0, 1
    )
    assert rows["time to first token, p50"].a is None
    assert rows["length, mean"].b is None


def test_share_of_zero_requests_is_unknown() -> None:
    gone = replace(RECORD, version="1", fallback_from="chat@2")
    rows = get_rows_by_name(compare_records(*make_records("1", 3), gone))
    lost = rows["with a loss"]
    assert (lost.a, lost.b, lost.difference) == (0.0, None, None)


# --- which arms -----------------------------------------------------------------------------------

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


# --- as it is told --------------------------------------------------------------------------------


def render_text(comparison: Comparison, evidence: Evidence, query: UsageQuery = CHAT) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_report(build_report("a.log", query, evidence, comparison, 0.1))
    return out.getvalue().removesuffix("\n")


def test_comparison_table_is_formatted() -> None:
    rows = (
        ComparisonRow("requests", "", 900, 100),
        ComparisonRow("failed", "share", 0.0123, 0.05, Interval(0.0377, -0.01, 0.1), "Newcombe"),
        ComparisonRow("duration, mean", "seconds", 1.5, 12.25, Interval(10.75, 9.5, 12.0), "Welch"),
        ComparisonRow(
            "duration, p50", "seconds", 0.5, 0.25, Interval(-0.25, -0.3, -0.2), "order statistics"
        ),
        ComparisonRow("duration, p95", "seconds", 0.5, None),
        ComparisonRow("length, mean", "tokens", 0.0, 0.0, Interval(0.0, 0.0, 0.0), "Welch"),
        ComparisonRow(
            "length, p50", "tokens", 1234.5, 1000.25, Interval(-234.25, -300, 0), "order"
        ),
    )
    text = render_text(Comparison("rollout", "1", "2", 0.95, rows), Evidence(exact=True))
    assert (
        text
        == """\
chat: version 2 compared with version 1, sent by the split rollout

                version 1  version 2  difference     from        to     method
requests              900        100
failed             1.23 %     5.00 %     +3.77 %  -1.00 %  +10.00 %     Newcombe
duration, mean      1.5 s     12.2 s     +10.8 s   +9.5 s   +12.0 s  *  Welch
duration, p50      500 ms     250 ms     -250 ms  -300 ms   -200 ms  *  order statistics
duration, p95      500 ms          -     unknown
length, mean            0          0          +0       +0        +0     Welch
length, p50          1234       1000        -234     -300        +0     order

failed: not enough data
duration, mean: version 2 is 7.2e+02 % higher (6.3e+02 % to 8e+02 %)

5 intervals at 95 %; a * marks those that exclude 0, as about 0.3 of them would if nothing \
differed."""
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


# --- verdicts and plans ---------------------------------------------------------------------------


def judge(row: ComparisonRow, relative: float = 0.1) -> Verdict:
    [verdict] = judge_rows(Comparison("rollout", "1", "2", 0.95, (row,)), relative)
    return verdict


@pytest.mark.parametrize(
    ("row", "result", "text"),
    [
        (
            ComparisonRow(
                "duration, mean", "seconds", 2.0, 2.5, Interval(0.5, 0.3, 0.7), "Welch", 1.0, 9
            ),
            "higher",
            "version 2 is 25 % higher (15 % to 35 %)",
        ),
        (
            ComparisonRow(
                "failed", "share", 0.05, 0.01, Interval(-0.04, -0.06, -0.02), "Newcombe", 0.03, 9
            ),
            "lower",
            "version 2 is 4 percentage points lower (2 percentage points to 6 percentage points)",
        ),
        (
            ComparisonRow(
                "duration, mean", "seconds", 2.0, 2.1, Interval(0.1, 0.0, 0.2), "Welch", 1.0, 9
            ),
            "equal",
            "no difference of 10 % or more",
        ),
        (
            ComparisonRow(
                "duration, mean", "seconds", 2.0, 2.1, Interval(0.1, -0.3, 0.5), "Welch", 1.0, 93
            ),
            "unknown",
            "not enough data: about 300 more requests per version for a difference of 10 %",
        ),
        (
            ComparisonRow("failed", "share", 0.0, 0.0, None, "Newcombe", 0.0099, 100),
            "unknown",
            (
                "not enough data: about 1,455 more requests per version "
                "for a difference of 1 percentage point"
            ),
        ),
        (
            ComparisonRow("duration, mean", "seconds", 0.0, 0.0, None, "Welch", 0.0, 1),
            "unknown",
            "not enough data",
        ),
    ],
)
def test_verdict_says_what_the_data_shows_or_how_much_is_missing(
    row: ComparisonRow, result: str, text: str
) -> None:
    verdict = judge(row)
    assert (verdict.figure, verdict.result, verdict.text) == (row.figure, result, text)


def test_figures_that_do_not_decide_have_no_verdict() -> None:
    row = ComparisonRow("length, mean", "tokens", 2.0, 9.0, Interval(7.0, 6.0, 8.0), "Welch")
    assert [*judge_rows(Comparison("rollout", "1", "2", 0.95, (row,)), 0.1)] == []


def test_a_test_is_planned_by_the_version_with_most_requests() -> None:
    evidence = read_evidence([*make_records("1", 50), *make_records("2", 5)])
    plan = plan_test("a.log", CHAT, evidence, 0.1, 0.95)
    assert plan.version == "1"
    by_name = {figure.figure: figure for figure in plan.figures}
    assert by_name["failed"].difference == 0.01
    assert by_name["failed"].requests == required_per_version(0.0099, 0.01, 0.95)
    assert plan.table()[0][0] == "failed"


def test_a_test_without_requests_can_not_be_planned() -> None:
    with pytest.raises(ComparisonError, match="it had no requests"):
        plan_test("a.log", CHAT, Evidence(exact=True), 0.1, 0.95)
