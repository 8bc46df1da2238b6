"""An access log and a metrics page give the same results for the same requests."""

from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.evidence.sources import (
    Evidence,
    JudgeAgreement,
    SourceError,
    UsageQuery,
    is_metrics_page,
    read_access_log,
    read_metrics_page,
    read_usage_rows,
)
from gateway.observability.metrics.requests import MetricsCollector
from gateway.observability.record import RequestRecord, ignore_record
from gateway.observability.usage import OutcomeRow, UsageExtract, build_usage_row
from protocols.core.events import Usage
from protocols.core.loss import UnsupportedParameter

Reading = Callable[[Sequence[RequestRecord], UsageQuery], Evidence]
CHAT = UsageQuery("chat")
ONE = RequestRecord(
    "r",
    started_at=1000.0,
    protocol="openai",
    path="/v1/chat/completions",
    model="chat",
    version="1",
    backend="gpu",
    first_token=0.25,
    duration=2.0,
    usage=Usage(10, 5),
    finish_reasons=("eos",),
    split="rollout",
)
TWO = replace(ONE, version="2")
RECORDS = (
    ONE,
    replace(ONE, unsupported_parameters=(UnsupportedParameter("top_k", "dropped"),)),
    replace(ONE, outcome="truncated", error="StreamBroken", finish_reasons=(), usage=None),
    TWO,
    replace(TWO, duration=4.0),
    replace(TWO, split="", sticky="pinned"),
    replace(TWO, split="", rule="testers"),
    replace(TWO, split=""),
    replace(ONE, fallback_from="chat@2", failed_attempts=("chat@2 WorkerFailed",)),
    replace(ONE, model="small", fallback_from="chat@2", failed_attempts=("chat@2 WorkerFailed",)),
    replace(ONE, model="small", split=""),
    replace(ONE, model="small", version="2", fallback_from="small@1"),
    replace(ONE, model="", version="", split="", outcome="client_error", error="Unauthorized"),
)


def read_as_log(records: Sequence[RequestRecord], query: UsageQuery) -> Evidence:
    return read_access_log([msgspec.json.encode(record) + b"\n" for record in records], query)


def read_as_metrics_page(records: Sequence[RequestRecord], query: UsageQuery) -> Evidence:
    metrics = MetricsCollector(ignore_record, dict)
    for record in records:
        metrics.record_request(record)
    page = metrics.render_page()
    assert is_metrics_page(page.splitlines()[0])
    return read_metrics_page(page.decode(), query)


both = pytest.mark.parametrize("reading", [read_as_log, read_as_metrics_page])


@both
def test_variant_counts_only_requests_routed_by_its_split(reading: Reading) -> None:
    observed = reading(RECORDS, CHAT)

    assert set(observed.variants) == {("rollout", "1"), ("rollout", "2")}
    assert observed.splits() == ["rollout"]
    assert observed.models == {"chat", "small"}

    one, two = observed.variants["rollout", "1"], observed.variants["rollout", "2"]
    assert (one.routed_requests, one.answered_by_fallback, one.lossy_requests) == (3, 0, 1)
    assert (two.routed_requests, two.answered_by_fallback, two.lossy_requests) == (4, 2, 0)
    assert one.outcomes == {("openai", "gpu", "ok"): 2, ("openai", "gpu", "truncated"): 1}
    assert one.finish_reasons == {("eos",): 2}
    assert two.tokens == {("input", "worker"): 20, ("output", "worker"): 10}


def test_usage_rows_count_requests_that_a_fallback_answered_for_the_version_that_failed() -> None:
    """A sticky user whose request a fallback answered stays one of the version that failed."""
    user = replace(RECORDS[8], user_hash="u")
    rows = [build_usage_row(record) for record in (user, *RECORDS[9:12], TWO)]
    observed = read_usage_rows(UsageExtract(["chat"], rows, []), CHAT)

    assert set(observed.variants) == {("rollout", "2")}
    two = observed.variants["rollout", "2"]
    assert (two.routed_requests, two.answered_by_fallback) == (3, 2)
    assert observed.excluded == {"answered by a fallback": 1}
    assert observed.users == {("rollout", "2"): {"u"}}


@both
def test_everything_counts_all_requests_of_a_version(reading: Reading) -> None:
    observed = reading(RECORDS, UsageQuery("chat", everything=True))

    assert set(observed.variants) == {("", "1"), ("", "2")}
    assert observed.variants["", "1"].routed_requests == 4
    assert observed.variants["", "2"].routed_requests == 7
    assert observed.variants["", "2"].answered_by_fallback == 2


@both
def test_means_are_exact_from_both_sources(reading: Reading) -> None:
    two = reading(RECORDS, CHAT).variants["rollout", "2"]
    means = [
        one.mean() for one in (two.first_token, two.duration, two.per_token, two.completion_tokens)
    ]
    values = [(mean.n, mean.value) for mean in means if mean is not None]

    assert values == [(2, 0.25), (2, 3.0), (2, pytest.approx(2.75 / 4)), (2, 5.0)]


def test_excluded_requests_are_counted_with_reasons() -> None:
    assert read_as_log(RECORDS, CHAT).excluded == {
        "pinned by the client": 1,
        "sent by a rule": 1,
        "of no split": 1,
        "answered by a fallback": 1,
    }
    assert read_as_metrics_page(RECORDS, CHAT).excluded == {"that no split sent there": 4}


def test_log_counts_sticky_requests() -> None:
    held = replace(ONE, sticky="header:x-user-id")
    assert read_as_log([ONE, held, replace(ONE, sticky="pinned", split="")], CHAT).sticky == 1


def test_other_log_lines_are_counted_as_skipped() -> None:
    lines = [
        b"interlingua serves chat on http://127.0.0.1:8000\n",
        b'{"level": "info", "id": "r", "model": "chat"}\n',
        b'{"id": "\xff"}\n',
        b"[" * 5000,
        msgspec.json.encode(ONE) + b"\n",
        b"\n",
    ]
    observed = read_access_log(lines, CHAT)

    assert (observed.lines, observed.skipped, observed.early) == (6, 5, 0)
    assert observed.variants["rollout", "1"].routed_requests == 1


def test_requests_before_since_are_excluded() -> None:
    observed = read_as_log([ONE, replace(TWO, started_at=2000.0)], UsageQuery("chat", since=1500.0))
    assert set(observed.variants) == {("rollout", "2")}
    assert (observed.early, observed.skipped) == (1, 0)


def test_versions_are_sorted_numerically() -> None:
    observed = read_as_log([replace(ONE, version=name) for name in ("next", "10", "9")], CHAT)
    assert observed.versions("rollout") == ["9", "10", "next"]


def test_unrelated_metrics_are_ignored() -> None:
    page = """\
# HELP other_total Something else.
# TYPE other_total counter
other_total{model="chat"} 5
# TYPE interlingua_worker_up gauge
interlingua_worker_up{backend="b",worker="w"} 1
# TYPE interlingua_later_seconds histogram
interlingua_later_seconds_bucket{model="chat",version="1",split="s",le="+Inf"} 1
interlingua_later_seconds_sum{model="chat",version="1",split="s"} 1
# TYPE interlingua_shadow_requests_total counter
interlingua_shadow_requests_total{model="chat",version="1"} 1
"""
    observed = read_metrics_page(page, CHAT)

    assert (observed.variants, observed.models) == ({}, set())


VERSION_LABELS = 'model="chat",version="1",split="s"'
REQUESTS_SAMPLE = (
    f'interlingua_requests_total{{{VERSION_LABELS},protocol="d",backend="b",outcome="ok"}}'
)


@pytest.mark.parametrize(
    "page",
    [
        f"{REQUESTS_SAMPLE} x\n",
        f"{REQUESTS_SAMPLE} NaN\n",
        f"{REQUESTS_SAMPLE} +Inf\n",
        f"{REQUESTS_SAMPLE} -1\n",
        f"{REQUESTS_SAMPLE} 1\ninterlingua_lossy_requests_total{{{VERSION_LABELS}}} 2\n",
        "interlingua_requests_total 1\n",
        'interlingua_requests_total{model="chat"} 1\n',
        f'interlingua_completion_tokens_bucket{{{VERSION_LABELS},le="4.0"}} 1\n',
        f'interlingua_completion_tokens_bucket{{{VERSION_LABELS},le="four"}} 1\n',
        (
            f'interlingua_completion_tokens_bucket{{{VERSION_LABELS},le="4.0"}} 2\n'
            f'interlingua_completion_tokens_bucket{{{VERSION_LABELS},le="+Inf"}} 1\n'
        ),
    ],
)
def test_inconsistent_metrics_page_is_rejected(page: str) -> None:
    with pytest.raises(SourceError):
        read_metrics_page(page, CHAT)


def test_truncated_metrics_page_is_read_or_rejected() -> None:
    metrics = MetricsCollector(ignore_record, dict)
    for record in RECORDS:
        metrics.record_request(record)
    page = metrics.render_page().decode()
    read_count = 0

    for end in range(0, len(page), 997):
        try:
            read_count += len(read_metrics_page(page[:end], CHAT).variants) == 2
        except SourceError:
            continue

    assert read_count > 1


@given(st.lists(st.binary() | st.sampled_from([msgspec.json.encode(one) for one in RECORDS])))
def test_log_of_any_bytes_is_read(lines: list[bytes]) -> None:
    observed = read_access_log(lines, CHAT)
    assert observed.lines == len(lines)
    assert observed.skipped <= sum(not line.startswith(b"{") or len(line) < 100 for line in lines)


def test_agreement_with_the_judge_counts_requests_that_a_user_judges_as_well() -> None:
    """Users judge r1 and r2 as the judge does, and r3 not; r4 has no verdict."""

    def make_row(number: int, name: str, value: float) -> OutcomeRow:
        labels = ("1", "split", "", "", "openai", "")
        return OutcomeRow(float(number), f"r{number}", *labels, name, "number", value, "", 9.0)

    verdicts = [make_row(number, "judge", good) for number, good in ((1, 1), (2, 0), (3, 1))]
    feedback = [make_row(number, "liked", value) for number, value in enumerate((1, 0.2, 0, 1), 1)]
    others = [make_row(1, "undecided", 0.5), make_row(2, "stars", 4)]

    extract = UsageExtract(["chat"], [], [*verdicts, *feedback, *others])
    evidence = read_usage_rows(extract, CHAT)

    assert evidence.agreements == [JudgeAgreement("liked", requests=3, agreeing=2)]
