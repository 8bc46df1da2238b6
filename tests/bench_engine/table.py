"""What a run found, as the tables of docs/performance-engine.md."""

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from tests.bench_engine.peers import PEERS
from tests.bench_engine.running import BESIDE, Report

BEGIN, END = "<!-- the tables: make bench-engine -->", "<!-- end of the tables -->"


class Bar(NamedTuple):
    """Our cost by a peer's, at so many requests: what it must not exceed, and what is aimed at."""

    ours: str
    peer: str
    at: int
    must: float
    aim: float


BARS = (
    Bar("ours", "generate-batch", 16, 0.75, 0.55),
    Bar("ours", "transformers-serve", 16, 0.6, 0.4),
    Bar("ours", "vllm", 16, 1.25, 1.0),
    Bar("ours-int8", "openvino", 16, 1.4, 1.0),
    Bar("ours-int8", "llama-q8", 16, 0.8, 0.5),
    Bar("ours-int8", "llama-q4", 16, 1.0, 0.75),
    Bar("ours-int8", "llama-q4", 1, 2.2, 1.5),
    Bar("ours-vectors", "sentence-transformers", 1, 0.8, 0.65),
)
BUSY = (0.6, 0.9)
"""Our speed with the gateway kept busy, by that without: what must be reached, and the aim."""


def tables(report: Report) -> str:
    """Both tables, with what they were made on."""
    return "\n".join([*_told(report), "", *_costs(report), "", *_bars(report), "", *_gone(report)])


def _told(report: Report) -> Iterator[str]:
    before, after = report.load
    yield f"{report.machine}; load average {before:.1f} before and {after:.1f} after, of which the"
    yield f"run itself makes about 1. {report.rounds} rounds, {report.tokens} tokens an answer."


def _costs(report: Report) -> Iterator[str]:
    """One line a peer: processor milliseconds of each token, and the spread over the rounds."""
    sizes = sorted({one.at for one in report.measured if not PEERS[one.peer].vectors})
    heads = "".join(f" {size} at a time |" for size in sizes)
    yield f"| cpu-ms for each token (or text) | weights |{heads} memory |"
    yield "| --- | --- |" + " ---: |" * (len(sizes) + 1)
    for name in dict.fromkeys(one.peer for one in report.measured):
        found = {one.at: one.costs for one in report.measured if one.peer == name}
        cells = "".join(f" {_spread(found[size])} |" if size in found else " |" for size in sizes)
        memory = f"{report.memory[name] / 1e6:,.0f} MB"
        yield f"| {PEERS[name].what} | {PEERS[name].form} |{cells} {memory} |"


def _spread(costs: list[float]) -> str:
    return f"{statistics.median(costs):.1f} ({min(costs):.1f} to {max(costs):.1f})"


def _bars(report: Report) -> Iterator[str]:
    """One line a bar: the median over the rounds of ours by theirs in the same round."""
    yield "| ours by theirs | at a time | must | aim | found | |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    costs = {(one.peer, one.at): one.costs for one in report.measured}
    for bar in BARS:
        said = f"| {PEERS[bar.ours].form} by {PEERS[bar.peer].what}, {PEERS[bar.peer].form} "
        goal = f"| {bar.at} | {bar.must} | {bar.aim} "
        ours, theirs = costs.get((bar.ours, bar.at)), costs.get((bar.peer, bar.at))
        if ours is None or theirs is None:
            yield f"{said}{goal}| | not measured |"
            continue
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        met = "aim met" if ratio <= bar.aim else "met" if ratio <= bar.must else "**missed**"
        yield f"{said}{goal}| {ratio:.2f} | {met} |"
    if report.busy:
        ratio, (must, aim) = statistics.median(report.busy), BUSY
        met = "aim met" if ratio >= aim else "met" if ratio >= must else "**missed**"
        said = "speed with the gateway kept busy, by that without (more is better)"
        yield f"| {said} | {BESIDE} | {must} | {aim} | {ratio:.2f} | {met} |"


def _gone(report: Report) -> Iterator[str]:
    """Who could not be had, and why."""
    for name, why in report.missing.items():
        yield f"- not had: {PEERS[name].what}: {' '.join(why.split())}"


def renewed(page: str, report: Report) -> str:
    """The page with these tables in the place of those it has."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(report).strip()}\n\n{END}{after}"
