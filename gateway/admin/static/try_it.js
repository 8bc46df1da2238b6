// A form that sends a request to an endpoint of the API, and shows the response as it was sent.

import { headers } from "./api.js";
import { el, field, setText, time } from "./dom.js";
import { formatExact, resolve } from "./json.js";

const MAX_TEXT = 1 << 20;
const JSON_TYPE = "application/json";

/** The form of one operation; `model` is the name of a model that can be tried. */
export function tryForm(document, { baseUrl, model, path, verb, parameters, body }) {
  const fillable = parameters.map((one) => resolve(document, one)).filter((one) => one.in === "path" || one.in === "query");
  const inputs = fillable.map((one) => ({ ...one, input: el("input", { required: one.in === "path", autocomplete: "off", spellcheck: "false" }) }));
  for (const one of inputs) if (one.in === "path" && /^model(_name)?$/.test(one.name)) one.input.value = model;
  const key = el("input", { type: "password", autocomplete: "off" });
  const schema = body?.[JSON_TYPE]?.schema;
  const text = schema ? el("textarea", { rows: "6", spellcheck: "false", class: "code" }) : null;
  if (text) text.value = formatExact(withModel(example(document, schema), model), 2);
  const timing = el("p", { class: "quiet", role: "status" });
  const output = el("pre", { class: "output", tabindex: "0", hidden: true, "aria-label": "Response" });
  let running = null;

  async function send(event) {
    event.preventDefault();
    running?.abort();
    const { signal } = (running = new AbortController());
    const startedAt = performance.now();
    output.hidden = false;
    setText(output, "");
    setText(timing, "waiting …");
    try {
      const response = await fetch(baseUrl + fill(path, inputs), {
        method: verb.toUpperCase(),
        headers: headers({ ...(key.value ? { "x-api-key": key.value } : {}), ...(text ? { "Content-Type": JSON_TYPE } : {}) }),
        body: text?.value,
        signal,
      });
      await show(response, output);
      setText(timing, `status ${response.status} · ${response.headers.get("Content-Type") ?? "no content"} · ${time((performance.now() - startedAt) / 1000)} in total`);
    } catch (error) {
      if (!signal.aborted) setText(timing, `no response: ${error.message}`);
    }
  }
  const form = el(
    "form", { class: "fields", onsubmit: (event) => void send(event) },
    ...inputs.map((one) => field(one.name, one.input)),
    field("API key (if required)", key),
    text ? field("Body", text, "wide") : null,
    el("div", { class: "buttons wide" }, el("button", { class: "main" }, "Send")),
  );
  return el("section", { class: "try", "aria-label": `Try ${verb.toUpperCase()} ${path}` }, el("h3", {}, "Try it"), form, timing, output);
}

/** The path with its parameters and query. */
function fill(path, inputs) {
  const query = new URLSearchParams();
  let filled = path;
  for (const one of inputs) {
    if (one.in === "path") filled = filled.replace(`{${one.name}}`, () => encodeURIComponent(one.input.value));
    else if (one.input.value) query.set(one.name, one.input.value);
  }
  return filled + (query.size ? `?${query}` : "");
}

/** Show the body as it arrives, up to a limit. */
async function show(response, output) {
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  let size = 0;
  for (let part; reader && !(part = await reader.read()).done;) {
    if (size > MAX_TEXT) continue;
    size += part.value.length;
    output.append(part.value);
  }
}

/** A body with the name of the model, if it has one. */
function withModel(body, model) {
  return typeof body?.model === "string" && model ? { ...body, model } : body;
}

/** Whether a schema is that of a user's message. */
function isUsers(document, definition) {
  const role = resolve(document, definition)?.properties?.role;
  return role?.const === "user" || Boolean(role?.enum?.includes("user"));
}

/** A small value that fits a schema: its example or default, or its required fields. */
function example(document, definition, depth = 0) {
  const schema = resolve(document, definition) ?? {};
  for (const name of ["example", "default", "const"]) if (schema[name] !== undefined) return schema[name];
  if (schema.examples?.length) return schema.examples[0];
  if (schema.enum) return schema.enum[0];
  const variants = schema.anyOf ?? schema.oneOf;
  if (variants && !schema.properties && depth < 6) return example(document, variants.find((one) => isUsers(document, one)) ?? variants[0], depth + 1);
  if (schema.allOf && depth < 6) return Object.assign({}, ...schema.allOf.map((one) => example(document, one, depth + 1)));
  const type = [schema.type].flat()[0];
  if (schema.properties && depth < 6) {
    const required = Object.keys(schema.properties).filter((name) => schema.required?.includes(name));
    return Object.fromEntries(required.map((name) => [name, example(document, schema.properties[name], depth + 1)]));
  }
  if (type === "array") return schema.items && depth < 6 ? [example(document, schema.items, depth + 1)] : [];
  if (type === "object") return {};
  if (type === "integer" || type === "number") return schema.minimum ?? 1;
  if (type === "boolean") return false;
  return "text";
}
