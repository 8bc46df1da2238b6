// The configuration, and buttons to drain and to reload.

import { fetchJson, sendCommand } from "./api.js";
import { el, setText } from "./dom.js";

/** The view. */
export function config() {
  const summary = el("dl");
  const text = el("pre", { tabindex: "0", "aria-label": "The configuration, secrets masked" });
  const message = el("p", { role: "alert" });
  const drain = el("button", { type: "button" }, "Drain");
  const reload = el("button", { type: "button" }, "Reload");
  let draining = false;
  let shownSnapshot = "";

  async function change(path, method, done) {
    setText(message, "");
    message.className = "good";
    try {
      await sendCommand(path, method);
      setText(message, done);
    } catch (error) {
      const issues = (error.body?.issues ?? []).map((one) => `${one.line}:${one.column}: ${one.message}`);
      message.className = "bad";
      setText(message, [error.message, ...issues].join("\n"));
    }
  }
  drain.addEventListener("click", () =>
    draining ? change("/-/drain", "DELETE", "Draining stopped.") : change("/-/drain", "POST", "Draining: the readiness check fails."),
  );
  reload.addEventListener("click", () => change("/-/reload", "POST", "Configuration reloaded."));

  async function update(status) {
    draining = status.draining;
    setText(drain, draining ? "Stop draining" : "Drain");
    const configuration = await fetchJson("/-/config");
    const snapshot = JSON.stringify(configuration);
    if (snapshot === shownSnapshot) return;
    shownSnapshot = snapshot;
    const { hash, file } = configuration;
    const onDisk = file.hash === null ? "no file" : file.differs ? `${file.hash}: differs from the active configuration` : `${file.hash}: same as the active configuration`;
    summary.replaceChildren(
      el("dt", {}, "Active"), el("dd", {}, el("code", {}, hash || "–")),
      el("dt", {}, "File"), el("dd", {}, file.name || "–"),
      el("dt", {}, "On disk"), el("dd", { class: file.differs ? "bad" : null }, onDisk),
    );
    setText(text, JSON.stringify(configuration.config, null, 2));
  }
  const element = el("div", {}, el("h2", {}, "Configuration"), summary, el("p", { class: "buttons" }, reload, drain), message, text);
  return { element, update };
}
