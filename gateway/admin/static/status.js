// The models with statistics of their versions, and the workers.

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
  { label: "Retry in", number: true, of: (row) => time(row.back_in) },
  { label: "In flight", number: true, of: (row) => count(row.in_flight) },
  { label: "Limit", number: true, of: (row) => count(row.limit) },
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

function rows(status) {
  const statistics = new Map(status.stats.map((one) => [`${one.model}@${one.version}`, one]));
  const known = status.models.flatMap((model) =>
    model.versions.map((one) => {
      const key = `${model.name}@${one.name}`;
      const counts = statistics.get(key) ?? NONE;
      statistics.delete(key);
      const ready = one.ready ? "ready" : "not ready";
      return { ...counts, model: model.name, version: one.name, share: one.share, backend: one.backend, state: ready };
    }),
  );
  const others = [...statistics.values()].filter((one) => one.model);
  return [...known, ...others.map((one) => ({ ...one, share: null, backend: "–", state: "not configured" }))];
}

/** The view. */
export function status() {
  const models = table("Totals since the start; latencies and rates over the last minute", MODELS, (row) => `${row.model}@${row.version}`);
  const workers = table("As seen by the gateway", WORKERS, (row) => `${row.backend} ${row.url}`);
  const workerSection = el("section", { hidden: true }, el("h2", {}, "Workers"), workers.element);
  const element = el("div", {}, el("h2", {}, "Models"), models.element, workerSection);
  function update(status) {
    models.show(rows(status));
    const reports = Object.entries(status.workers).flatMap(([backend, members]) => members.map((one) => ({ ...one, backend })));
    workerSection.hidden = !reports.length;
    workers.show(reports);
  }
  return { element, update };
}
