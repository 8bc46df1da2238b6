// Models and how their versions do, and the workers behind them.

import { count, el, table, time } from "./dom.js";

const MODELS = [
  { label: "Model", of: (row) => row.model },
  { label: "Version", of: (row) => row.version },
  { label: "Share", number: true, of: (row) => (row.share === null ? "–" : `${row.share} %`) },
  { label: "Backend", of: (row) => row.backend },
  { label: "State", of: (row) => row.state, bad: (row) => row.state === "not ready" },
  { label: "Requests", number: true, of: (row) => count(row.requests) },
  { label: "Errors", number: true, of: (row) => count(row.errors) },
  { label: "First token, p50", number: true, of: (row) => time(row.first_token_p50) },
  { label: "p95", number: true, of: (row) => time(row.first_token_p95) },
  { label: "Tokens/s", number: true, of: (row) => count(row.tokens_per_second, 1) },
];
const WORKERS = [
  { label: "Backend", of: (row) => row.backend },
  { label: "Worker", of: (row) => row.url },
  { label: "State", of: (row) => row.state, bad: (row) => row.state === "out" },
  { label: "Last failure", of: (row) => row.error || "–" },
  { label: "Back in", number: true, of: (row) => time(row.back_in) },
  { label: "In flight", number: true, of: (row) => count(row.in_flight) },
  { label: "Places", number: true, of: (row) => count(row.limit) },
  { label: "First token", number: true, of: (row) => time(row.latency) },
  { label: "Weight", number: true, of: (row) => count(row.weight, 2) },
];
const NONE = {
  requests: 0,
  errors: 0,
  tokens_per_second: 0,
  first_token_p50: null,
  first_token_p95: null,
};

function rows(told) {
  const figures = new Map(told.stats.map((one) => [`${one.model}@${one.version}`, one]));
  const known = told.models.flatMap((model) =>
    model.versions.map((one) => {
      const at = `${model.name}@${one.name}`;
      const its = figures.get(at) ?? NONE;
      figures.delete(at);
      const ready = one.ready ? "ready" : "not ready";
      return { ...its, model: model.name, version: one.name, share: one.share, backend: one.backend, state: ready };
    }),
  );
  const others = [...figures.values()].filter((one) => one.model);
  return [...known, ...others.map((one) => ({ ...one, share: null, backend: "–", state: "not configured" }))];
}

/** The view. */
export function status() {
  const models = table("Figures since the start; times and rates of the last minute", MODELS, (row) => `${row.model}@${row.version}`);
  const workers = table("As the gateway sees them", WORKERS, (row) => `${row.backend} ${row.url}`);
  const crews = el("section", { hidden: true }, el("h2", {}, "Workers"), workers.whole);
  const whole = el("div", {}, el("h2", {}, "Models"), models.whole, crews);
  function update(told) {
    models.show(rows(told));
    const every = Object.entries(told.workers).flatMap(([backend, its]) => its.map((one) => ({ ...one, backend })));
    crews.hidden = !every.length;
    workers.show(every);
  }
  return { whole, update };
}
