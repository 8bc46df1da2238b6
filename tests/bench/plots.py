"""Plots of CPU time per request as SVG, readable on light and dark pages."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil, floor, log10
from typing import Final
from xml.sax.saxutils import escape

from msgspec import Struct

from tests.bench.interlingua import INTERLINGUA, MANY_MODELS_AND_KEYS
from tests.bench.loads import BODY_SIZES, CLIENTS, KEY_COUNTS, MODEL_COUNTS, OPENAI_PAIR, Load
from tests.bench.peers import NGINX
from tests.bench.results import Results, format_number

FOLDER: Final = "images"
"""Beside the page with the plots."""

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 44, 52
_COLOURS: Final = ("#2f7ed8", "#e07b00", "#2a9d5c", "#a64ca6", "#c8383c", "#7f7f7f", "#00a3a3")
_STYLE: Final = """
  .page { fill: #ffffff } text { font: 13px sans-serif; fill: #24292f }
  .title { font-weight: bold } .grid { stroke: #d0d7de } .axis { stroke: #57606a }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #e6edf3 }
    .grid { stroke: #30363d } .axis { stroke: #8b949e }
  }
"""


class Plot(Struct, frozen=True):
    """CPU time per request over one variable, with logarithmic axes."""

    file: str
    title: str
    variable: str
    loads: Mapping[int, Load]


class Line(Struct, frozen=True):
    """One gateway's measurements: the variable's value and microseconds of CPU time."""

    name: str
    points: Sequence[tuple[float, float]]


PLOTS: Final = (
    Plot(
        "performance-body-size.svg",
        "CPU time per request by body size",
        "bytes of the body (a prompt and images)",
        {load.traffic.size: load for load in BODY_SIZES},
    ),
    Plot(
        "performance-clients.svg",
        "CPU time per request by clients",
        "clients that send requests at the same time",
        {load.clients: load for load in CLIENTS},
    ),
    Plot(
        "performance-models.svg",
        "CPU time per request by models in use",
        "models in use, of 2,002 that are configured",
        MODEL_COUNTS,
    ),
    Plot(
        "performance-keys.svg",
        "CPU time per request by API keys in use",
        "API keys in use, of 1,000 that are configured",
        KEY_COUNTS,
    ),
)
_SLOW: Final = ("portkey", "litellm")
"""These would compress the other lines at the bottom of the plot."""


def find_lines(results: Results, plot: Plot) -> list[Line]:
    """Return the gateways with at least two points of a plot, in the order of the results."""
    names = dict.fromkeys(sample.gateway for sample in results.samples)
    own = [INTERLINGUA.name, MANY_MODELS_AND_KEYS.name, NGINX.name]
    ordered = [*(name for name in own if name in names), *names]
    lines = []
    for name in dict.fromkeys(ordered):
        spreads = {
            value: results.cpu((name, OPENAI_PAIR, load.name)) for value, load in plot.loads.items()
        }
        points = [(value, one.median) for value, one in spreads.items() if one is not None]
        if len(points) > 1 and name not in _SLOW:
            lines.append(Line(name, points))
    return lines


def render_plots(results: Results) -> dict[str, str]:
    """Render each plot that has lines, by file name."""
    drawn = ((plot, find_lines(results, plot)) for plot in PLOTS)
    return {plot.file: render_plot(plot, lines) for plot, lines in drawn if lines}


def render_plot(plot: Plot, lines: Sequence[Line]) -> str:
    """Render the plot as SVG."""
    horizontal = _Axis([x for line in lines for x, _ in line.points], _LEFT, _WIDTH - _RIGHT)
    vertical = _Axis([y for line in lines for _, y in line.points], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        f"<title>{escape(plot.title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>',
        _text(_LEFT, 24, plot.title, kind="title"),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, plot.variable, anchor="middle"),
        _text(_LEFT - 8, _TOP - 6, "µs", anchor="end"),
    ]
    for value in vertical.ticks():
        y = vertical.place(value)
        parts.append(_line("grid", _LEFT, y, _WIDTH - _RIGHT, y))
        parts.append(_text(_LEFT - 8, y + 4, f"{value:,.0f}", anchor="end"))
    for value in dict.fromkeys(x for line in lines for x, _ in line.points):
        x = horizontal.place(value)
        parts.append(_line("axis", x, _HEIGHT - _BOTTOM, x, _HEIGHT - _BOTTOM + 5))
        parts.append(_text(x, _HEIGHT - _BOTTOM + 19, _shorten(value), anchor="middle"))
    parts.append(_line("axis", _LEFT, _HEIGHT - _BOTTOM, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM))
    ends = _spread_labels([vertical.place(line.points[-1][1]) for line in lines])
    for number, (line, end) in enumerate(zip(lines, ends, strict=True)):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [(horizontal.place(x), vertical.place(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), (_, value) in zip(places, line.points, strict=True):
            label = f"<title>{escape(line.name)}: {format_number(value)} µs</title>"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">{label}</circle>'
            )
        label = "interlingua" if line.name.startswith("interlingua") else line.name
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 10}" y="{end + 4:.1f}" style="fill: {colour}">'
            f"{escape(label)}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axis:
    """A logarithmic axis from ``start`` to ``end`` in pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self._least, self._most = log10(min(values)), log10(max(values))
        if self._most - self._least < 1:  # at least a factor of ten, which keeps noise small
            middle = (self._least + self._most) / 2
            self._least, self._most = middle - 0.5, middle + 0.5
        self._start, self._end = start, end

    def place(self, value: float) -> float:
        part = (log10(value) - self._least) / (self._most - self._least)
        return self._start + part * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return 1, 2 and 5 times the powers of ten, or only the powers on a long axis."""
        factors = (1,) if self._most - self._least > 2.5 else (1, 2, 5)
        exponents = range(floor(self._least), ceil(self._most) + 1)
        values = [factor * 10.0**power for power in exponents for factor in factors]
        return [value for value in values if self._least <= log10(value) <= self._most]


def _spread_labels(places: Sequence[float]) -> list[float]:
    """Move labels that would overlap downwards."""
    moved = list(places)
    order = sorted(range(len(places)), key=lambda number: places[number])
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + 15)
    return moved


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _shorten(value: float) -> str:
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
