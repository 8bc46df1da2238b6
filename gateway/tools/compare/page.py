"""The report as one HTML page: no script, no other file. All recorded text is escaped.

Characters that would change what stands beside them, such as U+202E, are shown as escapes.
"""

import html
from collections.abc import Iterable, Sequence
from typing import Final

from backends.log_format import escape_controls
from gateway.evidence.judge import describe_judging
from gateway.evidence.measures import (
    MeasureResult,
    Unit,
    build_headings,
    format_value,
    is_difference,
    list_cells,
    summarize_verdicts,
)
from gateway.evidence.recordings import CompareReport
from gateway.tools.compare.text import (
    describe_pairing,
    describe_sides,
    describe_verdict,
)

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --a: #2563eb; --b: #d97706; --bad: #dc2626;
  --good: #16a34a; --dim: #777; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th:first-child, td:first-child, td.left, th.left { text-align: left; }
.worse { color: var(--bad); font-weight: 600; } .better { color: var(--good); font-weight: 600; }
.verdict { font-size: 1.1rem; font-weight: 600; }
.different { font-weight: 600; } .dim { color: var(--dim); }
.plots { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: 0; }
figcaption { font-size: .9rem; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; margin-bottom: 1.5rem; }
.pair > div { min-width: 0; } .pair .prompt { grid-column: 1 / -1; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: .4rem; padding: .6rem; margin: .2rem 0; max-height: 20rem; overflow-y: auto; }
@media (max-width: 40rem) { .pair { grid-template-columns: 1fr; } }
"""
_POLICY: Final = (
    "<meta http-equiv='Content-Security-Policy' "
    "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
_WIDTH: Final = 340
_HEIGHT: Final = 180
_MARGIN: Final = 34
_MAX_POINTS: Final = 200


def render_page(report: CompareReport) -> str:
    """The page."""
    a, b = _escape(report.a.name), _escape(report.b.name)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        _POLICY,
        f"<title>{a} and {b}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>{b} compared with {a}</h1>",
        f"<p class='verdict'>{_escape(summarize_verdicts(report.measures))}</p>",
        f"<p>{'<br>'.join(map(_escape, describe_sides(report)))}</p>",
        f"<p>{_escape(describe_pairing(report))}</p>",
        "<h2>Measures</h2>",
        _render_measures(report),
        *_render_tables(report),
        _render_plots(report),
        _render_examples(report),
        "</main></body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _escape(text: str) -> str:
    """Recorded text for an element or an attribute."""
    return html.escape(escape_controls(text))


def _render_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML."""
    head = "".join(f"<th>{_escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _render_measures(report: CompareReport) -> str:
    rows = []
    for result in report.measures:
        *others, _, method = map(_escape, list_cells(result))
        kind = result.verdict if is_difference(result) else "dim"
        verdict = _escape(describe_verdict(report, result))
        cell = f"<span class='{kind}' title='{_escape(result.note)}'>{verdict}</span>"
        rows.append([*others, _draw_interval(result), cell, method])
    *headings, verdict, method = build_headings("A", "B")
    return _render_table([*headings, "", verdict, method], rows)


def _draw_interval(result: MeasureResult) -> str:
    """The interval of the difference beside the line of no difference."""
    interval = result.difference
    if interval is None:
        return ""
    neutral, reach = result.neutral, 0.5 if result.scale == "ratio" else 0.25

    def x(value: float) -> float:
        return 60 + 56 * max(-1.0, min(1.0, (value - neutral) / reach))

    return (
        "<svg width='120' height='14' role='img' aria-label='interval of the difference'>"
        "<line x1='60' x2='60' y1='0' y2='14' stroke='currentColor' opacity='.3'/>"
        f"<line x1='{x(interval.low):.1f}' x2='{x(interval.high):.1f}' y1='7' y2='7' "
        "stroke='currentColor' stroke-width='2'/>"
        f"<circle cx='{x(interval.value):.1f}' cy='7' r='3.5' fill='currentColor'/></svg>"
    )


def _render_tables(report: CompareReport) -> Iterable[str]:
    for title, heading, rows in (
        ("Lost parameters", "parameter", report.losses),
        ("Errors", "status and class", report.errors),
        ("Finish reasons", "finish reason", report.finish_reasons),
    ):
        if rows:
            yield f"<h2>{title}</h2>"
            cells = [(_escape(name), f"{first:,}", f"{second:,}") for name, first, second in rows]
            yield _render_table((heading, report.a.name, report.b.name), cells)
    if report.judging is not None:
        yield f"<h2>Judge</h2><p>{_escape(describe_judging(report.judging))}</p>"
    if (texts := report.texts) is not None:
        yield "<h2>Texts</h2>"
        yield (
            f"<p>Of {texts.n:,} pairs {texts.equal:.1%} have equal texts, "
            f"{texts.equal_normalised:.1%} but for case and white space. The mean similarity is "
            f"{texts.similarity:.2f} ({_escape(texts.method)}).</p>"
        )


def _render_plots(report: CompareReport) -> str:
    units = {result.measure: result.unit for result in report.measures}
    plots = [
        _draw_distribution(name, units[name], sides)
        for name, sides in report.distributions.items()
        if name in units and all(sides)
    ]
    if not plots:
        return ""
    return (
        "<h2>Distributions</h2><p><span style='color:var(--a)'>■</span> "
        f"{_escape(report.a.name)} <span style='color:var(--b)'>■</span> "
        f"{_escape(report.b.name)}</p>"
        f"<div class='plots'>{''.join(plots)}</div>"
    )


def _draw_distribution(
    name: str, unit: Unit, sides: tuple[Sequence[float], Sequence[float]]
) -> str:
    """The share of requests below each value, for both sides."""
    highest = max(values[min(len(values) - 1, int(len(values) * 0.99))] for values in sides)
    scale = (_WIDTH - _MARGIN - 8) / (highest or 1.0)
    base = _HEIGHT - 24
    lines = []
    for values, color in zip(sides, ("--a", "--b"), strict=True):
        step = max(1, len(values) // _MAX_POINTS)
        points = [
            (_MARGIN + min(value, highest) * scale, base - (base - 8) * (number + 1) / len(values))
            for number, value in enumerate(values)
            if number % step == 0 or number == len(values) - 1
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(points[0][0], float(base)), *points])
        lines.append(
            f"<polyline points='{path}' fill='none' stroke='var({color})' stroke-width='2'/>"
        )
    label = _escape(f"{format_value(highest, unit)}")
    return (
        f"<figure><figcaption>{_escape(name)}: share of requests below</figcaption>"
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img' aria-label='{_escape(name)}'>"
        f"<line x1='{_MARGIN}' x2='{_WIDTH - 8}' y1='{base}' y2='{base}' stroke='currentColor' "
        "opacity='.4'/>"
        f"<line x1='{_MARGIN}' x2='{_MARGIN}' y1='8' y2='{base}' stroke='currentColor' "
        "opacity='.4'/>"
        f"<text x='{_MARGIN - 4}' y='14' text-anchor='end'>100%</text>"
        f"<text x='{_MARGIN - 4}' y='{base}' text-anchor='end'>0</text>"
        f"<text x='{_WIDTH - 8}' y='{_HEIGHT - 8}' text-anchor='end'>{label}</text>"
        f"{''.join(lines)}</svg></figure>"
    )


def _render_examples(report: CompareReport) -> str:
    if not report.examples:
        return ""
    pairs = [
        f"<div class='pair'><div class='prompt'><b>{_escape(one.reason)}</b> "
        f"<span class='dim'>{_escape(one.id)}</span><pre>{_escape(one.prompt)}</pre></div>"
        f"<div>{_escape(report.a.name)}<pre>{_escape(one.a)}</pre></div>"
        f"<div>{_escape(report.b.name)}<pre>{_escape(one.b)}</pre></div></div>"
        for one in report.examples
    ]
    return f"<h2>Examples</h2>{''.join(pairs)}"
