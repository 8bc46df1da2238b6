// Shows the selected view, and asks for the admin key if one is required.

import { ApiError, fetchJson, storeKey, storeLinkedKey } from "./api.js";
import { api } from "./reader.js";
import { config } from "./config.js";
import { experiments } from "./experiments.js";
import { el, field, setText, time } from "./dom.js";
import { playground } from "./playground.js";
import { requests } from "./requests.js";
import { status } from "./status.js";
import { usage } from "./usage.js";

const VIEWS = { status, requests, usage, experiments, playground, config, api };
const REFRESH_INTERVAL = 1000;
const view = document.getElementById("view");
const state = document.getElementById("state");
const views = new Map();
let gatewayStatus = null;
let timer = 0;
let polls = 0;

function currentView() {
  const name = location.hash.slice(1).split("/")[0];
  return Object.hasOwn(VIEWS, name) ? name : "status";
}

/** Show the view of the URL's hash. Each view is created once and keeps its input. */
function show() {
  const current = currentView();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${current}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!views.has(current)) views.set(current, VIEWS[current](gatewayStatus));
  const { element } = views.get(current);
  if (view.firstChild !== element) view.replaceChildren(element);
  void poll();
}

/** Refresh now, and once a second while the page is visible; only the last call continues. */
async function poll() {
  clearTimeout(timer);
  const number = ++polls;
  try {
    if (!document.hidden) await refresh();
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) return askForKey();
    setText(state, `The gateway does not respond: ${error.message}`);
  }
  if (number === polls) timer = setTimeout(poll, REFRESH_INTERVAL);
}

async function refresh() {
  gatewayStatus = await fetchJson("/-/status");
  const parts = [`version ${gatewayStatus.version}`, `up ${time(gatewayStatus.uptime)}`, `${gatewayStatus.running} running`];
  if (gatewayStatus.processes > 1) parts.push(`${gatewayStatus.processes} processes`);
  if (gatewayStatus.draining) parts.push("draining");
  setText(state, parts.join(" · "));
  await views.get(currentView())?.update?.(gatewayStatus);
}

function askForKey() {
  const key = el("input", { type: "password", autocomplete: "off", required: true });
  const form = el(
    "form",
    { class: "fields", onsubmit: (event) => { event.preventDefault(); storeKey(key.value); show(); } },
    field("Admin key", key),
    el("div", { class: "buttons wide" }, el("button", { class: "main" }, "Sign in")),
  );
  setText(state, "Admin key required");
  view.replaceChildren(form);
  key.focus();
}

addEventListener("hashchange", show);
addEventListener("keyrequired", askForKey);
addEventListener("changed", () => void poll());
document.addEventListener("visibilitychange", () => void poll());
storeLinkedKey();
show();
