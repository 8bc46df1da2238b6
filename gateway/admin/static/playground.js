// Sends a prompt in any protocol of a listener to one model or to two side by side.

import { responsePanel } from "./response_panel.js";
import { ENDPOINTS } from "./protocols.js";
import { choice, el, field } from "./dom.js";

const NAMES = "models";

/** The endpoints of all listeners. */
function listEndpoints(status) {
  return status.listeners.flatMap((listener, number) =>
    listener.protocols.flatMap((protocol) =>
      (ENDPOINTS[protocol.name]?.(protocol.profile) ?? []).map((endpoint) => ({
        endpoint,
        prefix: protocol.prefix,
        url: reachable(listener.url),
        play: `/-/playground/${number}`,
        text: [protocol.name, protocol.profile, endpoint.label, protocol.prefix && `below ${protocol.prefix}`].filter(Boolean).join(" · ")
          + (status.listeners.length > 1 ? ` at ${listener.url}` : ""),
      })),
    ),
  );
}

/** Replace a wildcard address by the host of this page. */
function reachable(url) {
  return url.replace(/\/\/(0\.0\.0\.0|\[::\]):/, `//${location.hostname}:`);
}

function listModels(status) {
  return status.models
    .filter((model) => model.task === "chat")
    .flatMap((model) => [model.name, ...(model.versions.length > 1 ? model.versions.map((one) => `${model.name}@${one.name}`) : [])]);
}

function number(label, attributes) {
  const input = el("input", { type: "number", inputmode: "decimal", ...attributes });
  return { label, input };
}

/** The view. */
export function playground() {
  const names = el("datalist", { id: NAMES });
  const protocol = choice([]);
  const prompt = el("textarea", { "aria-describedby": "enter", required: true }, "Write a short sentence.");
  const stream = el("input", { type: "checkbox", checked: true });
  const compare = el("input", { type: "checkbox" });
  const key = el("input", { type: "password", autocomplete: "off" });
  const sampling = {
    max_tokens: number("Max tokens", { min: "1", step: "1", value: "128" }),
    temperature: number("Temperature", { min: "0", max: "2", step: "any" }),
    top_p: number("Top p", { min: "0", max: "1", step: "any" }),
    seed: number("Seed", { step: "1" }),
  };
  const sendButton = el("button", { class: "main" }, "Send");
  const stopButton = el("button", { type: "button", disabled: true }, "Stop");
  const columns = el("div", { class: "columns" });
  let panels = [];
  let endpoints = [];
  let running = null;

  async function run() {
    running?.abort();
    const controller = (running = new AbortController());
    const target = endpoints[protocol.selectedIndex];
    const input = { prompt: prompt.value, stream: stream.checked, key: key.value, sampling: samplingParameters };
    stopButton.disabled = false;
    await Promise.all(panels.slice(0, compare.checked ? 2 : 1).map((one) => one.send(target, input, controller.signal)));
    if (running === controller) stopButton.disabled = true;
  }
  /** The sampling parameters that were entered, by the protocol's names. */
  function samplingParameters(wire) {
    const entered = Object.entries(sampling).filter(([, one]) => one.input.value !== "");
    return Object.fromEntries(entered.map(([name, one]) => [wire[name], Number(one.input.value)]));
  }
  function showPanels() {
    columns.replaceChildren(...panels.slice(0, compare.checked ? 2 : 1).map((one) => one.element));
  }
  const form = el(
    "form",
    { class: "fields", onsubmit: (event) => { event.preventDefault(); void run(); } },
    field("Protocol", protocol, "wide"),
    field("Prompt", prompt, "wide"),
    ...Object.values(sampling).map((one) => field(one.label, one.input)),
    field("API key (if required)", key),
    el("label", { class: "check" }, stream, "Stream"),
    el("label", { class: "check" }, compare, "Compare two models"),
    el("div", { class: "buttons wide" }, sendButton, stopButton, el("span", { id: "enter", class: "quiet" }, "Enter sends, Shift+Enter starts a new line")),
  );
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  compare.addEventListener("change", showPanels);
  stopButton.addEventListener("click", () => running?.abort());

  function update(status) {
    const current = listEndpoints(status);
    if (JSON.stringify(current.map((one) => [one.text, one.url])) !== JSON.stringify(endpoints.map((one) => [one.text, one.url]))) {
      protocol.replaceChildren(...current.map((one) => el("option", {}, one.text)));
      endpoints = current;
    }
    const models = listModels(status);
    if (models.join() !== [...names.children].map((one) => one.value).join()) {
      names.replaceChildren(...models.map((value) => el("option", { value })));
    }
    if (!panels.length) {
      const versions = models.filter((one) => one.includes("@"));
      panels = [responsePanel("Model", NAMES, versions[0] ?? models[0] ?? ""), responsePanel("Second model", NAMES, versions[1] ?? models[1] ?? models[0] ?? "")];
      showPanels();
    }
  }
  const element = el("div", {}, el("h2", {}, "Playground"), names, form, columns);
  return { element, update };
}
