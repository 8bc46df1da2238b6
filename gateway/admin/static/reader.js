// What each listener takes and answers, read from its /openapi.json.

import { headers } from "./api.js";
import { choice, el, field, say } from "./dom.js";

const VERBS = ["get", "put", "post", "delete", "patch", "head", "options"];
const LONGEST = 120;

/** The view. */
export function api() {
  const listener = choice([]);
  const sought = el("input", { type: "search", placeholder: "part of a path or a protocol" });
  const list = el("div");
  const trouble = el("p", { class: "bad", role: "alert" });
  let shown = "";

  async function load() {
    list.replaceChildren();
    say(trouble, "");
    const answer = await fetch(`/-/playground/${listener.selectedIndex}/openapi.json`, { headers: headers() });
    if (!answer.ok) return say(trouble, `it answers with ${answer.status}`);
    const document = await answer.json();
    list.replaceChildren(...operations(document));
    return filter();
  }
  function filter() {
    for (const one of list.children) one.hidden = !one.dataset.sought.includes(sought.value.toLowerCase());
  }
  listener.addEventListener("change", () => void load());
  sought.addEventListener("input", filter);

  async function update(told) {
    const urls = told.listeners.map((one) => one.url).join();
    if (urls === shown) return;
    shown = urls;
    listener.replaceChildren(...told.listeners.map((one) => el("option", {}, one.url)));
    await load();
  }
  const form = el("div", { class: "fields" }, field("Listener", listener), field("Find", sought));
  return { whole: el("div", {}, el("h2", {}, "API"), form, trouble, list), update };
}

function operations(document) {
  return Object.entries(document.paths).flatMap(([path, item]) =>
    VERBS.filter((verb) => item[verb]).map((verb) => operation(document, path, item, verb)),
  );
}

function operation(document, path, item, verb) {
  const told = item[verb];
  const tags = (told.tags ?? []).join(" ");
  return later(
    el("summary", {}, el("span", { class: "method" }, verb.toUpperCase()), el("code", {}, path), ` ${told.summary ?? ""} `, el("span", { class: "quiet" }, tags)),
    () => [
      told.description ? el("p", {}, told.description) : null,
      el("p", { class: "quiet" }, told.security ? "With a key." : "Without a key."),
      ...section("Parameters", [...(item.parameters ?? []), ...(told.parameters ?? [])].map((one) =>
        fieldOf(document, one.name, one.schema, one.required, `in ${one.in}`))),
      ...bodies(document, "Takes", told.requestBody?.content),
      ...Object.entries(told.responses ?? {}).flatMap(([status, one]) =>
        bodies(document, `Answers ${status}: ${one.description ?? ""}`, one.content)),
    ],
    { "data-sought": `${verb} ${path} ${tags} ${told.summary ?? ""}`.toLowerCase() },
  );
}

function section(title, children) {
  return children.length ? [el("h3", {}, title), ...children] : [];
}

function bodies(document, title, content) {
  if (!content) return [el("h3", {}, title)];
  return Object.entries(content).flatMap(([kind, one]) => [
    el("h3", {}, `${title} `, el("code", {}, kind)),
    ...inside(document, one.schema),
  ]);
}

/** What is in a schema, where there is something; it is made when it is opened. */
function inside(document, given) {
  const schema = resolved(document, given);
  if (!schema) return [];
  const found = Object.entries(schema.properties ?? {}).map(([name, one]) =>
    fieldOf(document, name, one, (schema.required ?? []).includes(name)));
  for (const one of [...(schema.anyOf ?? []), ...(schema.oneOf ?? []), ...(schema.allOf ?? [])]) {
    if (parts(document, one)) found.push(later(el("summary", {}, `one of: ${named(document, one)}`), () => inside(document, one)));
  }
  if (schema.items && parts(document, schema.items)) {
    found.push(later(el("summary", {}, `each: ${named(document, schema.items)}`), () => inside(document, schema.items)));
  }
  return found;
}

function fieldOf(document, name, given, required, more = "") {
  const schema = resolved(document, given) ?? {};
  const line = [
    el("code", {}, name), " ",
    el("span", { class: "quiet" }, [typeOf(document, given), required ? "required" : "", more].filter(Boolean).join(", ")),
    schema.description ? ` ${schema.description}` : null,
  ];
  return parts(document, given)
    ? later(el("summary", {}, ...line.filter(Boolean)), () => inside(document, given))
    : el("p", {}, ...line.filter(Boolean));
}

/** Whether it is, or may be, an object whose fields can be shown. */
function parts(document, given, deep = 0) {
  const schema = resolved(document, given) ?? {};
  const each = [...(schema.anyOf ?? []), ...(schema.oneOf ?? []), ...(schema.allOf ?? []), ...(schema.items ? [schema.items] : [])];
  return Boolean(schema.properties) || (deep < 5 && each.some((one) => parts(document, one, deep + 1)));
}

function resolved(document, given) {
  let schema = given;
  for (let n = 0; schema?.$ref && n < 10; n += 1) {
    schema = schema.$ref.slice(2).split("/").reduce((node, name) => node?.[name.replaceAll("~1", "/").replaceAll("~0", "~")], document);
  }
  return schema;
}

function named(document, given) {
  const name = resolved(document, given)?.properties;
  return name ? `object with ${Object.keys(name).slice(0, 3).join(", ")}` : typeOf(document, given);
}

/** A schema's type, in a few words. */
function typeOf(document, given, deep = 0) {
  const schema = resolved(document, given);
  if (!schema || deep > 3) return "…";
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return cut(schema.enum.map((one) => JSON.stringify(one)).join(" | "));
  const several = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (several) return cut([...new Set(several.map((one) => typeOf(document, one, deep + 1)))].join(" | "));
  if (schema.items) return `array of ${typeOf(document, schema.items, deep + 1)}`;
  return [schema.type].flat().filter(Boolean).join(" | ") + range(schema);
}

function range(schema) {
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  if (low === undefined && high === undefined) return "";
  return ` from ${low ?? "…"} to ${high ?? "…"}`;
}

function cut(text) {
  return text.length > LONGEST ? `${text.slice(0, LONGEST)} …` : text;
}

/** What can be opened, and is made only then. */
function later(summary, make, given = {}) {
  const whole = el("details", given, summary);
  whole.addEventListener("toggle", () => whole.append(...make().filter(Boolean)), { once: true });
  return whole;
}
