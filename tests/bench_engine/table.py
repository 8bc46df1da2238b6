"""Formats the results of a run as the tables of docs/performance-engine.md."""

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.bench_engine.peers import PEERS
from tests.bench_engine.running import BUSY_CLIENTS, Report

BEGIN, END = "<!-- the tables: make bench-engine -->", "<!-- end of the tables -->"


class SpeedGoal(NamedTuple):
    """Limit (``must``) and goal (``aim``) of our cost / a peer's, at ``at`` concurrent requests."""

    own: str
    peer: str
    at: int
    must: float
    aim: float


BARS = (
    SpeedGoal("ours", "generate", 1, 1.1, 0.95),
    SpeedGoal("ours", "generate", 16, 0.75, 0.6),
    SpeedGoal("ours", "generate-batch", 16, 0.75, 0.55),
    SpeedGoal("ours", "transformers-serve", 16, 0.6, 0.4),
    SpeedGoal("ours", "vllm", 16, 1.25, 1.0),
    SpeedGoal("ours-int8", "openvino", 16, 1.4, 1.0),
    SpeedGoal("ours-int8", "llama-q8", 16, 0.8, 0.5),
    SpeedGoal("ours-int8", "llama-q4", 16, 1.0, 0.75),
    SpeedGoal("ours-int8", "llama-q4", 1, 2.2, 1.5),
    SpeedGoal("ours-quantized", "llama-q4", 1, 2.8, 1.5),
    SpeedGoal("ours-large", "llama-large", 1, 2.8, 1.5),
    SpeedGoal("ours-vectors", "sentence-transformers", 1, 0.8, 0.65),
)
BUSY = (0.6, 0.9)
"""Our speed with a busy gateway / our speed with an idle one: the limit and the goal."""


def format_tables(report: Report) -> str:
    """Both tables, after a line about the machine."""
    return "\n".join(
        [*_format_report(report), "", *_costs(report), "", *_bars(report), "", *_gone(report)]
    )


def _format_report(report: Report) -> Iterator[str]:
    before, after = report.load
    yield f"{report.machine}; load average {before:.1f} before and {after:.1f} after the run, which"
    yield f"itself adds about {report.threads}. {report.rounds} rounds, {report.tokens} tokens per"
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    yield f"response, {threads} of each engine."


def _costs(report: Report) -> Iterator[str]:
    """One row per peer: CPU milliseconds per token, with the range over the rounds."""
    sizes = sorted({one.at for one in report.measurements if not PEERS[one.peer].vectors})
    heads = "".join(f" {size} concurrent |" for size in sizes)
    yield f"| CPU ms per token (or embedded text) | weights |{heads} memory |"
    yield "| --- | --- |" + " ---: |" * (len(sizes) + 1)
    for name in dict.fromkeys(one.peer for one in report.measurements):
        costs = {one.at: one.costs for one in report.measurements if one.peer == name}
        cells = "".join(f" {_spread(costs[size])} |" if size in costs else " |" for size in sizes)
        memory = f"{report.memory[name] / 1e6:,.0f} MB"
        yield f"| {PEERS[name].what} | {PEERS[name].form} |{cells} {memory} |"


def _spread(costs: list[float]) -> str:
    return f"{statistics.median(costs):.1f} ({min(costs):.1f} to {max(costs):.1f})"


def _bars(report: Report) -> Iterator[str]:
    """One row per bar of the run's peers: the median ratio of our cost and theirs in a round."""
    yield "| CPU of Interlingua / CPU of peer | concurrent | limit | goal | result | |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    costs = {(one.peer, one.at): one.costs for one in report.measurements}
    peers = {name for name, _ in costs} | set(report.missing)
    for bar in BARS:
        if bar.peer not in peers:
            continue  # of another run
        row = f"| {PEERS[bar.own].form} / {PEERS[bar.peer].what}, {PEERS[bar.peer].form} "
        goal = f"| {bar.at} | {bar.must} | {bar.aim} "
        own, theirs = costs.get((bar.own, bar.at)), costs.get((bar.peer, bar.at))
        if own is None or theirs is None:
            yield f"{row}{goal}| | not measured |"
            continue
        ratio = statistics.median(a / b for a, b in zip(own, theirs, strict=True))
        met = "goal met" if ratio <= bar.aim else "met" if ratio <= bar.must else "**missed**"
        yield f"{row}{goal}| {ratio:.2f} | {met} |"
    if report.busy:
        ratio, (must, aim) = statistics.median(report.busy), BUSY
        met = "goal met" if ratio >= aim else "met" if ratio >= must else "**missed**"
        row = "speed with a busy gateway / speed with an idle one (higher is better)"
        yield f"| {row} | {BUSY_CLIENTS} | {must} | {aim} | {ratio:.2f} | {met} |"


def _gone(report: Report) -> Iterator[str]:
    """Return the peers that were not measured, and why."""
    for name, why in report.missing.items():
        yield f"- not measured: {PEERS[name].what}: {' '.join(why.split())}"


def replace_tables(page: str, reports: Sequence[Report]) -> str:
    """Replace the tables of the page by those of these runs, one after another."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n\n".join(format_tables(report).strip() for report in reports)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"
