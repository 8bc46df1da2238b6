// Which view is shown, and the key that the admin listener may want first.

import { ask, Refused, remember } from "./api.js";
import { api } from "./reader.js";
import { config } from "./config.js";
import { el, field, say, time } from "./dom.js";
import { playground } from "./playground.js";
import { requests } from "./requests.js";
import { status } from "./status.js";

const VIEWS = { status, requests, playground, config, api };
const EVERY = 1000;
const view = document.getElementById("view");
const state = document.getElementById("state");
const made = new Map();
let told = null;
let timer = 0;
let turn = 0;

function name() {
  const asked = location.hash.slice(1);
  return asked in VIEWS ? asked : "status";
}

/** Show the view that the address names; each is made once, and keeps what was typed into it. */
function show() {
  const now = name();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${now}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!made.has(now)) made.set(now, VIEWS[now](told));
  view.replaceChildren(made.get(now).whole);
  void look();
}

/** Look now, and again once a second while somebody sees the page; of several who look, the last. */
async function look() {
  clearTimeout(timer);
  const mine = ++turn;
  try {
    if (!document.hidden) await refresh();
  } catch (error) {
    if (error instanceof Refused && error.status === 401) return askForKey();
    say(state, `The gateway does not answer: ${error.message}`);
  }
  if (mine === turn) timer = setTimeout(look, EVERY);
}

async function refresh() {
  told = await ask("/-/status");
  const parts = [`version ${told.version}`, `up ${time(told.uptime)}`, `${told.running} running`];
  if (told.processes > 1) parts.push(`${told.processes} processes`);
  if (told.draining) parts.push("draining");
  say(state, parts.join(" · "));
  await made.get(name())?.update?.(told);
}

function askForKey() {
  const key = el("input", { type: "password", autocomplete: "off", required: true });
  const form = el(
    "form",
    { class: "fields", onsubmit: (event) => { event.preventDefault(); remember(key.value); show(); } },
    field("The admin listener's key", key),
    el("div", { class: "buttons wide" }, el("button", { class: "main" }, "Go on")),
  );
  say(state, "A key is needed");
  view.replaceChildren(form);
  key.focus();
}

addEventListener("hashchange", show);
addEventListener("acted", () => void look());
document.addEventListener("visibilitychange", () => void look());
show();
