// Sends a prompt in any protocol of a listener to one model or to two side by side.

import { responsePanel } from "./response_panel.js";
import { choice, el, field, redraw, setText } from "./dom.js";
import { parseNumber } from "./json.js";
import { loadForms, takesConversation } from "./prompt_form.js";

const NAMES = "models";

/** The forms of a listener; of several paths of one operation the first. */
async function loadTargets(listener, number, isOnlyOne) {
  const targets = (await loadForms(number)).map((form) => ({
    form,
    url: reachable(listener.url),
    baseUrl: `/-/playground/${number}`,
    text: describe(form, listener.protocols[form.mount]) + (isOnlyOne ? "" : ` at ${listener.url}`),
  }));
  return targets.filter((one, index) => targets.findIndex((other) => other.text === one.text) === index);
}

/** What a form is called: its protocol, the profile and the prefix of this, and its operation. */
function describe(form, { name, profile, prefix }) {
  return [name, profile, form.label, prefix && `below ${prefix}`].filter(Boolean).join(" · ");
}

/** Replace a wildcard address by the host of this page. */
function reachable(url) {
  return url.replace(/\/\/(0\.0\.0\.0|\[::\]):/, `//${location.hostname}:`);
}

/** The models by their public names, and then the versions of those that have several. */
function listModels(status) {
  const chat = status.models.filter((model) => model.task === "chat" && model.name !== "*");
  const pinned = chat.filter((model) => model.versions.length > 1);
  return [...chat.map((model) => model.name), ...pinned.flatMap((model) => model.versions.map((one) => `${model.name}@${one.name}`))];
}

/** A field of a sampling parameter; the note is its name in the protocol. */
function parameter(label, inputmode, value = "") {
  const input = el("input", { type: "text", inputmode, value, autocomplete: "off", spellcheck: "false" });
  const note = el("code", { class: "quiet" });
  return { input, note, element: el("label", {}, el("span", {}, label, " ", note), input) };
}

/** The earlier turns of the conversation, which can be edited. */
function conversation() {
  const list = el("ol", { class: "turns" });
  const element = el("div", { class: "wide", hidden: true }, el("h3", {}, "Conversation"), list);
  const clear = el("button", { type: "button" }, "New conversation");
  clear.addEventListener("click", () => {
    list.replaceChildren();
    element.hidden = true;
  });
  element.append(el("div", { class: "buttons" }, clear));
  function add(role, content) {
    const name = { user: "User", assistant: "Assistant" }[role];
    const text = el("textarea", { rows: "2", "aria-label": `${name}, turn ${list.childElementCount + 1}` });
    text.value = content;
    list.append(el("li", { "data-role": role }, el("span", { class: "quiet" }, name), text));
    element.hidden = false;
  }
  const turns = () => [...list.children].map((one) => ({ role: one.dataset.role, content: one.querySelector("textarea").value }));
  return { element, add, turns };
}

/** The view. */
export function playground() {
  const names = el("datalist", { id: NAMES });
  const protocol = choice([]);
  const system = el("textarea", { rows: "2" });
  const prompt = el("textarea", { "aria-describedby": "enter", required: true, rows: "4" }, "Write a short sentence.");
  const stream = el("input", { type: "checkbox", checked: true });
  const compare = el("input", { type: "checkbox" });
  const key = el("input", { type: "password", autocomplete: "off" });
  const sampling = {
    max_tokens: parameter("Max tokens", "numeric", "128"),
    temperature: parameter("Temperature", "decimal"),
    top_p: parameter("Top p", "decimal"),
    seed: parameter("Seed", "numeric"),
  };
  const sendButton = el("button", { class: "main" }, "Send");
  const stopButton = el("button", { type: "button", disabled: true }, "Stop");
  const columns = el("div", { class: "columns" });
  const earlier = conversation();
  const systemField = field("System", system, "wide");
  let panels = [];
  let targets = [];
  let loadedListeners = "";
  let running = null;

  async function run() {
    running?.abort();
    const controller = (running = new AbortController());
    const target = targets[protocol.selectedIndex];
    if (!target) return;
    const isChat = takesConversation(target.form);
    const input = {
      prompt: prompt.value, stream: stream.checked, key: key.value, parameters: enteredParameters(),
      system: isChat ? system.value : "", turns: isChat ? earlier.turns() : [],
    };
    stopButton.disabled = false;
    await Promise.all(shownPanels().map((one) => one.send(target, input, controller.signal)));
    if (running === controller) stopButton.disabled = true;
  }
  /** The sampling parameters that were entered. */
  function enteredParameters() {
    const entered = Object.entries(sampling).filter(([, one]) => one.input.value.trim() !== "");
    return Object.fromEntries(entered.map(([name, one]) => [name, parseNumber(one.input.value) ?? one.input.value]));
  }
  /** Go on from a response: the prompt and the response become turns. */
  function keep(response) {
    earlier.add("user", prompt.value);
    earlier.add("assistant", response);
    prompt.value = "";
    prompt.focus();
  }
  const shownPanels = () => panels.slice(0, compare.checked ? 2 : 1);
  const showPanels = () => columns.replaceChildren(...shownPanels().map((one) => one.element));

  /** Show what the selected form takes. */
  function showFields() {
    const form = targets[protocol.selectedIndex]?.form;
    if (!form) return;
    const isChat = takesConversation(form);
    systemField.hidden = !isChat;
    earlier.element.hidden = !isChat || !earlier.turns().length;
    for (const [name, one] of Object.entries(sampling)) {
      const wire = form.parameters[name]?.split(".").pop();
      one.element.hidden = !wire;
      setText(one.note, wire ?? "");
    }
  }
  const form = el(
    "form",
    { class: "fields", onsubmit: (event) => { event.preventDefault(); void run(); } },
    field("Protocol", protocol, "wide"),
    systemField,
    earlier.element,
    field("Prompt", prompt, "wide"),
    ...Object.values(sampling).map((one) => one.element),
    field("API key (if required)", key, "wide"),
    el("div", { class: "buttons wide" }, el("label", { class: "check" }, stream, "Stream"), el("label", { class: "check" }, compare, "Compare two models")),
    el("div", { class: "buttons wide" }, sendButton, stopButton, el("span", { id: "enter", class: "quiet" }, "Enter sends, Shift+Enter starts a new line")),
  );
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  compare.addEventListener("change", showPanels);
  protocol.addEventListener("change", showFields);
  stopButton.addEventListener("click", () => running?.abort());

  /** Load the forms again if the listeners have changed, or if one did not answer. */
  async function updateForms(status) {
    const listeners = JSON.stringify(status.listeners);
    if (listeners === loadedListeners) return;
    const isOnlyOne = status.listeners.length === 1;
    const loaded = await Promise.allSettled(status.listeners.map((listener, number) => loadTargets(listener, number, isOnlyOne)));
    loadedListeners = loaded.every((one) => one.status === "fulfilled") ? listeners : "";
    targets = loaded.flatMap((one) => one.value ?? []);
    const selected = protocol.value;
    protocol.replaceChildren(...targets.map((one) => el("option", {}, one.text)));
    if (targets.some((one) => one.text === selected)) protocol.value = selected;
    showFields();
  }
  async function update(status) {
    const models = listModels(status);
    redraw(names, models, () => models.map((value) => el("option", { value })));
    if (!panels.length) {
      const second = models.find((one) => one.includes("@")) ?? models[1] ?? models[0] ?? "";
      panels = [responsePanel("Model", NAMES, models[0] ?? "", keep), responsePanel("Second model", NAMES, second, keep)];
      showPanels();
    }
    await updateForms(status);
  }
  const element = el("div", { class: "workbench" }, el("h2", {}, "Playground"), names, form, columns);
  return { element, update };
}
