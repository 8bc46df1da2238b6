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

/** A Python program with the SDK of the endpoint's protocol, or with httpx where it has none. */
export function pythonProgram(target, path, body, hasKey) {
  const { sdk } = target.endpoint;
  const root = target.url + target.prefix;
  return sdk ? SDKS[sdk.name](sdk, root, body, hasKey) : httpx(target.url + path, body, hasKey);
}

/** The keyword arguments of a call. */
function keywords(body) {
  return Object.entries(body).map(([name, value]) => `    ${name}=${python(value)},`);
}

function program(imports, hasKey, lines) {
  return [...(hasKey ? ["import os", ""] : []), ...imports, "", ...lines].join("\n");
}

const KEY = 'os.environ["API_KEY"]';
const SDKS = {
  openai(sdk, root, body, hasKey) {
    const isChat = sdk.method.startsWith("chat");
    const streamed = isChat ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
    const whole = isChat ? "response.choices[0].message.content" : "response.choices[0].text";
    return program(["from openai import OpenAI"], hasKey, [
      `client = OpenAI(base_url=${python(root + sdk.base)}, api_key=${hasKey ? KEY : '"unused"'})`,
      `response = client.${sdk.method}(`,
      ...keywords(body),
      ")",
      ...(body.stream
        ? ["for chunk in response:", "    if chunk.choices:", `        print(${streamed} or "", end="", flush=True)`, "print()"]
        : [`print(${whole})`]),
    ]);
  },
  anthropic(sdk, root, body, hasKey) {
    return program(["from anthropic import Anthropic"], hasKey, [
      `client = Anthropic(base_url=${python(root)}, api_key=${hasKey ? KEY : '"unused"'})`,
      `response = client.${sdk.method}(`,
      ...keywords(body),
      ")",
      ...(body.stream
        ? ["for event in response:", '    if event.type == "content_block_delta" and event.delta.type == "text_delta":', '        print(event.delta.text, end="", flush=True)', "print()"]
        : ['print("".join(block.text for block in response.content if block.type == "text"))']),
    ]);
  },
  ollama(sdk, root, body, hasKey) {
    const headers = hasKey ? `, headers={"Authorization": f"Bearer {os.environ['API_KEY']}"}` : "";
    const text = sdk.method === "chat" ? "message.content" : "response";
    return program(["from ollama import Client"], hasKey, [
      `client = Client(host=${python(root)}${headers})`,
      `response = client.${sdk.method}(`,
      ...keywords(body),
      ")",
      ...(body.stream
        ? ["for part in response:", `    print(part.${text} or "", end="", flush=True)`, "print()"]
        : [`print(response.${text})`]),
    ]);
  },
};

function httpx(url, body, hasKey) {
  const key = hasKey ? ', headers={"Authorization": f"Bearer {os.environ[\'API_KEY\']}"}' : "";
  return program(["import httpx"], hasKey, [
    `body = ${python(body)}`,
    `with httpx.stream("POST", ${python(url)}, json=body, timeout=None${key}) as response:`,
    "    for line in response.iter_lines():",
    "        print(line)",
  ]);
}
