// Reads a response: the events of a stream, or one body.

import { headers, parseJson } from "./api.js";
import { formatExact } from "./json.js";

/**
 * Send a request and call `each` with the text and the JSON (or null) of every event. Returns the
 * status. Throws if the response is cut off or `signal` aborts it.
 */
export async function send(path, body, { key, signal, each }) {
  const requestHeaders = headers({ "Content-Type": "application/json" });
  if (key) requestHeaders["x-api-key"] = key;
  const response = await fetch(path, { method: "POST", headers: requestHeaders, body: formatExact(body), signal });
  const type = response.headers.get("Content-Type") ?? "";
  const isLines = type.startsWith("application/x-ndjson");
  const isStream = isLines || type.startsWith("text/event-stream");
  const parse = isLines ? parseJson : dataOf;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    buffer += value;
    if (!isStream) continue;
    const parts = buffer.replaceAll("\r\n", "\n").split(isLines ? "\n" : "\n\n");
    buffer = parts.pop();
    for (const part of parts) each(part, parse(part));
  }
  if (buffer.trim()) each(buffer, isStream ? parse(buffer) : parseJson(buffer));
  return response.status;
}

function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return parseJson(lines.map((line) => line.slice(5)).join("\n"));
}
