"""Results as a page, and two of them beside each other."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Final

from tests.bench.interlingua import INTERLINGUA
from tests.bench.results import Results, Sample, StartMeasurement, compute_spread, format_number

MARK: Final = "<!-- results: everything below is made by python -m tests.bench table -->"
_WORSE_RATIO: Final = 1.10
"""What the median of the ratios must rise to, with no round in common, to count as worse.

It is multiplied by what the baseline shows beside itself: that much is noise.
"""
_NOISE: Final = (
    "> **A noisy machine.** Others used up to {others:.0%} of it, and the baseline moved by more"
    " than a quarter around {moved} of {count} measurements, so that only ratios are told here:"
    " each was taken side by side with the baseline. Read nothing out of differences that lie"
    " within a spread, nor within what the baseline shows beside itself."
)
_IDLE: Final = "Others used up to {others:.0%} of the machine meanwhile."


def render_report(results: Results) -> str:
    """Markdown: what was measured, each load's table, memory, steps, and what is missing."""
    parts = [_render_summary(results), _render_comparison(results)]
    parts += [_render_load(results, load) for load in results.loads()]
    parts += [_render_memory(results), _render_steps(results), _render_missing(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def replace_results(page: str, results: str) -> str:
    """A page with these results behind its mark, in the place of what stood there."""
    before, mark, _ = page.partition(MARK)
    return f"{before}{mark or MARK}\n\n{results}"


def count_errors(results: Results) -> int:
    """1 if our own gateway made a mistake: peers may."""
    return int(any(sample.outcome.errors for sample in results.samples if _is_interlingua(sample)))


def _is_interlingua(sample: Sample) -> bool:
    return sample.gateway.startswith(INTERLINGUA.name)


def compare_results(old: Results, new: Results) -> tuple[list[str], bool]:
    """A line for each that both have, and whether any of ours became clearly worse."""
    lines, worse = [], False
    if old.baseline != new.baseline:
        return [f"not comparable: measured by {old.baseline} and by {new.baseline}"], True
    known = set(old.measured())
    for key in new.measured():
        before, after = old.ratio(key), new.ratio(key)
        if key not in known or before is None or after is None:
            continue
        change = after.median / before.median
        enough = _WORSE_RATIO * max(_noise(old, key[2]), _noise(new, key[2]))
        bad = change > enough and after.least > before.most
        good = 1 / change > enough and after.most < before.least
        word = "WORSE" if bad else "better" if good else ""
        worse = worse or (bad and key[0].startswith(INTERLINGUA.name))
        gateway, pair, load = key
        lines.append(
            f"{load:28} {gateway:28} {pair:17} {before!s:>22} -> {after!s:>22}"
            f" {change - 1:+7.0%}  {word}".rstrip()
        )
    return lines, worse


def _noise(results: Results, load: str) -> float:
    """By how much the baseline differs from itself, from its least to its most."""
    keys = [key for key in results.measured() if key[0] == results.baseline and key[2] == load]
    found = [spread_ for key in keys if (spread_ := results.ratio(key)) is not None]
    return max((one.most / one.least for one in found), default=1.0)


# --- the page -------------------------------------------------------------------------------------


def _render_summary(results: Results) -> str:
    moved = sum(not sample.steady for sample in results.samples)
    text = _NOISE if results.noisy else _IDLE
    said = text.format(others=results.others, moved=moved, count=len(results.samples))
    versions = _render_table(("gateway", "version"), results.versions.items())
    where = f"{results.when}, revision {results.revision}, {results.machine}."
    return f"{where}\n\n{said}\n\n{versions}"


def _render_load(results: Results, load: str) -> str:
    rows = [key for key in results.measured() if key[2] == load]
    unit = next(one.unit for one in results.samples if one.load == load)
    head = ["gateway", "protocols", "rounds", f"CPU a {unit}, {results.baseline} = 1"]
    columns: list[Callable[[tuple[str, str, str]], str]] = [
        lambda key: key[0],
        lambda key: key[1],
        lambda key: str(sum(sample.key == key for sample in results.samples)),
        lambda key: str(results.ratio(key) or "-"),
    ]
    if not results.noisy:
        head += [f"µs a {unit}", "requests a second", "p50 / p99 µs"]
        columns += [
            lambda key: str(results.cpu(key)),
            lambda key: _median(results, key, _rate),
            lambda key: f"{_median(results, key, _p50)} / {_median(results, key, _p99)}",
        ]
    head.append("wrong answers")
    columns.append(lambda key: str(results.errors(key)))
    return f"### {load}\n\n" + _render_table(
        head, ([format_(key) for format_ in columns] for key in rows)
    )


def _render_comparison(results: Results) -> str:
    """The CPU of our gateway beside the other one's, in the same rounds."""
    if not results.against:
        return ""
    rows = []
    for key in results.measured():
        ratio = results.ratio_to(results.against, key) if key[0] == INTERLINGUA.name else None
        if ratio is not None:
            rounds = sum(sample.key == key for sample in results.samples)
            rows.append([key[2], key[1], str(rounds), str(ratio)])
    head = ("load", "protocols", "rounds", f"CPU, {results.against} = 1")
    return f"### Beside {results.against}\n\n" + _render_table(head, rows)


def _rate(sample: Sample) -> float:
    return sample.outcome.completed / sample.outcome.seconds


def _p50(sample: Sample) -> float:
    """Of the tokens' pair where there is a pace, and of whole answers' otherwise."""
    times = sample.outcome.token if sample.unit == "token" else sample.outcome.latency
    return times.p50 if times else 0.0


def _p99(sample: Sample) -> float:
    times = sample.outcome.token if sample.unit == "token" else sample.outcome.latency
    return times.p99 if times else 0.0


def _median(results: Results, key: tuple[str, str, str], of: Callable[[Sample], float]) -> str:
    return format_number(median(of(sample) for sample in results.samples if sample.key == key))


def _render_memory(results: Results) -> str:
    rows = []
    for name in dict.fromkeys(one.gateway for one in results.starts):
        mine = [one for one in results.starts if one.gateway == name]
        row = [
            name,
            *(
                str(compute_spread([*values]))
                for values in ([one.memory for one in mine], [one.after for one in mine])
            ),
        ]
        row.append(next((_format_streams(one) for one in mine if one.streams is not None), "-"))
        if not results.noisy:
            row.append(str(compute_spread([one.seconds for one in mine])))
        rows.append(row)
    head = ["gateway", "MB at first", "MB after all loads", "MB for 1,000 open streams"]
    head += [] if results.noisy else ["seconds to the first answer"]
    return "### Memory\n\n" + _render_table(head, rows)


def _format_streams(began: StartMeasurement) -> str:
    failed = f" ({began.streams_failed} failed)" if began.streams_failed else ""
    return format_number(began.streams or 0.0) + failed


def _render_steps(results: Results) -> str:
    if not results.steps:
        return ""
    if not results.noisy:
        rows = [
            [one.name, str(compute_spread([one.least, one.cpu, one.most]))] for one in results.steps
        ]
        return "### Single steps\n\n" + _render_table(("step", "µs of CPU"), rows)
    unit = results.steps[0]
    rows = [[one.name, format_number(one.least / unit.least)] for one in results.steps]
    return "### Single steps\n\n" + _render_table(("step", f"beside “{unit.name}”"), rows)


def _render_missing(results: Results) -> str:
    if not results.missing:
        return ""
    return "### Not measured\n\n" + _render_table(("gateway", "why"), results.missing.items())


def _render_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_escape_cells(line))} |" for line in lines)


def _escape_cells(line: Sequence[str]) -> Iterator[str]:
    return (cell.replace("|", "\\|").replace("\n", " ") for cell in line)
