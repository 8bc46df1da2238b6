// JSON whose integers may be larger than a JavaScript number can hold.

/** Parse JSON; an integer that would be rounded becomes a BigInt. */
export function parseExact(text) {
  return JSON.parse(text, (_, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "") ? BigInt(context.source) : value,
  );
}

/** Write JSON, BigInts as the integers that they are. */
export function formatExact(value, indent = 0) {
  return JSON.stringify(value, (_, one) => (typeof one === "bigint" ? JSON.rawJSON(String(one)) : one), indent);
}

/** The number that was entered; null if the text is none. */
export function parseNumber(text) {
  const trimmed = text.trim();
  if (/^[+-]?\d+$/.test(trimmed)) {
    const whole = BigInt(trimmed.replace(/^\+/, ""));
    return Number.isSafeInteger(Number(whole)) ? Number(whole) : whole;
  }
  const value = Number(trimmed);
  return trimmed === "" || Number.isNaN(value) ? null : value;
}

/** What a JSON Schema says, wherever its reference leads. */
export function resolve(document, definition) {
  let schema = definition;
  for (let n = 0; schema?.$ref && n < 10; n += 1) {
    schema = schema.$ref.slice(2).split("/").reduce((node, name) => node?.[name.replaceAll("~1", "/").replaceAll("~0", "~")], document);
  }
  return schema;
}
