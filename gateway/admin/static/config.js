// What is served, and what may be changed while it is.

import { act, ask } from "./api.js";
import { el, say } from "./dom.js";

/** The view. */
export function config() {
  const facts = el("dl");
  const text = el("pre", { tabindex: "0", "aria-label": "The configuration, secrets masked" });
  const trouble = el("p", { role: "alert" });
  const drain = el("button", { type: "button" }, "Drain");
  const reload = el("button", { type: "button" }, "Reload");
  let draining = false;
  let shown = "";

  async function change(path, method, done) {
    say(trouble, "");
    trouble.className = "good";
    try {
      await act(path, method);
      say(trouble, done);
    } catch (error) {
      const places = (error.told?.issues ?? []).map((one) => `${one.line}:${one.column}: ${one.message}`);
      trouble.className = "bad";
      say(trouble, [error.message, ...places].join("\n"));
    }
  }
  drain.addEventListener("click", () =>
    draining ? change("/-/drain", "DELETE", "Requests may come again.") : change("/-/drain", "POST", "Readiness fails from now on."),
  );
  reload.addEventListener("click", () => change("/-/reload", "POST", "It is served."));

  async function update(told) {
    draining = told.draining;
    say(drain, draining ? "Stop draining" : "Drain");
    const found = await ask("/-/config");
    const now = JSON.stringify(found);
    if (now === shown) return;
    shown = now;
    const { hash, file } = found;
    const there = file.hash === null ? "it is in no file" : file.differs ? `${file.hash}: not what is served` : `${file.hash}: the same`;
    facts.replaceChildren(
      el("dt", {}, "Served"), el("dd", {}, el("code", {}, hash || "–")),
      el("dt", {}, "File"), el("dd", {}, file.name || "–"),
      el("dt", {}, "On disk"), el("dd", { class: file.differs ? "bad" : null }, there),
    );
    say(text, JSON.stringify(found.config, null, 2));
  }
  const whole = el("div", {}, el("h2", {}, "Configuration"), facts, el("p", { class: "buttons" }, reload, drain), trouble, text);
  return { whole, update };
}
