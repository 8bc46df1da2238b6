// Charts with axes: lines over time, with a band around them and levels across.

import { el, setText, svg } from "./dom.js";

const HEIGHT = 240;
const LEFT = 64;
const RIGHT = 12;
const TOP = 12;
const BOTTOM = 28;
const EDGE = 42; // half of the widest label of a time
const STEPS = [60, 300, 600, 1800, 3600, 2 * 3600, 4 * 3600, 12 * 3600, 86400, 2 * 86400, 3 * 86400, 7 * 86400, 14 * 86400, 30 * 86400];

/**
 * A chart that fills its width. `draw(figure)` shows
 * { label, from, to, points: [{ x, y, low, high, note }], levels: [{ y, text, isLimit }], describe,
 * bars, isClose }: times are in Unix seconds, values null where there is none. `isClose`: the scale
 * leaves out what only the first, widest intervals need. The arrow keys and the pointer read single
 * values.
 */
export function chart() {
  const readout = el("p", { class: "quiet readout", role: "status" });
  const holder = el("div", { class: "chart", tabindex: "0", role: "img" });
  let shown = null;
  let chosen = null;

  function redrawAll() {
    if (!shown || !holder.clientWidth) return;
    const frame = frameOf(shown, holder.clientWidth);
    holder.replaceChildren(paint(shown, frame, chosen));
    const point = chosen === null ? null : shown.points[chosen];
    setText(readout, point ? describePoint(shown, point) : "");
  }
  function choose(at) {
    const last = (shown?.points.length ?? 0) - 1;
    if (last < 0) return;
    chosen = Math.min(last, Math.max(0, at));
    redrawAll();
  }
  holder.addEventListener("pointermove", (event) => {
    if (!shown?.points.length) return;
    const { x } = frameOf(shown, holder.clientWidth);
    const left = event.clientX - holder.getBoundingClientRect().left;
    const distances = shown.points.map((one) => Math.abs(x(one.x) - left));
    choose(distances.indexOf(Math.min(...distances)));
  });
  holder.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !shown) return;
    event.preventDefault();
    choose((chosen ?? (step > 0 ? -1 : shown.points.length)) + step);
  });
  new ResizeObserver(redrawAll).observe(holder);

  function draw(figure) {
    if (JSON.stringify(figure) === JSON.stringify(shown)) return;
    if (chosen !== null && chosen >= figure.points.length) chosen = null;
    shown = figure;
    holder.setAttribute("aria-label", summarize(figure));
    redrawAll();
  }
  return { element: el("div", { class: "figure" }, holder, readout), draw };
}

function valuesOf(figure) {
  return [...figure.points.flatMap((one) => [one.y, one.low, one.high]), ...(figure.levels ?? []).map((one) => one.y)]
    .filter((value) => Number.isFinite(value));
}

function summarize(figure) {
  const present = figure.points.filter((one) => one.y !== null);
  if (!present.length) return `${figure.label}: no data`;
  const top = Math.max(...present.map((one) => one.y));
  return `${figure.label}, ${clock(figure.from, figure)} to ${clock(figure.to, figure)}: latest ${describeValue(figure, present.at(-1))}, highest ${figure.describe(top)}`;
}

function describeValue(figure, point) {
  const band = Number.isFinite(point.low) ? ` (${figure.describe(point.low)} to ${figure.describe(point.high)})` : "";
  return point.y === null ? "no data" : figure.describe(point.y) + band;
}

function describePoint(figure, point) {
  return `${clock(point.x, figure, true)}: ${describeValue(figure, point)}${point.note ? `, ${point.note}` : ""}`;
}

/** The scales of a figure in a width. */
function frameOf(figure, width) {
  const values = valuesOf(figure);
  let [low, high] = figure.isClose ? closeRange(figure) : [Math.min(0, ...values), Math.max(0, ...values)];
  if (high === low) high = low + 1;
  const ticks = valueTicks(low, high);
  low = Math.min(low, ticks[0]);
  high = Math.max(high, ticks.at(-1));
  const x = (time) => LEFT + ((time - figure.from) / (figure.to - figure.from || 1)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + ((high - Math.min(high, Math.max(low, value))) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  return { width, x, y, ticks };
}

/** The range of the levels, and of the bands but the first ones, which are wide. */
function closeRange(figure) {
  const late = figure.points.slice(Math.min(figure.points.length - 1, Math.floor(figure.points.length / 8)));
  const values = [...late.flatMap((one) => [one.low, one.high]), ...figure.levels.map((one) => one.y)];
  return [Math.min(...values), Math.max(...values)];
}

function paint(figure, { width, x, y, ticks }, chosen) {
  const picture = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
  for (const value of ticks) {
    picture.append(line("grid", LEFT, y(value), width - RIGHT, y(value)), text(LEFT - 8, y(value) + 4, "end", figure.describe(value)));
  }
  for (const time of timeTicks(figure.from, figure.to, Math.max(2, Math.floor(width / 90)))) {
    const isLast = x(time) > width - EDGE;
    picture.append(line("grid", x(time), HEIGHT - BOTTOM, x(time), HEIGHT - BOTTOM + 4), text(isLast ? width - 4 : x(time), HEIGHT - 8, isLast ? "end" : "middle", clock(time, figure)));
  }
  for (const run of runs(figure.points)) {
    if (figure.bars) picture.append(...run.map((one) => barOf(figure, one, x, y)));
    else picture.append(...paintRun(run, x, y));
  }
  const last = figure.points.at(-1);
  for (const level of figure.levels ?? []) {
    const isBelow = last && last.y > level.y; // the name stands on the side of the level where the line does not end
    picture.append(line(level.isLimit ? "level limit" : "level", LEFT, y(level.y), width - RIGHT, y(level.y)), text(width - RIGHT, y(level.y) + (isBelow ? 14 : -4), "end", level.text));
  }
  const point = chosen === null ? null : figure.points[chosen];
  if (point) picture.append(line("cursor", x(point.x), TOP, x(point.x), HEIGHT - BOTTOM));
  return picture;
}

function paintRun(run, x, y) {
  const at = (pick) => run.map((one) => `${x(one.x).toFixed(1)},${y(pick(one)).toFixed(1)}`);
  const hasBand = Number.isFinite(run[0].low);
  const base = hasBand ? at((one) => one.low).reverse() : at(() => 0).reverse();
  const area = svg("polygon", { points: [...at((one) => (hasBand ? one.high : one.y)), ...base].join(" ") });
  const last = run.at(-1);
  const dot = svg("circle", { cx: x(last.x).toFixed(1), cy: y(last.y).toFixed(1), r: 2.5 });
  return [area, svg("polyline", { points: at((one) => one.y).join(" ") }), dot];
}

function barOf(figure, point, x, y) {
  const width = Math.max(1, x(point.x + figure.bars) - x(point.x) - 2);
  return svg("rect", { x: x(point.x) + 1, y: y(point.y), width, height: Math.max(0, y(0) - y(point.y)) });
}

/** The parts of the points that have values. */
function runs(points) {
  const parts = [[]];
  for (const one of points) {
    if (one.y === null) parts.push([]);
    else parts.at(-1).push(one);
  }
  return parts.filter((part) => part.length);
}

function line(name, x1, y1, x2, y2) {
  return svg("line", { class: name, x1, y1, x2, y2 });
}

function text(x, y, anchor, value) {
  return svg("text", { x, y, "text-anchor": anchor }, value);
}

/** About five round values over a range. */
function valueTicks(low, high) {
  const raw = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((one) => one * power >= raw) * power;
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, at) => Number(((first + at) * step).toPrecision(12)));
}

/** Round local times over a range. */
function timeTicks(from, to, most) {
  const step = STEPS.find((one) => (to - from) / one <= most) ?? STEPS.at(-1) * Math.ceil((to - from) / STEPS.at(-1) / most);
  const offset = new Date(to * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let time = Math.ceil((from - offset) / step) * step + offset; time <= to; time += step) ticks.push(time);
  return ticks;
}

/** A time of a figure: of the day, with the day where the range is longer, or only the day. */
function clock(seconds, figure, isExact = false) {
  const date = new Date(seconds * 1000);
  const range = figure.to - figure.from;
  const day = date.toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: figure.bars ? "UTC" : undefined });
  if (figure.bars || (range > 5 * 86400 && !isExact)) return day;
  const time = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  return range > 86400 ? `${day} ${time}` : time;
}
