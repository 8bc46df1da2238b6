// The traffic splits: what to do now, the course of the difference, the measures, and rollouts.

import { fetchJson } from "./api.js";
import { chart } from "./chart.js";
import { choice, count, el, field, setText, svg } from "./dom.js";
import { rollout } from "./rollouts.js";

const REFRESH_INTERVAL = 15000;
const UNITS = { share: [100, " %"], points: [100, " points"], probability: [100, " %"], seconds: [1000, " ms"] };
const SEGMENTS = [["", "None"], ["key", "API key"], ["rule", "Route"], ["protocol", "Protocol"]];
const ACTIONS = { stop: ["Stop", "bad"], "go on": ["Go on", ""], choose: ["Choose", ""], ship: ["Ship", "good"] };
const DIFFERENCES = ["worse", "better", "different"];

/** A number with at most two digits after those that it needs before the point. */
function short(value) {
  const size = Math.abs(value);
  return count(value, size === 0 || size >= 10 ? 0 : size >= 1 ? 1 : 2);
}

/** Format a value of a measure with its unit; `sign` shows a plus. */
export function format(value, unit, sign = false) {
  if (value === null || value === undefined) return "–";
  const [scale, name] = UNITS[unit] ?? [1, ""];
  return `${sign && value > 0 ? "+" : ""}${short(value * scale)}${name}`;
}

function formatInterval(interval, unit, sign = false) {
  return `${format(interval.low, unit, sign)} to ${format(interval.high, unit, sign)}`;
}

/** The unit of a row's difference. */
function differenceUnit(row) {
  return row.scale === "probability" ? "probability" : row.unit === "share" ? "points" : row.unit;
}

/** A table; a cell is a text or an element. All columns but the first are right-aligned. */
function table(caption, headings, rows) {
  const kindOf = (number, value) => (value instanceof Element && value.localName !== "svg" ? "text" : number ? "number" : null);
  const cells = (name, values, shown) => values.map((value, number) =>
    el(name, { class: kindOf(number, shown?.[number]), "data-label": headings[number], scope: name === "th" ? "col" : null }, value));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...cells("th", headings, rows[0]))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells("td", row, row))))));
}

function versionTable(experiment) {
  const { versions, unit } = experiment;
  const sum = (pick) => versions.reduce((total, one) => total + pick(one), 0);
  const share = (part, whole) => (whole ? `${count((100 * part) / whole, 1)} %` : "–");
  const weights = sum((one) => one.weight);
  const assigned = sum((one) => one.assigned);
  const outcomes = [...new Set(versions.flatMap((one) => one.outcomes.map((outcome) => outcome.outcome)))];
  const outcomeOf = (version, name) => {
    const outcome = version.outcomes.find((one) => one.outcome === name);
    if (!outcome) return "–";
    const kind = outcome.is_share ? "share" : "value";
    return `${format(outcome.interval.value, kind)} (${formatInterval(outcome.interval, kind)})`;
  };
  return table(`${experiment.model}: versions`, ["Version", "Weight", "Actual", unit, ...outcomes], versions.map((one) => [
    one.version, share(one.weight, weights), share(one.assigned, assigned), count(one.assigned),
    ...outcomes.map((name) => outcomeOf(one, name)),
  ]));
}

/** What to do now, with the reason. */
function decision(report) {
  const { action, text, requests } = report.decision;
  const [word, kind] = ACTIONS[action];
  const more = requests === null ? "" : `: about ${count(requests)} more requests`;
  return el("p", { class: `decision ${kind}` }, el("strong", {}, word + more), el("span", {}, ` – ${text}`));
}

/** The course of the difference of a measure, which is chosen. */
function courses(report, guardrails) {
  const shown = report.courses.filter((one) => one.points.length);
  if (!shown.length) return el("p", { class: "quiet" }, "The course of the difference begins when both versions have values.");
  const { a, b } = report.comparison;
  const select = choice(shown.map((one) => [one.measure, one.measure]));
  const figure = chart();
  const note = el("p", { class: "quiet" });
  function draw() {
    const course = shown.find((one) => one.measure === select.value);
    figure.draw(figureOf(course, guardrails.filter((one) => one.version === b && one.measure === course.measure)));
    const what = course.unit === "share" ? `${course.measure} of version ${b} minus version ${a}, in percentage points` : `the probability that version ${b} has the higher value`;
    setText(note, `${what}, with the interval that holds at all times together`);
  }
  select.addEventListener("change", draw);
  draw();
  return el("div", {}, el("div", { class: "fields" }, field("Course of", select)), figure.element, note);
}

function figureOf(course, guardrails) {
  const describe = (value) => (course.unit === "share" ? short(100 * value) : format(value, "probability"));
  const { neutral, relevant } = course;
  const levels = [
    { y: neutral, text: "no difference" },
    { y: neutral - relevant, text: "" },
    { y: neutral + relevant, text: "smallest difference that matters" },
    ...guardrails.map((one) => ({ y: one.y, text: "guardrail", isLimit: true })),
  ];
  const points = course.points.map((one) => ({ x: one.at, y: one.value, low: one.low, high: one.high, note: `${count(one.n)} values` }));
  return { label: `${course.measure}, difference`, from: points[0].x, to: points.at(-1).x, points, levels, describe, isClose: true };
}

/** The interval of a difference as a line beside 0, on the scale of its table. */
function intervalLine(row, reach) {
  const neutral = row.scale === "probability" ? 0.5 : 0;
  const at = (value) => 50 + 48 * Math.max(-1, Math.min(1, (value - neutral) / reach));
  const label = `${row.measure}: ${formatInterval(row.difference, row.unit, true)}`;
  return svg("svg", { class: "interval", viewBox: "0 0 100 12", preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("line", { class: "zero", x1: 50, x2: 50, y1: 0, y2: 12 }),
    svg("line", { class: "reach", x1: at(row.difference.low), x2: at(row.difference.high), y1: 6, y2: 6 }),
    svg("line", { class: "value", x1: at(row.difference.value), x2: at(row.difference.value), y1: 2, y2: 10 }));
}

function measureRow(row) {
  if (!row.difference) return [row.measure, format(row.a, row.unit), format(row.b, row.unit), "–", "", verdictOf(row)];
  const reach = row.scale === "probability" ? 0.5 : Math.max(Math.abs(row.difference.low), Math.abs(row.difference.high)) || 1;
  const unit = differenceUnit(row);
  const difference = `${format(row.difference.value, unit, row.scale === "difference")} (${formatInterval(row.difference, unit, row.scale === "difference")})`;
  return [row.measure, format(row.a, row.unit), format(row.b, row.unit), difference, intervalLine({ ...row, unit }, reach), verdictOf(row)];
}

function verdictOf(row) {
  if (!row.verdict) return "";
  const kind = row.verdict === "worse" ? "bad" : row.verdict === "better" ? "good" : "";
  return el(DIFFERENCES.includes(row.verdict) ? "strong" : "span", { class: kind || null }, row.note);
}

function measures(report) {
  const { a, b, rows } = report.comparison;
  const shown = rows.filter((row) => row.verdict || row.is_feedback);
  return table(`Version ${b} compared with version ${a}`, ["Measure", `Version ${a}`, `Version ${b}`, "Difference", "Interval", "Verdict"], shown.map(measureRow));
}

/** The feedback in segments, which is computed when somebody asks for it. */
function segments(model, number) {
  const select = choice(SEGMENTS);
  const result = el("div", { "aria-live": "polite" });
  select.addEventListener("change", async () => {
    result.replaceChildren();
    if (!select.value) return;
    const by = select.value;
    result.append(el("p", { class: "quiet" }, "Reading the usage rows …"));
    try {
      const { experiments: all } = await fetchJson(`/-/experiments?by=${by}`);
      if (by !== select.value) return;
      const report = all.find((one) => one.model === model)?.reports[number];
      result.replaceChildren(segmentTable(report?.comparison, select.selectedOptions[0].textContent));
    } catch (error) {
      result.replaceChildren(el("p", { class: "bad", role: "alert" }, error.message));
    }
  });
  return el("div", {}, el("div", { class: "fields" }, field("Segments of the feedback", select)), result);
}

function segmentTable(comparison, name) {
  if (!comparison?.segments.length) return el("p", { class: "quiet" }, "There is no feedback to divide into segments.");
  const { a, b } = comparison;
  const rows = comparison.segments.map((one) => {
    const cells = measureRow(one.row);
    return [one.segment, one.row.measure, count(one.a), count(one.b), ...cells.slice(1, 5)];
  });
  return table(`By ${name}; the intervals of all segments hold together`, [name, "Measure", `n of ${a}`, `n of ${b}`, `Version ${a}`, `Version ${b}`, "Difference", "Interval"], rows);
}

function section(experiment, guardrails) {
  const ratio = experiment.is_plausible
    ? null
    : el("p", { class: "bad", role: "alert" }, "The counts do not fit the weights (sample ratio mismatch): find the cause before you rely on these numbers.");
  const reports = experiment.reports.flatMap((report, number) => [
    el("h4", {}, `Version ${report.comparison.b} compared with version ${report.comparison.a}`),
    decision(report), courses(report, guardrails), measures(report), segments(experiment.model, number),
  ]);
  return el(
    "section", {}, el("h3", {}, `${experiment.model}, split ${experiment.split}`), ratio, ...reports, versionTable(experiment),
    experiment.problem ? el("p", {}, experiment.problem) : null,
  );
}

/** The guardrails of a model's rollout that limit a measure with a course. */
function guardrailsOf(rollouts, model) {
  return rollouts.filter((one) => one.model === model).flatMap(({ version, guardrails }) =>
    guardrails.map((one) => (one.name === "errors"
      ? { version, measure: "failed, or answered by a fallback", y: one.allowed }
      : { version, measure: one.name.replace(/^feedback /, ""), y: -one.allowed })));
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
      const [reports, running] = [await fetchJson("/-/experiments"), await fetchJson("/-/rollouts")];
      const none = reports.experiments.length ? "" : "No model splits its traffic over several versions.";
      setText(message, reports.problem || none);
      message.hidden = !message.textContent;
      const snapshot = JSON.stringify([reports, running]);
      if (snapshot === shown || list.contains(document.activeElement)) return;
      shown = snapshot;
      list.replaceChildren(
        ...running.rollouts.map(rollout),
        ...reports.experiments.map((one) => section(one, guardrailsOf(running.rollouts, one.model))),
      );
    } catch (error) {
      if (error.status === 401) throw error;
      message.hidden = false;
      setText(message, error.message);
    }
  }
  return { element: el("div", {}, el("h2", {}, "Experiments"), message, list), update };
}
