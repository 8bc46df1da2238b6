// The running and the last finished requests, and the record and explanation of each.

import { fetchJson, fetchText, sendCommand } from "./api.js";
import { choice, count, el, field, redraw, setText, table, time } from "./dom.js";

const OUTCOMES = {
  ok: "ok",
  client_error: "client error",
  worker_error: "worker error",
  gateway_error: "gateway error",
  cancelled: "cancelled",
  truncated: "truncated",
};
const STATUSES = [["", "All"], ["running", "Running"], ["failed", "Failed"], ...Object.entries(OUTCOMES)];
const NO_EXPLANATION =
  "No explanation was recorded. A client that may ask for one sends the header x-interlingua-explain: 1; the last 100 are kept.";

/** A request's model and version, as a client could name it. */
function targetOf(row) {
  return row.model ? `${row.model}@${row.version}` : "–";
}

function keyColumn() {
  return { label: "Key", of: (row) => row.key || "–" };
}

/** The link that opens a request's details. */
function link(row, text) {
  return el("a", { href: `#requests/${encodeURIComponent(row.id)}`, "aria-label": `${text}, details of request ${row.id}` }, text);
}

/** The view. */
export function requests() {
  const alert = el("p", { class: "bad", role: "alert" });
  const filters = {
    model: choice([["", "All"]]),
    key: choice([["", "All"]]),
    status: choice(STATUSES),
  };
  const dialog = detailDialog();
  let finishedRows = [];
  let runningRows = [];

  async function cancel(row) {
    setText(alert, "");
    try {
      await sendCommand(`/-/requests/${encodeURIComponent(row.id)}/cancel`, "POST");
    } catch (error) {
      setText(alert, error.message);
    }
  }
  const running = table(
    "The oldest first",
    [
      { label: "Age", of: (row) => time(row.age), draw: (row) => link(row, time(row.age)) },
      { label: "Model", of: targetOf },
      { label: "Backend", of: (row) => row.backend },
      { label: "Protocol", of: (row) => row.protocol },
      keyColumn(),
      { label: "Phase", of: (row) => row.phase },
      { label: "Tokens", number: true, of: (row) => count(row.tokens) },
      {
        label: "",
        node: (row) => el("button", { type: "button", "aria-label": `Cancel ${row.id}`, onclick: () => cancel(row) }, "Cancel"),
      },
    ],
    (row) => row.id,
  );
  const finished = table(
    "The last to end first. Prompts and responses are not stored.",
    [
      { label: "Started", of: (row) => [row.id, row.started_at], draw: (row) => link(row, clock(row.started_at)) },
      { label: "Model", of: targetOf },
      { label: "Protocol", of: (row) => row.protocol || "–" },
      keyColumn(),
      {
        label: "Status",
        of: (row) => [row.status, row.outcome],
        draw: (row) => [el("span", {}, row.status ? `${row.status} ` : ""), el("span", { class: `badge ${row.outcome === "ok" ? "good" : "bad"}` }, OUTCOMES[row.outcome] ?? row.outcome)],
      },
      { label: "Error", of: (row) => row.error || "–" },
      { label: "First token", number: true, of: (row) => time(row.first_token) },
      { label: "Duration", number: true, of: (row) => time(row.duration) },
      { label: "Tokens in", number: true, of: (row) => count(row.usage?.prompt_tokens) },
      { label: "Tokens out", number: true, of: (row) => count(row.usage?.completion_tokens) },
    ],
    (row) => `${row.id} ${row.started_at}`,
  );
  const noRunning = el("p", { class: "quiet" }, "No running requests");
  const noFinished = el("p", { class: "quiet" }, "No finished requests");

  function matches(row) {
    const { model, key, status } = filters;
    const fits = status.value === "" || status.value === row.outcome || (status.value === "failed" && row.outcome !== "ok" && row.outcome !== "running")
      || (status.value === "running" && row.outcome === "running");
    return fits && (model.value === "" || model.value === targetOf(row) || model.value === row.model) && (key.value === "" || key.value === (row.key || "–"));
  }
  function show() {
    for (const [view, all, none] of [[running, runningRows, noRunning], [finished, finishedRows, noFinished]]) {
      const shown = all.filter(matches);
      view.show(shown);
      view.element.hidden = !shown.length;
      none.hidden = Boolean(shown.length);
    }
  }
  for (const one of Object.values(filters)) one.addEventListener("change", show);

  /** Offer the models and keys of the requests, and keep what is selected. */
  function offer(select, values) {
    const options = [["", "All"], ...[...new Set([...values, select.value])].filter(Boolean).sort().map((value) => [value, value])];
    redraw(select, options, () => {
      const selected = select.value;
      queueMicrotask(() => { select.value = selected; });
      return options.map(([value, text]) => el("option", { value }, text));
    });
  }
  async function update() {
    const [now, done] = await Promise.all([fetchJson("/-/requests"), fetchJson("/-/requests/finished")]);
    runningRows = now.requests.map((row) => ({ ...row, outcome: "running" }));
    finishedRows = done.requests.map((row) => ({ duration: 0, outcome: "ok", ...row }));
    const all = [...runningRows, ...finishedRows];
    offer(filters.model, all.filter((row) => row.model).flatMap((row) => [row.model, targetOf(row)]));
    offer(filters.key, all.map((row) => row.key || "–"));
    show();
    const id = decodeURIComponent(location.hash.split("/").slice(1).join("/"));
    if (id) dialog.open(id, all.find((row) => row.id === id));
  }
  const element = el(
    "div", {},
    el("div", { class: "fields" }, field("Model", filters.model), field("Key", filters.key), field("Status", filters.status)),
    alert,
    el("section", {}, el("h2", {}, "Running"), noRunning, running.element),
    el("section", {}, el("h2", {}, "Finished"), noFinished, finished.element),
    dialog.element,
  );
  return { element, update };
}

/** The time of day. */
function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

/** The details of one request, which is in the page's address. */
function detailDialog() {
  const title = el("h2", { id: "request-title" });
  const facts = el("dl");
  const explanation = el("pre", { tabindex: "0", "aria-label": "Explanation" });
  const close = el("button", { type: "button" }, "Close");
  const element = el("dialog", { class: "drawer", "aria-labelledby": "request-title" }, el("div", { class: "bar-top" }, title, close), facts, el("h3", {}, "Explanation"), explanation);
  let shownId = null;
  close.addEventListener("click", () => element.close());
  element.addEventListener("close", () => {
    shownId = null;
    if (location.hash.startsWith("#requests/")) location.hash = "#requests";
  });
  addEventListener("hashchange", () => {
    if (!location.hash.startsWith("#requests/") && element.open) element.close();
  });
  function open(id, row) {
    redraw(facts, row ?? null, () => (row ? listFacts(row) : [el("dt", {}, "Record"), el("dd", {}, "no longer among the last 200 requests")]));
    if (shownId === id) return;
    shownId = id;
    setText(title, `Request ${id}`);
    setText(explanation, "");
    if (!element.open) element.showModal();
    void fetchText(`/-/explain/${encodeURIComponent(id)}?format=text`).then(
      (text) => setText(explanation, text),
      (error) => setText(explanation, error.status === 404 ? NO_EXPLANATION : error.message),
    );
  }
  return { element, open };
}

function listFacts(row) {
  const usage = row.usage && `${count(row.usage.prompt_tokens)} in, ${count(row.usage.completion_tokens)} out (${row.usage.source})`;
  const facts = [
    ["Started", row.started_at && new Date(row.started_at * 1000).toLocaleString("en-GB")],
    ["Path", row.path],
    ["Protocol", row.protocol],
    ["Model", row.model && `${targetOf(row)} by backend ${row.backend}`],
    ["Key", row.key],
    ["Status", [row.status, row.phase ?? OUTCOMES[row.outcome]].filter(Boolean).join(" ")],
    ["Error", row.error],
    ["Route", row.rule],
    ["Traffic split", row.split && `${row.split}${row.sticky ? `, sticky by ${row.sticky}` : ", by chance"}`],
    ["Fallback from", row.fallback_from],
    ["Failed targets", row.failed_attempts?.join("\n")],
    ["Failed workers", row.worker_failures?.map((one) => [one.worker, one.status && `status ${one.status}`, one.error, one.text].filter(Boolean).join(" ")).join("\n")],
    ["Unsupported", row.unsupported_parameters?.map((one) => `${one.field} ${one.reason}`).join(", ")],
    ["First token", row.first_token === undefined ? "" : time(row.first_token)],
    ["Duration", row.duration ? time(row.duration) : ""],
    ["Gateway’s own part", row.overhead === undefined ? "" : time(row.overhead)],
    ["Tokens", usage],
    ["Finish reason", row.finish_reasons?.join(", ")],
    ["Configuration", row.config_hash],
    ["Trace", row.trace_id],
  ];
  return facts.filter(([, value]) => value).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]);
}
