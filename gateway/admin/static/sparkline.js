// Small charts: a line of the last 15 minutes, and bars.

import { svg } from "./dom.js";

const WIDTH = 108;
const HEIGHT = 24;

/**
 * A line. `values` are those of all intervals, null where there is none; `describe` formats one.
 * The scale begins at 0, so that small changes look small.
 */
export function sparkline(label, values, describe) {
  const present = values.filter((value) => value !== null);
  const top = Math.max(...present, 0);
  const text = present.length ? `${label}, last 15 minutes: latest ${describe(present.at(-1))}, highest ${describe(top)}` : `${label}: no data in the last 15 minutes`;
  const step = WIDTH / Math.max(values.length - 1, 1);
  const y = (value) => (HEIGHT - 2 - (top ? (value / top) * (HEIGHT - 4) : 0)).toFixed(1);
  const chart = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": text });
  chart.append(svg("title", {}, text), svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 1.5, y2: HEIGHT - 1.5 }));
  for (const run of runs(values)) {
    const points = run.map(({ at, value }) => `${(at * step).toFixed(1)},${y(value)}`);
    const last = run.at(-1).at * step;
    chart.append(svg("polygon", { points: [`${(run[0].at * step).toFixed(1)},${HEIGHT - 1.5}`, ...points, `${last.toFixed(1)},${HEIGHT - 1.5}`].join(" ") }));
    if (run.length === 1) points.push(`${(last + 1.5).toFixed(1)},${y(run[0].value)}`);
    chart.append(svg("polyline", { points: points.join(" ") }));
  }
  return chart;
}

/** The parts of a list that have values. */
function runs(values) {
  const parts = [];
  values.forEach((value, at) => {
    if (value === null) return;
    if (parts.length && parts.at(-1).at(-1).at === at - 1) parts.at(-1).push({ at, value });
    else parts.push([{ at, value }]);
  });
  return parts;
}

/** A bar of a part from 0 to 1, with a mark at another part if one is given. */
export function bar(label, part, mark = null) {
  const chart = svg("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": label });
  chart.append(svg("title", {}, label), svg("rect", { class: "track", width: 100, height: 8 }));
  chart.append(svg("rect", { class: part >= 1 && mark === null ? "full" : "part", width: 100 * Math.min(1, part), height: 8 }));
  if (mark !== null) chart.append(svg("rect", { class: "mark", x: Math.min(98.5, 100 * mark), width: 1.5, height: 8 }));
  return chart;
}
