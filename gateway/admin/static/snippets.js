// The request as a shell command and as a Python program.

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
  return `curl -sN ${quote(url)} -H 'Content-Type: application/json'${key} -d ${quote(JSON.stringify(body))}`;
}

/** A Python program. */
export function httpx(url, body, hasKey) {
  const key = hasKey ? ', headers={"Authorization": f"Bearer {os.environ[\'API_KEY\']}"}' : "";
  return [
    hasKey ? "import os\n\nimport httpx\n" : "import httpx\n",
    `body = ${python(body)}`,
    `with httpx.stream("POST", ${python(url)}, json=body, timeout=None${key}) as response:`,
    "    for line in response.iter_lines():",
    "        print(line)",
  ].join("\n");
}
