// The configuration, how its file differs from it, and buttons to drain and to reload.

import { fetchJson, sendCommand } from "./api.js";
import { confirmed, el, redraw, setText } from "./dom.js";

const DRAIN_DETAIL = "The readiness check fails from then on, so that load balancers send no more requests. Requests that arrive are still served.";

/** The view. */
export function config() {
  const summary = el("dl");
  const text = el("pre", { class: "lines", tabindex: "0", "aria-label": "The configuration, secrets masked" });
  const message = el("p", { role: "alert", class: "message" });
  const drain = el("button", { type: "button" }, "Drain");
  const reload = el("button", { type: "button" }, "Reload");
  const legend = el("p", { class: "quiet" });
  let draining = false;

  async function change(path, method, done) {
    setText(message, "");
    message.className = "message good";
    try {
      await sendCommand(path, method);
      setText(message, done);
    } catch (error) {
      const issues = (error.body?.issues ?? []).map((one) => `${one.line}:${one.column}: ${one.message}`);
      message.className = "message bad";
      setText(message, [error.message, ...issues].join("\n"));
    }
  }
  drain.addEventListener("click", async () => {
    if (draining) return change("/-/drain", "DELETE", "Draining stopped.");
    if (await confirmed("Drain this gateway?", DRAIN_DETAIL, "Start draining")) {
      await change("/-/drain", "POST", "Draining: the readiness check fails.");
    }
  });
  reload.addEventListener("click", () => change("/-/reload", "POST", "Configuration reloaded."));

  async function update(status) {
    draining = status.draining;
    setText(drain, draining ? "Stop draining" : "Drain");
    const { hash, file, lines, config: values } = await fetchJson("/-/config");
    const onDisk = file.hash === null ? "no file" : file.differs ? `${file.hash}: differs from the active configuration` : `${file.hash}: same as the active configuration`;
    redraw(summary, [hash, file], () => [
      el("dt", {}, "Active"), el("dd", {}, el("code", {}, hash || "–")),
      el("dt", {}, "File"), el("dd", {}, file.name || "–"),
      el("dt", {}, "On disk"), el("dd", { class: file.differs ? "bad" : null }, onDisk),
    ]);
    const shown = lines?.length && file.hash !== null ? lines : asLines(values);
    const changed = shown.filter(([active, onFile]) => active === null || onFile === null).length;
    setText(legend, describe(file, lines, changed));
    redraw(text, [file.hash, shown], () => shown.map((one) => line(one, Boolean(changed))));
  }
  const element = el(
    "div", {},
    el("div", { class: "bar-top" }, el("h2", {}, "Configuration"), el("p", { class: "buttons" }, reload, drain)),
    summary, message, legend, text,
  );
  return { element, update };
}

function describe(file, lines, changed) {
  if (file.hash === null) return "All values in effect; there is no file.";
  if (!lines?.length) return "All values in effect: the file can’t be read as YAML, so that its secrets can’t be masked. Reload lists its errors.";
  return changed ? "− is in effect, + is in the file and takes effect with a reload." : "The file as it is in effect.";
}

/** The values in effect, if there is no text. */
function asLines(values) {
  return JSON.stringify(values, null, 2).split("\n").map((one, at) => [at + 1, at + 1, one]);
}

/** A line with its number. Numbers and signs are no part of the text, so that they are not copied. */
function line([active, onFile, content], compares) {
  const sign = active === null ? "+" : onFile === null ? "−" : "";
  const kind = { "+": "added", "−": "removed" }[sign] ?? "";
  const label = sign ? el("span", { class: "hidden" }, `${kind}: `) : "";
  return el("span", { class: `line ${kind}`, "data-number": onFile ?? active, "data-sign": compares ? sign || " " : "" }, label, `${content}\n`);
}
