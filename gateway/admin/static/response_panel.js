// One answer of the playground: its text as it comes, its events as they are, its figures.

import { errorOf, textOf, tokensOf } from "./protocols.js";
import { count, el, field, say, time } from "./dom.js";
import { curl, httpx } from "./snippets.js";
import { send } from "./stream.js";

const MOST = 2000;

/** A column. `names` is the id of the list of models. */
export function responsePanel(label, names, first) {
  const model = el("input", { list: names, value: first, autocomplete: "off", spellcheck: "false" });
  const answer = el("pre", { class: "answer", tabindex: "0", role: "log", "aria-label": `${label}: answer` });
  const trouble = el("p", { class: "bad", role: "alert" });
  const figures = el("p", { class: "quiet" }, "–");
  const raw = el("div", { class: "raw", tabindex: "0", role: "group", "aria-label": `${label}: events` });
  const lines = [el("pre", { tabindex: "0" }), el("pre", { tabindex: "0" })];
  const whole = el(
    "section",
    { "aria-label": `${label} and its answer` },
    field(label, model),
    el("h3", {}, "Answer"), answer, trouble, figures,
    el("h3", {}, "On the wire"), raw,
    el("details", {}, el("summary", {}, "curl"), copied(lines[0])),
    el("details", {}, el("summary", {}, "Python"), copied(lines[1])),
  );

  /** Ask; `way` and `told` are the playground's, `where` leads to the listener. */
  async function ask(way, told, where, signal) {
    const asked = { ...told, model: model.value.trim() };
    const path = where.prefix + way.path(asked);
    const body = way.body(asked);
    say(lines[0], curl(where.url + path, body, Boolean(told.key)));
    say(lines[1], httpx(where.url + path, body, Boolean(told.key)));
    for (const one of [answer, trouble]) say(one, "");
    raw.replaceChildren();
    const began = performance.now();
    const seen = { first: null, last: 0, pieces: 0, tokens: null };
    const since = () => (performance.now() - began) / 1000;
    function each(text, json) {
      const at = since();
      if (raw.childElementCount < MOST) raw.append(el("pre", {}, el("time", {}, `${at.toFixed(3)}  `), text));
      const said = textOf(json);
      if (said) {
        answer.append(said);
        seen.first ??= at;
        seen.last = at;
        seen.pieces += 1;
      }
      seen.tokens = tokensOf(json) ?? seen.tokens;
      if (errorOf(json)) say(trouble, errorOf(json));
      say(figures, shown(seen));
    }
    say(figures, "waiting …");
    let status = "";
    try {
      const code = await send(where.play + path, body, { key: told.key, signal, each });
      status = `status ${code} · `;
      if (code >= 400 && !trouble.textContent) say(trouble, "it was refused without a word");
    } catch (error) {
      say(trouble, signal.aborted ? "stopped" : `it was cut: ${error.message}`);
    }
    say(figures, `${status}${shown(seen)} · ${time(since())} in all`);
  }
  return { whole, ask };
}

function shown({ first, last, pieces, tokens }) {
  if (first === null) return "no text";
  const parts = [`first token ${time(first)}`];
  const number = tokens ?? pieces;
  if (pieces > 1 && last > first) parts.push(`${count((number - 1) / (last - first), 1)} tokens/s`);
  parts.push(`${number} ${tokens === null ? "pieces" : "tokens"}`);
  return parts.join(" · ");
}

/** A text, and a button that copies it; where a page may not, the text is selected. */
function copied(text) {
  const button = el("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
      say(button, "Copied");
    } catch {
      getSelection().selectAllChildren(text);
      say(button, "Selected");
    }
    setTimeout(() => say(button, "Copy"), 1500);
  });
  return el("div", {}, button, text);
}
