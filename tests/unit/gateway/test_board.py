"""The board of ``interlingua top``: what is counted between two looks, and how it is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.board import Board, Counts, Unreadable, read
from gateway.board.counts import Count
from gateway.commands.top import _cut

INF = float("inf")
REQUESTS = 'interlingua_requests_total{model="%s",version="%s",split="%s",outcome="%s"} %d\n'
ASKED = [("m", "1", "s", "ok", 7), ("m", "1", "", "ok", 1), ("m", "1", "s", "cancelled", 2),
         ("m", "1", "s", "worker_error", 3), ("", "", "", "client_error", 9)]  # fmt: skip
PAGE = f"""\
# HELP interlingua_requests_total Exchanges, by how they ended.
# TYPE interlingua_requests_total counter
{"".join(REQUESTS % one for one in ASKED)}\
# HELP interlingua_tokens_total Tokens.
# TYPE interlingua_tokens_total counter
interlingua_tokens_total{{model="m",version="1",direction="input",source="worker"}} 100
interlingua_tokens_total{{model="m",version="1",direction="output",source="worker"}} 40
# HELP interlingua_requests_in_flight Now.
# TYPE interlingua_requests_in_flight gauge
interlingua_requests_in_flight{{model="m",phase="queued"}} 1
interlingua_requests_in_flight{{model="m",phase="streaming"}} 4
"""
WORKER = {
    "url": "http://w\x1b[2J", "state": "out", "in_flight": 2, "limit": None, "latency": 1.5,
    "back_in": None, "error": "connect", "weight": 1.0,
}  # fmt: skip


def test_a_page_is_read() -> None:
    counts = read(PAGE)
    assert counts.running == 5
    assert counts.of == {("m", "1"): Count(13, 3, 40, {})}


@pytest.mark.parametrize("text", ["", "<html>", "# TYPE a counter\na 1\n", PAGE + "interlingua_x{"])
def test_what_is_no_page(text: str) -> None:
    with pytest.raises(Unreadable):
        read(text)


def counts(requests: float, tokens: float = 0, below: dict[float, float] | None = None) -> Counts:
    return Counts({("m", "1"): Count(requests, requests / 10, tokens, below or {})})


def test_rates_are_those_of_the_last_minute() -> None:
    board = Board("u")
    first = board.look(100.0, counts(50, below={0.1: 50, INF: 50}), {})
    assert (first.seconds, first.rows[0].requests) == (0.0, 0.0)
    assert first.rows[0].first_token_p50 == pytest.approx(0.05)
    frames = [board.look(100.0 + n, counts(50 + 10 * n, 5 * n), {}) for n in range(1, 100)]
    assert frames[0].rows[0].requests == pytest.approx(10)
    assert frames[0].rows[0].errors == pytest.approx(1)
    assert frames[-1].seconds == 60
    assert frames[-1].rows[0].requests == pytest.approx(10)
    assert frames[-1].rows[0].tokens == pytest.approx(5)


def test_a_gateway_that_began_anew_is_looked_at_anew() -> None:
    board = Board("u")
    board.look(0.0, counts(1000), {})
    frame = board.look(10.0, counts(5), {})
    assert (frame.seconds, frame.rows[0].requests) == (0.0, 0.0)


def test_times_are_those_of_what_came_just_now() -> None:
    board = Board("u")
    board.look(0.0, counts(10, below={0.1: 10, 1.0: 10, INF: 10}), {})
    frame = board.look(1.0, counts(12, below={0.1: 10, 1.0: 11, INF: 12}), {})
    assert frame.rows[0].first_token_p50 == pytest.approx(1.0)
    assert frame.rows[0].first_token_p95 == 1.0  # above the last edge nothing is known


@given(
    st.lists(st.integers(0, 1000), min_size=3, max_size=3),
    st.floats(0.01, 1),
)
def test_a_share_lies_between_its_edges(new: list[int], share: float) -> None:
    below = {0.1: new[0], 1.0: new[0] + new[1], INF: sum(new)}
    found = Count(below=dict(below)).first_token(share)
    if not sum(new):
        assert found is None
        return
    assert found is not None
    wanted = share * sum(new)
    edge = next(edge for edge, count in below.items() if count >= wanted)
    low = {0.1: 0.0, 1.0: 0.1, INF: 1.0}[edge]
    assert low <= found <= min(edge, 1.0) + 1e-9


def test_it_is_shown_without_what_a_terminal_would_obey() -> None:
    board = Board("http://a")
    frame = board.look(0.0, counts(10, below={0.02: 10, INF: 10}), {"gpu": [WORKER]})
    assert [*frame.lines(colours=False)] == [
        "http://a: 0 running, 0.0 requests/s, 0.0 errors/s, over 0 s",
        "",
        "MODEL  VERSION  REQ/S  ERR/S  TTFT P50  TTFT P95  TOKENS/S",
        "m      1          0.0    0.0     10 ms     19 ms       0.0",
        "",
        "BACKEND  WORKER        STATE  RUNNING  LATENCY  LAST ERROR",
        "gpu      http://w?[2J  out          2   1.50 s  connect",
    ]
    assert "\x1b[31mout  \x1b[0m" in [*frame.lines(colours=True)][-1]


def test_first_tokens_are_read_by_their_edges() -> None:
    name = "interlingua_time_to_first_token_seconds"
    lines = [f"# HELP {name} Of streams.", f"# TYPE {name} histogram"]
    for split in "ab":
        of = f'model="m",version="1",split="{split}"'
        lines += [f'{name}_bucket{{{of},le="{le}"}} {n}' for le, n in (("0.1", 2), ("+Inf", 3))]
        lines += [f"{name}_sum{{{of}}} 1", f"{name}_count{{{of}}} 3"]
    counts = read(PAGE + "\n".join(lines) + "\n")
    assert counts.of["m", "1"].below == {0.1: 4, INF: 6}


def test_trouble_is_shown_and_what_there_is_none_of_is_not() -> None:
    frame = replace(Board("u").look(0.0, counts(10), {}), trouble="gone\x07")
    assert [*frame.lines(colours=True)] == [
        "u: 0 running, 0.0 requests/s, 0.0 errors/s, over 0 s",
        "\x1b[31mgone?\x1b[0m",
        "",
        "MODEL  VERSION  REQ/S  ERR/S  TTFT P50  TTFT P95  TOKENS/S",
        "m      1          0.0    0.0         -         -       0.0",
    ]


def test_a_line_is_cut_where_the_terminal_ends() -> None:
    assert _cut("abcdef", 3) == "abc"
    assert _cut("a\x1b[31mbc\x1b[0md", 2) == "a\x1b[31mb\x1b[0m"
