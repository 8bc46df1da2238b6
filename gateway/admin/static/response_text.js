// The text, the error and the number of tokens of a response or an event, by its shape.

/** The text of a content block, or of a list of them. */
function textOfBlocks(content) {
  return [content].flat().map((block) => block.text ?? block.thinking ?? "").join("");
}

/** The text of an event or of a response; "" if it has none. */
export function textOf(event) {
  if (Array.isArray(event?.content)) return textOfBlocks(event.content);
  if (event?.type === "content_block_delta") return event.delta.text ?? event.delta.thinking ?? "";
  const choice = event?.choices?.[0];
  const message = choice?.delta ?? choice?.message ?? event?.message ?? event?.delta?.message;
  if (message?.content && typeof message.content === "object") return textOfBlocks(message.content);
  const text = message
    ? message.content || message.reasoning_content || message.reasoning || message.thinking
    : (choice?.text ?? event?.text_output ?? event?.response ?? event?.token?.text ?? event?.generated_text);
  return typeof text === "string" ? text : "";
}

/** The error message of an event or a response, or "". */
export function errorOf(event) {
  const error = event?.error ?? event?.delta?.error ?? event?.message;
  if (event?.choices || event?.message?.role || error === undefined || error === null) return "";
  return typeof error === "string" ? error : String(error.message ?? JSON.stringify(error));
}

/** The number of completion tokens, or null. */
export function tokensOf(event) {
  const usage = event?.usage ?? event?.delta?.usage;
  return usage?.completion_tokens ?? usage?.output_tokens ?? usage?.tokens?.output_tokens ?? event?.eval_count ?? null;
}
