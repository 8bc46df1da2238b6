"""Real differences are found, and false ones are reported no more often than stated."""

import random
from html.parser import HTMLParser
from typing import Any

import pytest

from gateway.evidence.measures import (
    MeasureResult,
    is_difference,
    list_cells,
    summarize_verdicts,
)
from gateway.evidence.recordings import CompareReport, Similarity, compare
from gateway.evidence.statistics import binomial_p_value, fisher_p_value
from gateway.observability.recording import (
    RecordedAnswer,
    RecordedChoice,
    RecordedLoss,
    RecordedRequest,
    RecordedTiming,
    RecordedToolCall,
    RecordedUsage,
)
from gateway.tools.compare.page import render_page
from gateway.tools.compare.text import describe_pairing, describe_sides, list_notes

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODY = {
    "messages": [{"role": "user", "content": "question"}],
    "tools": [TOOL],
    "stop": "END",
    "response_format": {"type": "json_object"},
}


def record(number: int, rng: random.Random, **fields: Any) -> RecordedRequest:
    """Make a record of a model that sometimes calls its tool and whose times vary."""
    calls = [RecordedToolCall("f", "{}")] if rng.random() < 0.5 else []
    choice = fields.pop("choice", None) or RecordedChoice(
        text="" if calls else "{}", tool_calls=calls, finish_reason="eos"
    )
    speed = rng.lognormvariate(0, 0.4) * fields.pop("slower", 1.0)
    values: dict[str, Any] = {
        "status": 200,
        "stream": True,
        "request": BODY,
        "answer": RecordedAnswer([choice]),
        "usage": RecordedUsage(9, 1 + int(rng.expovariate(0.02)), "worker"),
        "timing": RecordedTiming(first_token=0.1 * speed, duration=speed),
    }
    return RecordedRequest(id=f"r{number}", at=float(number), **(values | fields))


def make_side(seed: int, count: int = 150, run: str = "", **fields: Any) -> list[RecordedRequest]:
    """Build one side of a comparison; records of the same ``run`` are answered at the same time."""
    rng = random.Random(seed)
    return [record(number, rng, replay_run=run, **fields) for number in range(count)]


def make_replay(seed: int, count: int = 150, run: str = "", **fields: Any) -> list[RecordedRequest]:
    requests = make_side(seed, count, run, **fields)
    for request in requests:
        request.replay_of, request.id = request.id, f"x{request.id}"
    return requests


def find(report: CompareReport, name: str) -> MeasureResult:
    [result] = [result for result in report.measures if result.measure == name]
    return result


def test_replay_is_compared_in_pairs_and_others_as_a_whole() -> None:
    a = make_side(1)
    assert compare(("a", "b"), a, make_replay(2)).pairs == 150

    others = make_side(3)
    for request in others:
        request.id += "-other"
    report = compare(("a", "b"), a, others)

    assert (report.pairs, report.a.requests, report.b.requests) == (0, 150, 150)
    assert report.texts is None


REGRESSIONS: dict[str, tuple[dict[str, Any], str]] = {
    "stop is ignored": ({"choice": RecordedChoice(text="{} END")}, "responses with a stop string"),
    "invalid JSON": ({"choice": RecordedChoice(text="{")}, "valid JSON"),
    "declines": ({"choice": RecordedChoice(text="I cannot help")}, "responses that decline"),
    "empty": ({"choice": RecordedChoice(text="")}, "empty responses"),
    "refused": ({"status": 400, "outcome": "client_error"}, "refused requests"),
    "fails": ({"status": 502, "outcome": "worker_error"}, "failed requests"),
    "loses": ({"losses": [RecordedLoss("seed", "dropped")]}, "requests that lose parameters"),
    "30 % slower": ({"slower": 1.3}, "duration"),
}  # fmt: skip


@pytest.mark.parametrize("paired", [True, False], ids=["replay", "other requests"])
@pytest.mark.parametrize("name", REGRESSIONS)
def test_regression_is_found(name: str, *, paired: bool) -> None:
    fields, measure = REGRESSIONS[name]
    make = make_replay if paired else make_side
    b = make(2, run="x", **fields)
    if not paired:
        for request in b:
            request.id += "-other"

    report = compare(("a", "b"), make_side(1, run="x"), b, share_traffic=not paired)

    assert find(report, measure).verdict == "worse"
    assert bool(report.examples) == paired


def test_dropped_tool_calls_are_found() -> None:
    report = compare(("a", "b"), make_side(1), make_replay(2, choice=RecordedChoice(text="{}")))
    result = find(report, "responses that call a tool")

    assert result.verdict == "worse"
    assert result.difference is not None
    assert result.difference.high < -0.3
    assert any(example.reason == "calls no tool now" for example in report.examples)


def test_improvement_is_better() -> None:
    report = compare(("a", "b"), make_side(1, slower=1.5, run="x"), make_replay(2, run="x"))
    assert find(report, "duration").verdict == "better"


@pytest.mark.slow
@pytest.mark.parametrize("paired", [True, False], ids=["replay", "other requests"])
def test_equal_versions_are_flagged_at_most_as_often_as_stated(*, paired: bool) -> None:
    flagged = 0
    for run in range(200):
        a = make_side(1000 + run, 40, run="x")
        b = make_replay(5000 + run, 40, run="x")
        if not paired:
            for request in b:
                request.replay_of = ""
        report = compare(
            ("a", "b"),
            a,
            b,
            similarity=Similarity(lambda pairs: [1.0] * len(pairs), "none"),
            share_traffic=not paired,
        )
        flagged += any(map(is_difference, report.measures))

    # 5 % of 200 is 10; more than 18 has a probability below 1 %.
    assert flagged <= 18


def test_few_requests_are_not_enough_data() -> None:
    report = compare(("a", "b"), make_side(1, 5), make_replay(2, 5))
    result = find(report, "failed requests")
    assert (result.verdict, result.missing) == ("not enough data", 278)

    enough = find(compare(("a", "b"), make_side(1, 200), make_replay(2, 200)), "failed requests")
    assert enough.verdict == "no relevant difference"


@pytest.mark.parametrize(
    ("hits", "total", "p"), [(0, 0, 1), (0, 5, 0.0625), (1, 10, 0.021484375), (5, 10, 1)]
)
def test_binomial_test(hits: int, total: int, p: float) -> None:
    assert binomial_p_value(hits, total) == pytest.approx(p)


def test_fisher_test() -> None:
    # Fisher's tea tasting, and R's fisher.test(matrix(c(1, 9, 11, 3), 2)).
    assert fisher_p_value(3, 4, 1, 4) == pytest.approx(0.4857142857)
    assert fisher_p_value(1, 10, 11, 14) == pytest.approx(0.002759456)
    assert fisher_p_value(0, 10, 0, 10) == pytest.approx(1)


def test_tables_count_what_changed() -> None:
    a = make_side(1, 4)
    b = make_replay(1, 4)
    b[0].status, b[0].outcome, b[0].error = 400, "client_error", "InvalidParameter"
    b[1].losses = [RecordedLoss("seed", "dropped"), RecordedLoss("stop", "dropped")]
    report = compare(("a", "b"), a, b)

    assert report.errors == [("400 InvalidParameter", 0, 1)]
    assert report.losses == [("seed", 0, 1), ("stop", 0, 1)]
    assert report.finish_reasons == [("eos", 4, 3)]
    assert report.examples[0].reason == "is refused now"
    assert report.examples[0].b == "(400 InvalidParameter)"

    notes = "\n".join(list_notes(report))
    assert "lost parameters (A, B): seed 0, 1; stop 0, 1" in notes


def test_equal_texts_are_counted() -> None:
    texts = ["one", "One ", "two"]
    a = make_side(1, 3, choice=RecordedChoice(text="one"))
    b = make_replay(1, 3)
    for request, text in zip(b, texts, strict=True):
        request.answer = RecordedAnswer([RecordedChoice(text=text)])

    report = compare(("a", "b"), a, b)

    assert report.texts is not None
    assert report.texts.equal == pytest.approx(1 / 3)
    assert report.texts.equal_normalised == pytest.approx(2 / 3)
    assert 0 < report.texts.similarity < 1


class _PageReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags = list[str]()
        self.links = list[str]()
        self.data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.data += data


def test_page_shows_recorded_text_and_runs_none_of_it() -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=y>'\"&"
    body = {"messages": [{"role": "user", "content": hostile}], "stop": "<"}
    a = make_side(1, 30, request=body, choice=RecordedChoice(text="a", finish_reason="eos"))
    b = make_replay(2, 30, request=body, choice=RecordedChoice(text=hostile, finish_reason="eos"))
    b[0].losses = [RecordedLoss(hostile, "dropped")]
    b[1].status, b[1].outcome, b[1].error = 400, "client_error", hostile
    page = render_page(compare((hostile, f"{hostile}2"), a, b))

    reader = _PageReader()
    reader.feed(page)

    assert "script" not in reader.tags
    assert "img" not in reader.tags
    assert reader.links == []
    assert reader.data.count(hostile) > 6
    assert {"svg", "polyline", "table"} <= set(reader.tags)
    assert "default-src 'none'" in page


def test_page_shows_controls_of_recorded_text_as_escapes() -> None:
    """They would change the direction or the rest of the page, or could not be written."""
    hostile = "a\u202eb\x00c\x1b[2Jd\ud800e\u2066f\ng"
    body = {"messages": [{"role": "user", "content": hostile}], "stop": "<"}
    a = make_side(1, 30, request=body, choice=RecordedChoice(text="a", finish_reason="eos"))
    b = make_replay(2, 30, request=body, choice=RecordedChoice(text=hostile, finish_reason="eos"))
    page = render_page(compare((hostile, "b"), a, b))

    assert r"a\u202eb\u0000c\u001b[2Jd\ud800e\u2066f" in page
    assert not set(page) & set("\u202e\x00\x1b\ud800\u2066")
    assert page.encode()


def test_measures_that_differ_stand_first_and_in_the_summary() -> None:
    """Given a version B that is 30 % slower and equal otherwise."""
    report = compare(("a", "b"), make_side(1, run="x"), make_replay(2, slower=1.3, run="x"))
    assert [one.measure for one in report.measures][:2] == [
        "duration",
        "time to the first token",
    ]
    assert summarize_verdicts(report.measures).startswith("2 of 15 measures are worse: duration")
    cells = list_cells(report.measures[0])
    assert cells[6] == "worse"
    assert cells[4].startswith("+")


@pytest.mark.parametrize("name", REGRESSIONS)
@pytest.mark.parametrize("count", [12, 60, 150])
def test_interval_and_verdict_agree(name: str, count: int) -> None:
    fields, _ = REGRESSIONS[name]
    a, b = make_side(1, count, run="x"), make_replay(2, count, run="x", **fields)
    for result in compare(("a", "b"), a, b).measures:
        assert is_difference(result) == result.has_difference, result


def test_times_of_separate_runs_are_not_judged() -> None:
    report = compare(("a", "b"), make_side(1), make_replay(2, slower=3.0))
    duration = find(report, "duration")
    assert (duration.verdict, duration.difference) == ("not judged", None)
    assert "answered at different times, so that times can't be judged" in describe_pairing(report)


def test_a_report_names_the_targets_and_the_dates() -> None:
    a, b = make_side(1, 3), make_replay(2, 3)
    for request in b:
        request.replay_target, request.at = "chat@2", 1_700_000_000.0
    first, second = describe_sides(compare(("old", "new"), a, b))
    assert first == "A: old, 3 requests, 1970-01-01 00:00:00 to 1970-01-01 00:00:02 UTC"
    assert second == ("B: new (chat@2), 3 requests, 2023-11-14 22:13:20 to 2023-11-14 22:13:20 UTC")


def test_truncated_responses_are_worse_and_no_gain_in_speed() -> None:
    """Given a version B that ends in the middle of its text without an error, and so is faster."""
    long, short = RecordedChoice(text="one two three"), RecordedChoice(text="one two")
    a = make_side(1, run="x", choice=long, usage=RecordedUsage(9, 30, "worker"))
    b = make_replay(2, run="x", choice=short, usage=RecordedUsage(9, 10, "worker"), slower=1 / 3)
    report = compare(("a", "b"), a, b)
    assert find(report, "responses that end early").verdict == "worse"
    assert find(report, "completion tokens").verdict == "worse"
    duration = find(report, "duration")
    assert duration.verdict == "different"
    assert duration.note == "the responses are shorter: see duration per token"
    assert find(report, "duration per token").verdict != "better"


def test_text_after_a_stop_string_does_not_make_the_other_one_too_short() -> None:
    a = make_side(1, choice=RecordedChoice(text="{} END and more"))
    b = make_replay(2, choice=RecordedChoice(text="{}"))
    report = compare(("a", "b"), a, b)
    assert find(report, "responses with a stop string").verdict == "better"
    assert not [one for one in report.measures if one.measure == "responses that end early"]
