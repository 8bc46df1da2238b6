// Forms that send a prompt: listeners describe them in their /openapi.json as `x-prompt-form`.

import { headers } from "./api.js";

/**
 * The operations of a listener that take a prompt, each with its path, its form and the number of
 * its protocol on the listener. Throws if the listener does not describe them.
 */
export async function loadForms(number) {
  const response = await fetch(`/-/playground/${number}/openapi.json`, { headers: headers() });
  if (!response.ok) throw new Error(`status ${response.status}`);
  const { paths } = await response.json();
  return Object.entries(paths).flatMap(([path, { post }]) => {
    const form = post?.["x-prompt-form"];
    return form && countParameters(path) === (form.body.model ? 0 : 1) ? [{ path, mount: post["x-mount"], ...form }] : [];
  });
}

function countParameters(path) {
  return path.split("{").length - 1;
}

/** Whether a form takes a conversation. */
export function takesConversation(form) {
  return Object.values(form.body).some((value) => value === "$messages" || value === "$turns");
}

/** The path and the body of a request; `parameters` are the sampling parameters that were entered. */
export function fillForm(form, { model, prompt, system, turns, parameters, stream }) {
  const dialogue = [...turns, { role: "user", content: prompt }];
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...dialogue];
  const entered = { model, prompt, system: system || undefined, turns: dialogue, messages };
  const body = {};
  for (const [name, value] of Object.entries(form.body)) {
    const filled = typeof value === "string" && value.startsWith("$") ? entered[value.slice(1)] : value;
    if (filled !== undefined) body[name] = filled;
  }
  for (const [name, value] of Object.entries(parameters)) if (form.parameters[name]) setMember(body, form.parameters[name], value);
  if (form.stream_flag) setMember(body, form.stream_flag, stream);
  const path = form.path.replace(/\{\w+\}/, () => encodeURIComponent(model));
  return { path: stream ? path + (form.stream_suffix ?? "") : path, body };
}

/** Set a member, whose path has dots. */
function setMember(body, path, value) {
  const names = path.split(".");
  const last = names.pop();
  let parent = body;
  for (const name of names) parent = parent[name] ??= {};
  parent[last] = value;
}
