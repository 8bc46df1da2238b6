// One prompt, in any protocol that a listener mounts, to one target or to two side by side.

import { responsePanel } from "./response_panel.js";
import { WAYS } from "./protocols.js";
import { choice, el, field } from "./dom.js";

const NAMES = "models";

/** Every way to ask that the listeners have: [its place as text, what it is]. */
function ways(told) {
  return told.listeners.flatMap((listener, number) =>
    listener.protocols.flatMap((one) =>
      (WAYS[one.name]?.(one.profile) ?? []).map((way) => ({
        way,
        prefix: one.prefix,
        url: reachable(listener.url),
        play: `/-/playground/${number}`,
        text: [one.name, one.profile, way.label, one.prefix && `below ${one.prefix}`].filter(Boolean).join(" · ")
          + (told.listeners.length > 1 ? ` at ${listener.url}` : ""),
      })),
    ),
  );
}

/** A listener on every address is asked at the one by which this page is. */
function reachable(url) {
  return url.replace(/\/\/(0\.0\.0\.0|\[::\]):/, `//${location.hostname}:`);
}

function targets(told) {
  return told.models
    .filter((model) => model.task === "chat")
    .flatMap((model) => [model.name, ...(model.versions.length > 1 ? model.versions.map((one) => `${model.name}@${one.name}`) : [])]);
}

function number(label, given) {
  const input = el("input", { type: "number", inputmode: "decimal", ...given });
  return { label, input };
}

/** The view. */
export function playground() {
  const names = el("datalist", { id: NAMES });
  const protocol = choice([]);
  const prompt = el("textarea", { "aria-describedby": "enter", required: true }, "Say something in a few words.");
  const stream = el("input", { type: "checkbox", checked: true });
  const two = el("input", { type: "checkbox" });
  const key = el("input", { type: "password", autocomplete: "off" });
  const sampling = {
    max_tokens: number("Most tokens", { min: "1", step: "1", value: "128" }),
    temperature: number("Temperature", { min: "0", max: "2", step: "any" }),
    top_p: number("Top p", { min: "0", max: "1", step: "any" }),
    seed: number("Seed", { step: "1" }),
  };
  const go = el("button", { class: "main" }, "Send");
  const stop = el("button", { type: "button", disabled: true }, "Stop");
  const columns = el("div", { class: "columns" });
  let panels = [];
  let found = [];
  let running = null;

  async function run() {
    running?.abort();
    const mine = (running = new AbortController());
    const where = found[protocol.selectedIndex];
    const told = { prompt: prompt.value, stream: stream.checked, key: key.value, sampling: said };
    stop.disabled = false;
    await Promise.all(panels.slice(0, two.checked ? 2 : 1).map((one) => one.ask(where.way, told, where, mine.signal)));
    if (running === mine) stop.disabled = true;
  }
  /** What was typed of the sampling, by the protocol's own names. */
  function said(wire) {
    const given = Object.entries(sampling).filter(([, one]) => one.input.value !== "");
    return Object.fromEntries(given.map(([name, one]) => [wire[name], Number(one.input.value)]));
  }
  function arrange() {
    columns.replaceChildren(...panels.slice(0, two.checked ? 2 : 1).map((one) => one.whole));
  }
  const form = el(
    "form",
    { class: "fields", onsubmit: (event) => { event.preventDefault(); void run(); } },
    field("Protocol", protocol, "wide"),
    field("Prompt", prompt, "wide"),
    ...Object.values(sampling).map((one) => field(one.label, one.input)),
    field("API key, if the gateway wants one", key),
    el("label", { class: "check" }, stream, "Stream"),
    el("label", { class: "check" }, two, "Two side by side"),
    el("div", { class: "buttons wide" }, go, stop, el("span", { id: "enter", class: "quiet" }, "Enter sends, Shift+Enter begins a line")),
  );
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  two.addEventListener("change", arrange);
  stop.addEventListener("click", () => running?.abort());

  function update(told) {
    const now = ways(told);
    if (JSON.stringify(now.map((one) => [one.text, one.url])) !== JSON.stringify(found.map((one) => [one.text, one.url]))) {
      protocol.replaceChildren(...now.map((one) => el("option", {}, one.text)));
      found = now;
    }
    const known = targets(told);
    if (known.join() !== [...names.children].map((one) => one.value).join()) {
      names.replaceChildren(...known.map((value) => el("option", { value })));
    }
    if (!panels.length) {
      const pair = known.filter((one) => one.includes("@"));
      panels = [responsePanel("Model", NAMES, pair[0] ?? known[0] ?? ""), responsePanel("Second model", NAMES, pair[1] ?? known[1] ?? known[0] ?? "")];
      arrange();
    }
  }
  const whole = el("div", {}, el("h2", {}, "Playground"), names, form, columns);
  return { whole, update };
}
