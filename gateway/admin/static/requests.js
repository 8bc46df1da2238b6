// What runs now, and a button that ends it.

import { act, ask } from "./api.js";
import { count, el, say, table, time } from "./dom.js";

/** The view. */
export function requests() {
  const nothing = el("p", { class: "quiet" }, "Nothing runs.");
  const trouble = el("p", { class: "bad", role: "alert" });
  async function cancel(row) {
    say(trouble, "");
    try {
      await act(`/-/requests/${encodeURIComponent(row.id)}/cancel`, "POST");
    } catch (error) {
      say(trouble, error.message);
    }
  }
  const running = table(
    "The oldest first; no prompt is shown, and none is kept",
    [
      { label: "Model", of: (row) => row.model },
      { label: "Version", of: (row) => row.version },
      { label: "Backend", of: (row) => row.backend },
      { label: "Protocol", of: (row) => row.protocol },
      { label: "Key", of: (row) => row.key || "–" },
      { label: "Phase", of: (row) => row.phase },
      { label: "Age", number: true, of: (row) => time(row.age) },
      { label: "Tokens", number: true, of: (row) => count(row.tokens) },
      { label: "Id", of: (row) => row.id },
      {
        label: "",
        node: (row) => el("button", { type: "button", "aria-label": `Cancel ${row.id}`, onclick: () => cancel(row) }, "Cancel"),
      },
    ],
    (row) => row.id,
  );
  async function update() {
    const { requests: told } = await ask("/-/requests");
    running.show(told);
    running.whole.hidden = !told.length;
    nothing.hidden = Boolean(told.length);
  }
  return { whole: el("div", {}, el("h2", {}, "Live requests"), trouble, nothing, running.whole), update };
}
