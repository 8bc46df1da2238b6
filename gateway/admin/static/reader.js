// The API of each listener, from its /openapi.json.

import { headers } from "./api.js";
import { choice, el, field, setText } from "./dom.js";
import { formatExact, parseExact, resolve } from "./json.js";
import { tryForm } from "./try_it.js";

const VERBS = ["get", "put", "post", "delete", "patch", "head", "options"];
const MAX_LENGTH = 120;

/** The view. */
export function api() {
  const listener = choice([]);
  const search = el("input", { type: "search", placeholder: "Part of a path or protocol" });
  const list = el("div");
  const alert = el("p", { class: "bad", role: "alert" });
  let loadedUrls = "";
  let model = "";

  async function load() {
    list.replaceChildren();
    setText(alert, "");
    const response = await fetch(`/-/playground/${listener.selectedIndex}/openapi.json`, { headers: headers() });
    if (!response.ok) return setText(alert, `The listener responded with status ${response.status}.`);
    const document = parseExact(await response.text());
    list.replaceChildren(...operations(document, `/-/playground/${listener.selectedIndex}`, model));
    return filter();
  }
  function filter() {
    for (const one of list.children) one.hidden = !one.dataset.search.includes(search.value.toLowerCase());
  }
  listener.addEventListener("change", () => void load());
  search.addEventListener("input", filter);

  async function update(status) {
    const urls = status.listeners.map((one) => one.url).join();
    if (urls === loadedUrls) return;
    loadedUrls = urls;
    model = status.models.find((one) => one.name !== "*")?.name ?? "";
    listener.replaceChildren(...status.listeners.map((one) => el("option", {}, one.url)));
    await load();
  }
  const form = el("div", { class: "fields" }, field("Listener", listener), field("Search", search));
  return { element: el("div", {}, el("h2", {}, "API"), form, alert, list), update };
}

function operations(document, baseUrl, model) {
  return Object.entries(document.paths).flatMap(([path, item]) =>
    VERBS.filter((verb) => item[verb]).map((verb) => operation(document, path, item, verb, { baseUrl, model })),
  );
}

function operation(document, path, item, verb, where) {
  const details = item[verb];
  const parameters = [...(item.parameters ?? []), ...(details.parameters ?? [])];
  const tags = (details.tags ?? []).join(" ");
  return expandable(
    el("summary", {}, el("span", { class: "method" }, verb.toUpperCase()), el("code", {}, path), ` ${details.summary ?? ""} `, el("span", { class: "quiet" }, tags)),
    () => [
      details.description ? el("p", {}, details.description) : null,
      el("p", { class: "quiet" }, details.security ? "Requires a key." : "No key required."),
      tryForm(document, { ...where, path, verb, parameters, body: details.requestBody?.content }),
      ...section("Parameters", parameters.map((one) =>
        fieldOf(document, one.name, one.schema, one.required, `in ${one.in}`))),
      ...bodies(document, "Request", details.requestBody?.content),
      ...Object.entries(details.responses ?? {}).flatMap(([status, one]) =>
        bodies(document, `Response ${status}: ${one.description ?? ""}`, one.content)),
    ],
    { "data-search": `${verb} ${path} ${tags} ${details.summary ?? ""}`.toLowerCase() },
  );
}

function section(title, children) {
  return children.length ? [el("h3", {}, title), ...children] : [];
}

function bodies(document, title, content) {
  if (!content) return [el("h3", {}, title)];
  return Object.entries(content).flatMap(([kind, one]) => [
    el("h3", {}, `${title} `, el("code", {}, kind)),
    ...fieldsOf(document, one.schema),
  ]);
}

/** The fields and variants of a schema; nested ones are created when opened. */
function fieldsOf(document, definition) {
  const schema = resolve(document, definition);
  if (!schema) return [];
  const fields = Object.entries(schema.properties ?? {}).map(([name, one]) =>
    fieldOf(document, name, one, (schema.required ?? []).includes(name)));
  for (const one of [...(schema.anyOf ?? []), ...(schema.oneOf ?? []), ...(schema.allOf ?? [])]) {
    if (hasFields(document, one)) fields.push(expandable(el("summary", {}, `one of: ${nameOf(document, one)}`), () => fieldsOf(document, one)));
  }
  if (schema.items && hasFields(document, schema.items)) {
    fields.push(expandable(el("summary", {}, `items: ${nameOf(document, schema.items)}`), () => fieldsOf(document, schema.items)));
  }
  return fields;
}

function fieldOf(document, name, definition, required, more = "") {
  const schema = resolve(document, definition) ?? {};
  const line = [
    el("code", {}, name), " ",
    el("span", { class: "quiet" }, [typeOf(document, definition), required ? "required" : "", more].filter(Boolean).join(", ")),
    schema.description ? ` ${schema.description}` : null,
  ];
  return hasFields(document, definition)
    ? expandable(el("summary", {}, ...line.filter(Boolean)), () => fieldsOf(document, definition))
    : el("p", {}, ...line.filter(Boolean));
}

/** Whether a schema has fields to show. */
function hasFields(document, definition, depth = 0) {
  const schema = resolve(document, definition) ?? {};
  const each = [...(schema.anyOf ?? []), ...(schema.oneOf ?? []), ...(schema.allOf ?? []), ...(schema.items ? [schema.items] : [])];
  return Boolean(schema.properties) || (depth < 5 && each.some((one) => hasFields(document, one, depth + 1)));
}

function nameOf(document, definition) {
  const name = resolve(document, definition)?.properties;
  return name ? `object with ${Object.keys(name).slice(0, 3).join(", ")}` : typeOf(document, definition);
}

/** A short description of a schema's type. */
function typeOf(document, definition, depth = 0) {
  const schema = resolve(document, definition);
  if (!schema || depth > 3) return "…";
  if (schema.const !== undefined) return formatExact(schema.const);
  if (schema.enum) return truncate(schema.enum.map((one) => formatExact(one)).join(" | "));
  const variants = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (variants) return truncate([...new Set(variants.map((one) => typeOf(document, one, depth + 1)))].join(" | "));
  if (schema.items) return `array of ${typeOf(document, schema.items, depth + 1)}`;
  return [schema.type].flat().filter(Boolean).join(" | ") + range(schema);
}

function range(schema) {
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  if (low === undefined && high === undefined) return "";
  return ` from ${low ?? "…"} to ${high ?? "…"}`;
}

function truncate(text) {
  return text.length > MAX_LENGTH ? `${text.slice(0, MAX_LENGTH)} …` : text;
}

/** A details element whose content is created when it is opened. */
function expandable(summary, make, attributes = {}) {
  const element = el("details", attributes, summary);
  element.addEventListener("toggle", () => element.append(...make().filter(Boolean)), { once: true });
  return element;
}
