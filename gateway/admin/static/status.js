// The models with their statistics of the last 15 minutes, the errors, and the workers.

import { fetchJson } from "./api.js";
import { count, el, rate, redraw, table, time } from "./dom.js";
import { enlargeable } from "./enlarge.js";
import { bar } from "./sparkline.js";

const INTERVALS = 90;
const STATES = { up: "in rotation", trial: "on trial", out: "out" };
const OUT_REASONS = {
  health_check: "health checks fail",
  connect: "connecting fails",
  ejected: "ejected after failed requests",
};
const NO_MODEL = "no model";
const WITHOUT_MODEL = "listings, feedback, unknown models and keys";

/** A number with its line. */
function metric(text, chart, quiet = "") {
  return el("div", { class: "metric" }, el("span", {}, text, quiet ? el("span", { class: "quiet" }, ` ${quiet}`) : ""), chart);
}

const MODELS = [
  {
    label: "Model",
    of: (row) => [row.name, row.aliases],
    draw: (row) => [el("span", { class: "name" }, row.name), row.aliases.length ? el("span", { class: "quiet under" }, row.aliases.join(", ")) : null],
  },
  {
    label: "Version",
    of: (row) => [row.version, row.backend, row.state],
    draw: (row) => [
      el("span", { class: "name" }, row.version || "–"),
      row.state === "ready" ? null : el("span", { class: "badge bad" }, row.state),
      row.backend ? el("span", { class: "quiet under" }, row.backend) : null,
    ],
  },
  {
    label: "Split",
    of: (row) => [row.share, row.actual],
    draw: (row) => {
      if (row.share === null) return "–";
      const actual = row.actual === null ? "no requests" : `${count(100 * row.actual)} %`;
      const text = el("span", {}, actual, el("span", { class: "quiet" }, ` of ${row.share} %`));
      return el("div", { class: "metric" }, text, bar(`Actual ${actual}, wanted ${row.share} %`, row.actual ?? 0, row.share / 100));
    },
  },
  {
    label: "Requests/s",
    of: (row) => [row.requests_per_second, row.fallbacks_per_second, row.shadows_per_second, row.lines.requests],
    draw: (row) => metric(rate(row.requests_per_second), enlargeable("requests", row.lines.requests, row), notAnswered(row, "_per_second", rate)),
  },
  {
    label: "Errors",
    of: (row) => [row.recentErrors, row.lines.errors],
    draw: (row) => metric(count(row.recentErrors), enlargeable("errors", row.lines.errors, row)),
    bad: (row) => row.recentErrors > 0,
  },
  {
    label: "First token",
    of: (row) => [row.p50, row.p95, row.lines.first],
    draw: (row) => metric(time(row.p50), enlargeable("first", row.lines.first, row), row.p95 === null ? "" : `p95 ${time(row.p95)}`),
  },
  {
    label: "Tokens/s",
    of: (row) => [row.tokens_per_second, row.lines.tokens],
    draw: (row) => metric(rate(row.tokens_per_second), enlargeable("tokens", row.lines.tokens, row)),
  },
  {
    label: "Total",
    number: true,
    of: (row) => [row.requests, row.answered_by_fallback, row.shadow_requests],
    draw: (row) => [el("span", {}, count(row.requests)), el("span", { class: "quiet under" }, notAnswered(row, "", count))],
  },
];
const ERRORS = [
  { label: "Model", of: (row) => row.name },
  { label: "Version", of: (row) => row.version || "–" },
  { label: "Error", of: (row) => row.error },
  { label: "Caused by", of: (row) => row.origin },
  { label: "Requests", number: true, of: (row) => count(row.count) },
];
const WORKERS = [
  { label: "Backend", of: (row) => row.backend },
  { label: "Worker", of: (row) => row.url },
  {
    label: "State",
    of: (row) => row.state,
    draw: (row) => el("span", { class: `badge ${{ up: "good", out: "bad" }[row.state] ?? ""}` }, STATES[row.state] ?? row.state),
  },
  { label: "Reason", of: reasonOf },
  {
    label: "In flight",
    of: (row) => [row.in_flight, row.limit],
    draw: (row) => {
      const text = row.limit === null ? count(row.in_flight) : `${count(row.in_flight)} of ${count(row.limit)}`;
      return el("div", { class: "metric" }, el("span", {}, text), row.limit === null ? "" : bar(`${text} in flight`, row.limit ? row.in_flight / row.limit : 1));
    },
  },
  { label: "First token", number: true, of: (row) => time(row.latency) },
  { label: "Weight", number: true, of: (row) => count(row.weight, 2) },
];
const LOCAL_MODELS = [
  { label: "Model", of: (row) => row.name },
  { label: "Version", of: (row) => row.version },
  { label: "In memory", of: (row) => (row.loaded ? "yes" : "no") },
  ...["task", "chat", "tool calls", "calls are enforced", "functions are in", "reasoning", "earlier reasoning", "schema", "context", "prompt lookup", "weights"]
    .map((subject) => ({ label: subject[0].toUpperCase() + subject.slice(1), of: (row) => row.description[subject] ?? "–" })),
];
const NONE = { requests: 0, answered_by_fallback: 0, shadow_requests: 0, requests_per_second: 0, fallbacks_per_second: 0, shadows_per_second: 0, tokens_per_second: 0, first_token_p50: null, first_token_p95: null };

/** The requests that a version got beside those that it answered for clients. */
function notAnswered(row, unit, format) {
  const fallbacks = unit ? row.fallbacks_per_second : row.answered_by_fallback;
  const shadows = unit ? row.shadows_per_second : row.shadow_requests;
  return [fallbacks && `+ ${format(fallbacks)} answered by fallback`, shadows && `+ ${format(shadows)} shadow`].filter(Boolean).join(", ");
}

/** Why a worker is out, or what its last failure was. */
function reasonOf(row) {
  const failure = row.error ? (/^\d+$/.test(row.error) ? `status ${row.error}` : row.error.replaceAll("_", " ")) : "";
  if (row.state === "up") return failure ? `last failure: ${failure}` : "–";
  const parts = [OUT_REASONS[row.out_reason] ?? "one request at a time", failure && `last failure: ${failure}`];
  if (row.back_in !== null) parts.push(`again in ${time(row.back_in)}`);
  return parts.filter(Boolean).join("; ");
}

/** The values of a list, where one is missing the last one before. */
function held(values) {
  let last = null;
  return values.map((value) => (last = value ?? last));
}

/** The values of a version in each of the last intervals; null before the gateway's start. */
function linesOf(history, version) {
  const points = new Map((version?.points ?? []).map((point) => [point.n, point]));
  const each = (value, missing) =>
    Array.from({ length: INTERVALS }, (_, at) => {
      const n = history.end - INTERVALS + at;
      if (n < history.end - history.intervals) return null;
      return points.has(n) ? value(points.get(n)) : missing;
    });
  return {
    requests: each((point) => (point.requests ?? 0) / history.interval, 0),
    errors: each((point) => (point.errors ?? 0) / history.interval, 0),
    tokens: each((point) => (point.tokens ?? 0) / history.interval, 0),
    first: held(each((point) => point.first_token_p50 ?? null, null)),
  };
}

function rows(status, history) {
  const keyOf = (one) => JSON.stringify([one.model, one.version]);
  const statistics = new Map(status.stats.map((one) => [keyOf(one), one]));
  const recent = new Map(history.versions.map((one) => [keyOf(one), one]));
  const configured = status.models.flatMap((model) => {
    const sent = model.versions.map((one) => recent.get(keyOf({ model: model.name, version: one.name }))?.split_requests ?? 0);
    const total = sent.reduce((sum, one) => sum + one, 0);
    return model.versions.map((one, at) => ({
      model: model.name,
      name: model.name,
      aliases: at ? [] : model.aliases,
      version: one.name,
      backend: one.backend,
      state: one.ready ? "ready" : "not ready",
      share: model.versions.length > 1 ? one.share : null,
      actual: total ? sent[at] / total : null,
    }));
  });
  const names = new Set(configured.map(keyOf));
  const others = status.stats
    .filter((one) => !names.has(keyOf(one)) && one.requests + one.answered_by_fallback + one.shadow_requests)
    .map((one) => ({
      model: one.model, name: one.model || NO_MODEL, aliases: one.model ? [] : [WITHOUT_MODEL], version: one.version, backend: "",
      state: one.model ? "not configured" : "ready", share: null, actual: null,
    }));
  return [...configured, ...others].map((row) => {
    const counts = statistics.get(keyOf(row)) ?? NONE;
    const version = recent.get(keyOf(row));
    return {
      ...row,
      requests: counts.requests,
      answered_by_fallback: counts.answered_by_fallback,
      shadow_requests: counts.shadow_requests,
      requests_per_second: counts.requests_per_second,
      fallbacks_per_second: counts.fallbacks_per_second,
      shadows_per_second: counts.shadows_per_second,
      tokens_per_second: counts.tokens_per_second,
      p50: version?.first_token_p50 ?? counts.first_token_p50,
      p95: version?.first_token_p95 ?? counts.first_token_p95,
      recentErrors: (version?.errors ?? []).reduce((sum, one) => sum + one.count, 0),
      lines: linesOf(history, version),
    };
  });
}

/** The sums over all versions. */
function totals(shown) {
  const sum = (pick) => shown.reduce((total, row) => total + pick(row), 0);
  const line = (name) => shown[0]?.lines[name].map((_, at) => (shown[0].lines[name][at] === null ? null : sum((row) => row.lines[name][at]))) ?? [];
  return [
    ["Requests/s", rate(sum((row) => row.requests_per_second)), "last minute", enlargeable("requests", line("requests"), null)],
    ["Errors", count(sum((row) => row.recentErrors)), "last 15 minutes", enlargeable("errors", line("errors"), null)],
    ["Tokens/s", rate(sum((row) => row.tokens_per_second)), "last minute", enlargeable("tokens", line("tokens"), null)],
  ];
}

/** The view. */
export function status() {
  const tiles = el("div", { class: "tiles" });
  const models = table("Rates of the last minute; errors and time to first token (median, p95) of the last 15 minutes; totals since the start", MODELS, (row) => JSON.stringify([row.model, row.version]));
  const errors = table("Last 15 minutes, by class; “no model”: no version answered, for instance since the model is unknown or the key is wrong", ERRORS, (row) => JSON.stringify([row.model, row.version, row.error]));
  const workers = table("As this gateway sees them", WORKERS, (row) => `${row.backend} ${row.url}`);
  const localModels = table("What the local engine understands of each model", LOCAL_MODELS, (row) => JSON.stringify([row.name, row.version]));
  const localSection = el("section", { hidden: true }, el("h2", {}, "Local models"), localModels.element);
  const none = el("p", { class: "quiet" }, "No errors in the last 15 minutes");
  const failures = el("ul", { class: "plain bad", hidden: true });
  const workerSection = el("section", { hidden: true }, el("h2", {}, "Workers"), workers.element);
  const element = el(
    "div", {},
    tiles,
    failures,
    el("section", {}, el("h2", {}, "Models"), models.element),
    localSection,
    workerSection,
    el("section", {}, el("h2", {}, "Errors"), none, errors.element),
  );
  async function update(status) {
    const history = await fetchJson("/-/history");
    const shown = rows(status, history);
    redraw(tiles, [status.running, shown.map((row) => [row.requests_per_second, row.tokens_per_second, row.recentErrors, row.lines])], () => [
      tile("Running", count(status.running), "requests now", null),
      ...totals(shown).map((one) => tile(...one)),
    ]);
    models.show(shown);
    const classes = history.versions.flatMap((version) =>
      version.errors.map((one) => ({ ...one, model: version.model, version: version.version, name: version.model || NO_MODEL })));
    errors.show(classes.sort((one, other) => other.count - one.count));
    errors.element.hidden = !classes.length;
    none.hidden = Boolean(classes.length);
    redraw(failures, status.failures, () => Object.entries(status.failures).map(([name, reason]) => el("li", {}, `Backend ${name}: ${reason}`)));
    failures.hidden = !Object.keys(status.failures).length;
    const reports = Object.entries(status.workers).flatMap(([backend, members]) => members.map((one) => ({ ...one, backend })));
    workerSection.hidden = !reports.length;
    workers.show(reports);
    const local = status.models.flatMap((model) =>
      model.versions.filter((one) => one.state).map((one) => ({ name: model.name, version: one.name, loaded: one.state.loaded, description: one.description })));
    localSection.hidden = !local.length;
    localModels.show(local);
  }
  return { element, update };
}

function tile(label, value, note, chart) {
  return el("div", { class: "tile" }, el("h2", {}, label), el("p", {}, el("span", { class: "value" }, value), el("span", { class: "quiet" }, note)), chart);
}
