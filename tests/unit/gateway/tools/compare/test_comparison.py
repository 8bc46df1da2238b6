"""Differences that are there are found, and others are not named more often than stated."""

import random
from html.parser import HTMLParser
from typing import Any

import pytest

from gateway.observability.recording import (
    RecordedAnswer,
    RecordedChoice,
    RecordedLoss,
    RecordedRequest,
    RecordedTiming,
    RecordedToolCall,
    RecordedUsage,
)
from gateway.tools.compare.comparison import (
    CompareReport,
    MeasureResult,
    binomial_p_value,
    compare,
    fisher_p_value,
)
from gateway.tools.compare.page import render_page
from gateway.tools.compare.text import list_notes, list_rows

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODY = {
    "messages": [{"role": "user", "content": "question"}],
    "tools": [TOOL],
    "stop": "END",
    "response_format": {"type": "json_object"},
}


def record(number: int, rng: random.Random, **fields: Any) -> RecordedRequest:
    """A request to a model that calls its tool now and then, and whose times vary."""
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


def make_side(seed: int, count: int = 150, **fields: Any) -> list[RecordedRequest]:
    rng = random.Random(seed)
    return [record(number, rng, **fields) for number in range(count)]


def make_replay(seed: int, count: int = 150, **fields: Any) -> list[RecordedRequest]:
    requests = make_side(seed, count, **fields)
    for request in requests:
        request.replay_of, request.id = request.id, f"x{request.id}"
    return requests


def find(report: CompareReport, name: str) -> MeasureResult:
    [result] = [result for result in report.measures if result.name == name]
    return result


def test_replay_is_compared_in_pairs_and_others_as_a_whole() -> None:
    a = make_side(1)
    assert compare(("a", "b"), a, make_replay(2)).pairs == 150
    others = make_side(3)
    for request in others:
        request.id += "-other"
    report = compare(("a", "b"), a, others)
    assert (report.pairs, report.a_requests, report.b_requests) == (0, 150, 150)
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
    b = make(2, **fields)
    if not paired:
        for request in b:
            request.id += "-other"
    report = compare(("a", "b"), make_side(1), b)
    assert find(report, measure).verdict == "worse"
    assert bool(report.examples) == paired


def test_dropped_tool_calls_are_found() -> None:
    report = compare(("a", "b"), make_side(1), make_replay(2, choice=RecordedChoice(text="{}")))
    result = find(report, "responses that call a tool")
    assert result.verdict == "different"
    assert result.difference is not None
    assert result.difference.high < -0.3
    assert any(example.reason == "calls no tool now" for example in report.examples)


def test_improvement_is_better() -> None:
    report = compare(("a", "b"), make_side(1, slower=1.5), make_replay(2))
    assert find(report, "duration").verdict == "better"


@pytest.mark.slow
@pytest.mark.parametrize("paired", [True, False], ids=["replay", "other requests"])
def test_equal_versions_are_flagged_at_most_as_often_as_stated(*, paired: bool) -> None:
    flagged = 0
    for run in range(200):
        a = make_side(1000 + run, 40)
        b = make_replay(5000 + run, 40)
        if not paired:
            for request in b:
                request.replay_of = ""
        report = compare(("a", "b"), a, b, similarity=lambda pairs: [1.0] * len(pairs))
        flagged += any(
            result.verdict in ("worse", "better", "different") for result in report.measures
        )
    # 5 % of 200 are 10; more than 18 have a probability below 1 %.
    assert flagged <= 18


def test_few_requests_are_not_enough_data() -> None:
    report = compare(("a", "b"), make_side(1, 5), make_replay(2, 5))
    result = find(report, "failed requests")
    assert (result.verdict, result.missing) == ("not enough data", 152)
    enough = find(compare(("a", "b"), make_side(1, 200), make_replay(2, 200)), "failed requests")
    assert enough.verdict == "no difference found"


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


def test_report_has_a_row_for_each_measure() -> None:
    report = compare(("a", "b"), make_side(1), make_replay(2, slower=1.3))
    rows = [*list_rows(report)]
    assert [row[0] for row in rows] == [result.name for result in report.measures]
    duration = next(row for row in rows if row[0] == "duration")
    assert duration[-1] == "worse"
    assert duration[4].startswith("+")
