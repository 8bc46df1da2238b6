// A response in the playground: its text and events as they arrive, and its timing.

import { copyable, count, el, field, setText, time } from "./dom.js";
import { fillForm, takesConversation } from "./prompt_form.js";
import { errorOf, textOf, tokensOf } from "./response_text.js";
import { curl, pythonProgram } from "./snippets.js";
import { send } from "./stream.js";

const MAX_EVENTS = 2000;

/**
 * The panel of one model. `names` is the id of the list of models; `keep` gets the response if the
 * conversation goes on from it.
 */
export function responsePanel(label, names, initialModel, keep) {
  const model = el("input", { list: names, value: initialModel, autocomplete: "off", spellcheck: "false" });
  const output = el("pre", { class: "output", tabindex: "0", role: "log", "aria-label": `${label}: response` });
  const alert = el("p", { class: "bad", role: "alert" });
  const timing = el("p", { class: "quiet" }, "–");
  const events = el("div", { class: "events", tabindex: "0", role: "group", "aria-label": `${label}: events` });
  const reply = el("button", { type: "button", hidden: true, onclick: () => keep(output.textContent) }, "Continue from this response");
  const snippets = [el("pre", { tabindex: "0" }), el("pre", { tabindex: "0" })];
  const element = el(
    "section",
    { "aria-label": `${label} and its response` },
    field(label, model),
    el("h3", {}, "Response"), output, alert,
    el("div", { class: "buttons" }, timing, reply),
    el("details", {}, el("summary", {}, "curl"), copyable(snippets[0])),
    el("details", {}, el("summary", {}, "Python"), copyable(snippets[1])),
    el("h3", {}, "Events"), events,
  );

  /** Send a request to an operation of a listener. */
  async function sendRequest(target, input, signal) {
    const { path, body } = fillForm(target.form, { ...input, model: model.value.trim() });
    setText(snippets[0], curl(target.url + path, body, Boolean(input.key)));
    setText(snippets[1], pythonProgram(target, path, body, Boolean(input.key)));
    reply.hidden = true;
    for (const one of [output, alert]) setText(one, "");
    events.replaceChildren();
    const startedAt = performance.now();
    const progress = { first: null, last: 0, chunks: 0, tokens: null };
    const elapsed = () => (performance.now() - startedAt) / 1000;
    function each(text, json) {
      const at = elapsed();
      if (events.childElementCount < MAX_EVENTS) events.append(el("pre", {}, el("time", {}, `${at.toFixed(3)}  `), text));
      const content = textOf(json);
      if (content) {
        output.append(content);
        progress.first ??= at;
        progress.last = at;
        progress.chunks += 1;
      }
      progress.tokens = tokensOf(json) ?? progress.tokens;
      if (errorOf(json)) setText(alert, errorOf(json));
      setText(timing, describe(progress));
    }
    setText(timing, "waiting …");
    let status = "";
    try {
      const code = await send(target.baseUrl + path, body, { key: input.key, signal, each });
      status = `status ${code} · `;
      if (code >= 400 && !alert.textContent) setText(alert, "the request was rejected without a message");
    } catch (error) {
      setText(alert, signal.aborted ? "stopped" : `the response was cut off: ${error.message}`);
    }
    setText(timing, `${status}${describe(progress)} · ${time(elapsed())} in total`);
    reply.hidden = !takesConversation(target.form) || !output.textContent;
  }
  return { element, send: sendRequest };
}

function describe({ first, last, chunks, tokens }) {
  if (first === null) return "no text";
  const parts = [`first token ${time(first)}`];
  const number = tokens ?? chunks;
  if (chunks > 1 && last > first) parts.push(`${count((number - 1) / (last - first), 1)} tokens/s`);
  parts.push(`${number} ${tokens === null ? "chunks" : "tokens"}`);
  return parts.join(" · ");
}
