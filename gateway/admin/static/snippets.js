// The request as a shell command and as a Python program.

import { formatExact } from "./json.js";

/** Quote a word for a POSIX shell. */
function quote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** Escape a character for Python. */
function escape(character) {
  const digits = character.codePointAt(0).toString(16);
  return digits.length > 4 ? `\\U${digits.padStart(8, "0")}` : `\\u${digits.padStart(4, "0")}`;
}

/** Write a value as a Python literal. */
function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "bigint") return String(value);
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([key, item]) => `${python(key)}: ${python(item)}`).join(", ")}}`;
  }
  // A JSON string in ASCII is a Python string with the same meaning.
  return JSON.stringify(value).replace(/[^\x20-\x7e]/gu, escape);
}

/** A curl command; the key is taken from the environment. */
export function curl(url, body, hasKey) {
  const key = hasKey ? ' -H "Authorization: Bearer $API_KEY"' : "";
  return `curl -sN ${quote(url)} -H 'Content-Type: application/json'${key} -d ${quote(formatExact(body))}`;
}

/** A Python program with the SDK of the protocol, or with httpx where it has none. */
export function pythonProgram(target, path, body, hasKey) {
  const { sdk } = target.form;
  const url = target.url + path;
  return sdk ? sdkProgram(sdk, url.slice(0, -sdk.path.length), body, hasKey) : httpx(url, body, hasKey);
}

/** The keyword arguments of a call. */
function keywords(body) {
  return Object.entries(body).map(([name, value]) => `    ${name}=${python(value)},`);
}

function program(imports, hasKey, lines) {
  return [...(hasKey ? ["import os", ""] : []), ...imports, "", ...lines].join("\n");
}

const KEY = 'os.environ["API_KEY"]';

/** A call with the client library that the form describes. */
function sdkProgram(sdk, url, body, hasKey) {
  const client = (hasKey ? sdk.client : sdk.keyless_client).replace("{url}", () => python(url)).replace("{key}", () => KEY);
  return program([sdk.imports], hasKey, [
    `client = ${client}`,
    `response = client.${sdk.method}(`,
    ...keywords(body),
    ")",
    ...(body.stream ? sdk.streamed : sdk.whole),
  ]);
}

function httpx(url, body, hasKey) {
  const key = hasKey ? ', headers={"Authorization": f"Bearer {os.environ[\'API_KEY\']}"}' : "";
  return program(["import httpx"], hasKey, [
    `body = ${python(body)}`,
    `with httpx.stream("POST", ${python(url)}, json=body, timeout=None${key}) as response:`,
    "    for line in response.iter_lines():",
    "        print(line)",
  ]);
}
