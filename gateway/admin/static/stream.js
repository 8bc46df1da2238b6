// An answer as it comes: the events of a stream, or one whole.

import { headers } from "./api.js";

/**
 * Send it, and tell `each` of every event: its text on the wire, and its JSON or null. Gives the
 * status. Throws what ends it early, also where `signal` does.
 */
export async function send(path, body, { key, signal, each }) {
  const given = headers({ "Content-Type": "application/json" });
  if (key) given["x-api-key"] = key;
  const answer = await fetch(path, { method: "POST", headers: given, body: JSON.stringify(body), signal });
  const streams = (answer.headers.get("Content-Type") ?? "").startsWith("text/event-stream");
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    rest += value;
    if (!streams) continue;
    const parts = rest.replaceAll("\r\n", "\n").split("\n\n");
    rest = parts.pop();
    for (const part of parts) each(part, jsonOf(part));
  }
  if (rest.trim()) each(rest, streams ? jsonOf(rest) : parsed(rest));
  return answer.status;
}

function jsonOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return parsed(lines.map((line) => line.slice(5)).join("\n"));
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
