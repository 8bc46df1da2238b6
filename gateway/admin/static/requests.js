// The running requests, with a button to cancel each.

import { fetchJson, sendCommand } from "./api.js";
import { count, el, setText, table, time } from "./dom.js";

/** The view. */
export function requests() {
  const empty = el("p", { class: "quiet" }, "No running requests");
  const alert = el("p", { class: "bad", role: "alert" });
  async function cancel(row) {
    setText(alert, "");
    try {
      await sendCommand(`/-/requests/${encodeURIComponent(row.id)}/cancel`, "POST");
    } catch (error) {
      setText(alert, error.message);
    }
  }
  const running = table(
    "Oldest first. Prompts are neither shown nor stored.",
    [
      { label: "Model", of: (row) => row.model },
      { label: "Version", of: (row) => row.version },
      { label: "Backend", of: (row) => row.backend },
      { label: "Protocol", of: (row) => row.protocol },
      { label: "Key", of: (row) => row.key || "–" },
      { label: "Phase", of: (row) => row.phase },
      { label: "Age", number: true, of: (row) => time(row.age) },
      { label: "Tokens", number: true, of: (row) => count(row.tokens) },
      { label: "ID", of: (row) => row.id },
      {
        label: "",
        node: (row) => el("button", { type: "button", "aria-label": `Cancel ${row.id}`, onclick: () => cancel(row) }, "Cancel"),
      },
    ],
    (row) => row.id,
  );
  async function update() {
    const { requests: rows } = await fetchJson("/-/requests");
    running.show(rows);
    running.element.hidden = !rows.length;
    empty.hidden = Boolean(rows.length);
  }
  return { element: el("div", {}, el("h2", {}, "Live requests"), alert, empty, running.element), update };
}
