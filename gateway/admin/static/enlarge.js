// A chart of the status view, opened larger: with axes, and over a longer time from the usage store.

import { fetchJson } from "./api.js";
import { chart } from "./chart.js";
import { choice, el, field, rate, setText, time } from "./dom.js";
import { sparkline } from "./sparkline.js";

const RANGES = [["15m", "15 minutes"], ["6h", "6 hours"], ["7d", "7 days"]];
const REFRESH_INTERVAL = 10000;
const MEASURES = {
  requests: { label: "Requests per second", of: (point) => point?.requests ?? 0, isRate: true, describe: fine },
  errors: { label: "Errors per second", of: (point) => point?.errors ?? 0, isRate: true, describe: fine },
  tokens: { label: "Tokens per second", of: (point) => point?.tokens ?? 0, isRate: true, describe: fine },
  first: { label: "Time to first token", of: (point) => point?.first_token_p50 ?? point?.first_token ?? null, describe: time },
};

/** A rate, also a small one with two digits. */
function fine(value) {
  return value !== 0 && Math.abs(value) < 0.1 ? String(Number(value.toPrecision(2))) : rate(value);
}

/** A small chart that opens larger. `row` names the model and version; null is the sum of all. */
export function enlargeable(measure, values, row) {
  const { label, describe } = MEASURES[measure];
  const name = row ? `${label} of ${nameOf(row)}` : label;
  return el("button", { type: "button", class: "enlarge", "aria-label": `${name}: open larger`, onclick: () => open(measure, row) }, sparkline(label, values, describe));
}

function nameOf(row) {
  return row.version ? `${row.name}@${row.version}` : row.name;
}

/** Points of a measure in all intervals of a history: of one version, or the sums of all. */
function pointsOf(history, measure, row) {
  const { of, isRate } = MEASURES[measure];
  const versions = history.versions.filter((one) => !row || (one.model === row.model && one.version === row.version));
  const tables = versions.map((one) => new Map(one.points.map((point) => [point.n, point])));
  return Array.from({ length: history.intervals }, (_, at) => {
    const n = history.end - history.intervals + at;
    const values = tables.map((table) => of(table.get(n)));
    const sum = values.reduce((total, one) => total + one, 0);
    return { x: n * history.interval, y: isRate ? sum / history.interval : values[0] ?? null };
  });
}

async function readHistory(range) {
  if (range !== "15m") return fetchJson(`/-/usage/history?range=${range}`);
  const history = await fetchJson("/-/history");
  const now = Date.now() / 1000 / history.interval;
  const shift = Math.floor(now) - history.end; // its clock is not the time of day
  const shifted = history.versions.map((one) => ({ ...one, points: one.points.map((point) => ({ ...point, n: point.n + shift })) }));
  return { ...history, end: history.end + shift, versions: shifted };
}

function open(measure, row) {
  const { label, describe } = MEASURES[measure];
  const figure = chart();
  const range = choice(RANGES);
  const note = el("p", { class: "quiet", role: "status" });
  const title = el("h2", { id: "chart-title" }, row ? `${label}: ${nameOf(row)}` : label);
  const close = el("button", { type: "button" }, "Close");
  const element = el("dialog", { class: "large", "aria-labelledby": "chart-title" }, el("div", { class: "bar-top" }, title, field("Range", range), close), figure.element, note);
  let timer = 0;

  async function show() {
    clearTimeout(timer);
    const wanted = range.value;
    try {
      const history = await readHistory(wanted);
      if (wanted !== range.value) return;
      const to = history.end * history.interval;
      figure.draw({ label: title.textContent, from: to - history.intervals * history.interval, to, points: pointsOf(history, measure, row), describe });
      setText(note, history.problem || noteOf(wanted, measure));
    } catch (error) {
      setText(note, error.message);
    }
    if (element.isConnected) timer = setTimeout(show, REFRESH_INTERVAL);
  }
  range.addEventListener("change", show);
  close.addEventListener("click", () => element.close());
  element.addEventListener("close", () => {
    clearTimeout(timer);
    element.remove();
  });
  document.body.append(element);
  element.showModal();
  void show();
}

function noteOf(range, measure) {
  if (range === "15m") return measure === "first" ? "The median of each 10 seconds." : "The mean of each 10 seconds.";
  const each = range === "6h" ? "2 minutes" : "hour";
  return `The mean of each ${each}, from the usage store: requests that reached a model.`;
}
