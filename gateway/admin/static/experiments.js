// The traffic splits: weights, outcomes of the versions with their intervals, and what follows.

import { fetchJson } from "./api.js";
import { count, el, setText } from "./dom.js";

const REFRESH_INTERVAL = 15000;
const WIDTH = 360;
const LEFT = 72;
const ROW_HEIGHT = 22;
const SVG = "http://www.w3.org/2000/svg";
const UNITS = { share: [100, "%"], seconds: [1000, "ms"] };

function svg(name, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

/** Format a value of a figure with its unit; ``sign`` shows a plus. */
function format(value, unit, sign = false) {
  if (value === null || value === undefined) return "–";
  const [scale, name] = UNITS[unit] ?? [1, ""];
  const digits = Math.abs(value * scale) < 100 ? 2 : 0;
  return `${sign && value > 0 ? "+" : ""}${count(value * scale, digits)} ${name}`.trim();
}

/** A plot of intervals, one a line: { label, value, low, high }. ``zero`` marks 0. */
function plot(label, rows, unit, zero = false) {
  const ends = rows.flatMap((row) => [row.low, row.high]).concat(zero ? [0] : []);
  const least = Math.min(...ends);
  const most = Math.max(...ends);
  const span = most - least || 1;
  const at = (value) => LEFT + 8 + ((value - least) / span) * (WIDTH - LEFT - 16);
  const height = ROW_HEIGHT * rows.length + 18;
  const text = rows.map((row) => `${row.label}: ${format(row.value, unit)} (${format(row.low, unit)} to ${format(row.high, unit)})`).join("; ");
  const figure = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "plot", role: "img", "aria-label": `${label}. ${text}` });
  const shown = { stroke: "currentColor", "stroke-width": 2 };
  if (zero) figure.append(svg("line", { x1: at(0), x2: at(0), y1: 0, y2: height - 16, stroke: "currentColor", "stroke-dasharray": "3 3" }));
  rows.forEach((row, number) => {
    const y = ROW_HEIGHT * number + ROW_HEIGHT / 2;
    figure.append(
      svg("text", { x: 0, y: y + 4, fill: "currentColor", "font-size": 11 }, row.label),
      svg("line", { x1: at(row.low), x2: at(row.high), y1: y, y2: y, ...shown }),
      svg("circle", { cx: at(row.value), cy: y, r: 4, fill: "currentColor" }),
    );
  });
  const axis = { y: height - 3, fill: "currentColor", "font-size": 11 };
  figure.append(
    svg("text", { x: LEFT, ...axis }, format(least, unit)),
    svg("text", { x: WIDTH, "text-anchor": "end", ...axis }, format(most, unit)),
  );
  return figure;
}

function cells(name, values, headings) {
  return values.map((value, number) => el(name, { class: number ? "number" : null, "data-label": headings[number] }, value));
}

function table(caption, headings, rows) {
  return el(
    "table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...cells("th", headings, []))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells("td", row, headings)))),
  );
}

function versionTable(experiment) {
  const { versions, unit } = experiment;
  const weights = versions.reduce((sum, one) => sum + one.weight, 0);
  const assigned = versions.reduce((sum, one) => sum + one.assigned, 0);
  const share = (part, whole) => (whole ? `${count((100 * part) / whole, 1)} %` : "–");
  return table(`${experiment.model}: versions`, ["Version", "Weight", "Actual", unit], versions.map((one) => [
    one.version, share(one.weight, weights), share(one.assigned, assigned), count(one.assigned),
  ]));
}

function outcomePlots(experiment) {
  const names = [...new Set(experiment.versions.flatMap((one) => one.outcomes.map((outcome) => outcome.outcome)))];
  return names.flatMap((name) => {
    const judged = experiment.versions.flatMap((version) =>
      version.outcomes.filter((one) => one.outcome === name).map((one) => ({ version: version.version, ...one })));
    const unit = judged[0].is_share ? "share" : "value";
    const rows = judged.map((one) => ({ label: `version ${one.version}`, ...one.interval }));
    const listed = judged.map((one) => [one.version, count(one.n), format(one.interval.value, unit), `${format(one.interval.low, unit)} to ${format(one.interval.high, unit)}`]);
    return [table(name, ["Version", "Judged", "Value", "95 % interval"], listed), plot(name, rows, unit)];
  });
}

function comparison(report) {
  const { a, b, rows } = report.comparison;
  const outcomes = rows.filter((row) => row.is_outcome && row.difference);
  const verdicts = report.verdicts.map((one) =>
    el("li", {}, el(one.result === "equal" || one.result === "unknown" ? "span" : "strong", {}, `${one.figure}: ${one.text}`)));
  return el(
    "div", {}, el("h4", {}, `Version ${b} compared with version ${a}`),
    ...outcomes.flatMap((row) => [
      el("p", {}, `${row.figure}: difference ${format(row.difference.value, row.unit, true)} (${format(row.difference.low, row.unit, true)} to ${format(row.difference.high, row.unit, true)}), valid whenever you look`),
      plot(`${row.figure}, difference`, [{ label: "difference", ...row.difference }], row.unit, true),
    ]),
    el("ul", {}, ...verdicts),
  );
}

function section(experiment) {
  const ratio = experiment.is_plausible
    ? null
    : el("p", { class: "bad", role: "alert" }, "The counts do not fit the weights (sample ratio mismatch): find the cause before you rely on these numbers.");
  return el(
    "section", {}, el("h3", {}, `${experiment.model}, split ${experiment.split}`), versionTable(experiment), ratio,
    ...outcomePlots(experiment), ...experiment.reports.map(comparison),
    experiment.problem ? el("p", {}, experiment.problem) : null,
  );
}

/** The view. */
export function experiments() {
  const message = el("p", { role: "status" }, "Reading the usage rows …");
  const list = el("div");
  let shown = "";
  let next = 0;

  async function update() {
    if (Date.now() < next) return;
    next = Date.now() + REFRESH_INTERVAL;
    try {
      const reports = await fetchJson("/-/experiments");
      const none = reports.experiments.length ? "" : "No model splits its traffic over several versions.";
      setText(message, reports.problem || none);
      const snapshot = JSON.stringify(reports);
      if (snapshot === shown) return;
      shown = snapshot;
      list.replaceChildren(...reports.experiments.map(section));
    } catch (error) {
      if (error.status === 401) throw error;
      setText(message, error.message);
    }
  }
  return { element: el("div", {}, el("h2", {}, "Experiments"), message, list), update };
}
