// The same request for a shell and for Python.

/** As a word of a POSIX shell. */
function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** A character as Python's escape. */
function escaped(one) {
  const digits = one.codePointAt(0).toString(16);
  return digits.length > 4 ? `\\U${digits.padStart(8, "0")}` : `\\u${digits.padStart(4, "0")}`;
}

/** As a value of Python. */
function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([key, one]) => `${python(key)}: ${python(one)}`).join(", ")}}`;
  }
  // What may stand in a string of JSON means the same in Python, once it is plain ASCII.
  return JSON.stringify(value).replace(/[^\x20-\x7e]/gu, escaped);
}

/** A line for a shell; a key is taken from the environment. */
export function curl(url, body, keyed) {
  const key = keyed ? ' -H "Authorization: Bearer $API_KEY"' : "";
  return `curl -sN ${quoted(url)} -H 'Content-Type: application/json'${key} -d ${quoted(JSON.stringify(body))}`;
}

/** Some lines of Python. */
export function httpx(url, body, keyed) {
  const key = keyed ? ', headers={"Authorization": f"Bearer {os.environ[\'API_KEY\']}"}' : "";
  return [
    keyed ? "import os\n\nimport httpx\n" : "import httpx\n",
    `body = ${python(body)}`,
    `with httpx.stream("POST", ${python(url)}, json=body, timeout=None${key}) as answer:`,
    "    for line in answer.iter_lines():",
    "        print(line)",
  ].join("\n");
}
