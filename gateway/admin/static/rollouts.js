// A guarded rollout: its steps, why it is where it is, and its guardrails.

import { count, el } from "./dom.js";

const PHASES = { running: "good", paused: "", holding: "bad", "rolled back": "bad", completed: "good" };
const VERDICTS = { breached: "bad", proven: "good", holds: "" };
const HEADINGS = ["Guardrail", "Known to be worse by", "Allowed", "Verdict", "Values"];

function percent(value, unknown) {
  return value === null ? unknown : `${count(100 * value, Math.abs(value) < 0.1 ? 1 : 0)} %`;
}

function steps(report) {
  const isOpen = report.phase && !["rolled back", "completed"].includes(report.phase);
  const stateOf = (number) => {
    if (report.phase === "completed" || (isOpen && number < report.step)) return "done";
    return isOpen && number === report.step ? "current" : "next";
  };
  return el("ol", { class: "steps", "aria-label": "Steps" }, ...report.steps.map((share, number) => {
    const state = stateOf(number);
    return el("li", { class: state, "aria-current": state === "current" ? "step" : null }, `${share} %`);
  }));
}

function facts(report) {
  if (!report.phase) return "It has not begun.";
  const parts = [`${report.share} % of the requests go to version ${report.version}`];
  if (report.step_at) parts.push(`this step began ${new Date(report.step_at * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" })}`);
  if (report.phase !== "completed") parts.push(`${count(report.requests)} of at least ${count(report.requests_at_least)} requests in it`);
  return parts.join("; ");
}

function guardrails(report) {
  const caption = `${report.model}: guardrails of the step`;
  const rows = report.guardrails.map((one) => {
    const worse = `${percent(one.low, "unknown")} to ${percent(one.high, "unknown")}`;
    const verdict = el("span", { class: `badge ${VERDICTS[one.verdict]}` }, one.verdict);
    return el("tr", {}, ...[one.name, worse, percent(one.allowed), verdict, one.text].map((value, number) =>
      el("td", { "data-label": HEADINGS[number] }, value)));
  });
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...HEADINGS.map((one) => el("th", { scope: "col" }, one)))), el("tbody", {}, ...rows)));
}

/** The section of a rollout. */
export function rollout(report) {
  const phase = report.phase ?? "not begun";
  return el(
    "section", {},
    el("h3", {}, `${report.model}: rollout of version ${report.version} `, el("span", { class: `badge ${PHASES[phase] ?? ""}` }, phase)),
    steps(report),
    el("p", {}, facts(report)),
    report.reason ? el("p", { class: PHASES[phase] === "bad" ? "bad" : null }, report.reason) : null,
    report.difference ? el("p", { class: "bad" }, report.difference) : null,
    report.guardrails.length ? guardrails(report) : null,
  );
}
