"""Writes ``docs/evidence.md``: false alarms for equal versions, and the time to find worse ones.

``python -m tests.evidence.write_page`` takes half an hour. It keeps the results of the series over
sockets in ``.evidence``, where one that was broken off goes on; it removes them in the end.
"""

import shutil
from pathlib import Path
from typing import Final

import numpy as np

from gateway.evidence.statistics import required_per_version
from tests.evidence.series import build_equal_series, build_fault_series
from tests.evidence.simulations import (
    PAIRS_CELLS,
    QUANTILES,
    RATE_CELLS,
    RATES,
    SIGMAS,
    SPLITS,
    VALUES,
    count_alarms_of_numbers,
    count_alarms_of_quantiles,
    count_alarms_of_rates,
    find_slower_version,
    simulate_rates,
)

_RUNS: Final = 2000
_MOST: Final = 130
"""Of 2,000 runs with an error rate of 5 %, more are flagged with a probability of 0.1 %."""
_POWER_RUNS: Final = 200
_SLOWER_RUNS: Final = 20
_MEDIAN: Final = 0.5
_POWER: Final = ((0.5, 0.9, 0.85), (0.5, 0.6, 0.55), (0.5, 0.02, 0.04), (0.1, 0.9, 0.8))
_TEMPLATE: Final = Path(__file__).with_name("page.md")
_STATE: Final = Path(__file__).parents[2] / ".evidence"
_PAGE: Final = Path(__file__).parents[2] / "docs" / "evidence.md"


def _render_table(headings: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _name_split(split: float) -> str:
    """Return a split in percent, such as 90:10."""
    return f"{100 - 100 * split:g}:{100 * split:g}"


def _build_rates() -> str:
    """Count the false alarms of rates, by rate and split."""
    flagged = {cell: count_alarms_of_rates(*cell, runs=_RUNS) for cell in RATE_CELLS}
    assert max(flagged.values()) <= _MOST, flagged
    rows = [[f"{rate:.1%}", *(str(flagged[split, rate]) for split in SPLITS)] for rate in RATES]
    return _render_table(["rate", *map(_name_split, SPLITS)], rows)


def _build_numbers() -> str:
    """Count the false alarms of numbers, by distribution and split."""
    flagged = {cell: count_alarms_of_numbers(*cell, runs=_RUNS) for cell in PAIRS_CELLS}
    assert max(flagged.values()) <= _MOST, flagged
    rows = [
        [
            f"sigma {sigma:g}" if sigma else "ratings",
            *(str(flagged[split, sigma]) for split in SPLITS),
        ]
        for sigma in (0.0, *SIGMAS)
    ]
    return _render_table(["numbers", *map(_name_split, SPLITS)], rows)


def _build_quantiles() -> str:
    """Count the false alarms of quantiles, by quantile and split."""
    cells = [(split, p) for p in QUANTILES for split in SPLITS]
    flagged = {cell: count_alarms_of_quantiles(*cell, runs=_RUNS) for cell in cells}
    assert max(flagged.values()) <= _MOST, flagged
    rows = [[_name_quantile(p), *(str(flagged[split, p]) for split in SPLITS)] for p in QUANTILES]
    return _render_table(["quantile", *map(_name_split, SPLITS)], rows)


def _name_quantile(p: float) -> str:
    return "median" if p == _MEDIAN else f"{p:.0%} quantile"


def _build_slower() -> str:
    """Measure how often, and after how many requests, a version twice as slow is found."""
    rows = []
    for sigma in SIGMAS[:2]:
        for p in QUANTILES:
            counts = [
                find_slower_version(sigma, p, allowed=0.2, requests=2000, seed=seed)
                for seed in range(_SLOWER_RUNS)
            ]
            times = [count for count in counts if count]
            rows.append([
                f"sigma {sigma:g}", _name_quantile(p), f"{len(times)} of {len(counts)}",
                f"{int(np.median(times)):,}",
            ])  # fmt: skip
    return _render_table(["times", "guardrail", "found", "requests"], rows)


def _build_power() -> str:
    """Measure how often, and after how many values, a worse version is found."""
    rows = []
    for split, a, b in _POWER:
        alarms = simulate_rates(split, a, b, runs=_POWER_RUNS)
        times = alarms[alarms >= 0]
        # both versions as many values as one of equal size would need: 1 / (4 w (1 - w)) times more
        variance = (a * (1 - a) + b * (1 - b)) / 2
        fixed = 2 * required_per_version(variance, abs(b - a), 0.95) / (4 * split * (1 - split))
        rows.append([
            f"{a:.0%} and {b:.0%}", _name_split(split), f"{len(times) / len(alarms):.0%}",
            f"{int(np.median(times)) + 1:,}", f"{fixed:,.0f}",
        ])  # fmt: skip
    return _render_table(["rates", "split", "found", "values", "one look"], rows)


def main() -> None:
    """Write the page."""
    _STATE.mkdir(parents=True, exist_ok=True)
    _PAGE.write_text(_render_page(_STATE), "utf-8")
    shutil.rmtree(_STATE)


def _render_page(folder: Path) -> str:
    return _TEMPLATE.read_text("utf-8").format(
        runs=_RUNS,
        values=VALUES,
        most=_MOST,
        power_runs=_POWER_RUNS,
        rates=_build_rates(),
        numbers=_build_numbers(),
        power=_build_power(),
        quantiles=_build_quantiles(),
        slower=_build_slower(),
        equal_series=build_equal_series(folder),
        fault_series=build_fault_series(folder),
    )


if __name__ == "__main__":
    main()
