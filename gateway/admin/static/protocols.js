// The endpoints of each protocol, and where its responses have their text.

const SAME = { max_tokens: "max_tokens", temperature: "temperature", top_p: "top_p", seed: "seed" };

/** The conversation as messages, with the system prompt as the first. */
function messages(input) {
  return [...(input.system ? [{ role: "system", content: input.system }] : []), ...dialogue(input)];
}

/** The turns of the user and of the model. */
function dialogue(input) {
  return [...input.turns, { role: "user", content: input.prompt }];
}

/**
 * An endpoint: its path, its body, the wire names of its parameters, the SDK of its Python example
 * (see `snippets.js`), and whether it takes a conversation.
 */
function endpoint(label, path, body, { names = SAME, sdk = null, chat = true } = {}) {
  return { label, path: (input) => path(encodeURIComponent(input.model), input), body: (input) => body(input, input.sampling(names)), names, sdk, chat };
}

function openaiChat(label, path, base) {
  return endpoint(label, () => path, (input, sampling) => ({ model: input.model, messages: messages(input), ...sampling, stream: input.stream }), {
    sdk: { name: "openai", base, method: "chat.completions.create" },
  });
}

function openaiCompletion(path, base) {
  return endpoint("completion", () => path, (input, sampling) => ({ model: input.model, prompt: input.prompt, ...sampling, stream: input.stream }), {
    sdk: { name: "openai", base, method: "completions.create" },
    chat: false,
  });
}

function generate(extra, names = SAME) {
  return endpoint(
    "generate",
    (model, input) => `/v2/models/${model}/generate${input.stream ? "_stream" : ""}`,
    (input, sampling) => ({ text_input: input.prompt, ...extra(input, sampling) }),
    { names, chat: false },
  );
}

const LLM_API = {
  max_tokens: "sampling_param_max_tokens",
  temperature: "sampling_param_temperature",
  top_p: "sampling_param_top_p",
  seed: "sampling_param_seed",
};
const TRTLLM = (input, sampling) => ({ ...sampling, stream: input.stream, exclude_input_in_output: true });
const TRITON = {
  "": () => generate(TRTLLM),
  trtllm: () => generate(TRTLLM),
  llmapi: () => generate((input, sampling) => ({ ...sampling, streaming: input.stream, sampling_param_exclude_input_from_output: true }), LLM_API),
  plain: () => generate((input, sampling) => ({ ...sampling, stream: input.stream })),
};
const MINDIE = { ...SAME, max_tokens: "max_new_tokens" };
const ANTHROPIC = { max_tokens: "max_tokens", temperature: "temperature", top_p: "top_p" };
const OLLAMA = { ...SAME, max_tokens: "num_predict" };

/** An endpoint of Ollama, whose parameters are options. */
function ollama(label, content, chat) {
  return endpoint(label, () => `/api/${label}`, (input, sampling) => ({ model: input.model, ...content(input), options: sampling, stream: input.stream }), {
    names: OLLAMA,
    sdk: { name: "ollama", method: label },
    chat,
  });
}

/** The endpoints of a protocol with this profile. */
export const ENDPOINTS = {
  openai: () => [openaiChat("chat", "/v1/chat/completions", "/v1"), openaiCompletion("/v1/completions", "/v1")],
  ovms: () => [openaiChat("chat", "/v3/chat/completions", "/v3"), openaiCompletion("/v3/completions", "/v3")],
  databricks: () => [
    endpoint(
      "invocations",
      (model) => `/serving-endpoints/${model}/invocations`,
      (input, sampling) => ({ messages: messages(input), ...sampling, stream: input.stream }),
    ),
    openaiChat("chat", "/serving-endpoints/chat/completions", "/serving-endpoints"),
  ],
  triton: (profile) => [(TRITON[profile] ?? TRITON[""])()],
  mindie: () => [openaiChat("chat", "/v1/chat/completions", "/v1"), generate((_, sampling) => ({ parameters: sampling }), MINDIE)],
  ollama: () => [
    ollama("chat", (input) => ({ messages: messages(input) }), true),
    ollama("generate", (input) => ({ prompt: input.prompt }), false),
  ],
  anthropic: () => [
    endpoint(
      "messages",
      () => "/v1/messages",
      (input, sampling) => ({
        model: input.model, max_tokens: 1024, ...(input.system ? { system: input.system } : {}), messages: dialogue(input), ...sampling, stream: input.stream,
      }),
      { names: ANTHROPIC, sdk: { name: "anthropic", base: "", method: "messages.create" } },
    ),
  ],
  tgi: () => [
    endpoint(
      "generate",
      (_, input) => `/generate${input.stream ? "_stream" : ""}`,
      (input, sampling) => ({ model: input.model, inputs: input.prompt, parameters: sampling }),
      { names: MINDIE, chat: false },
    ),
  ],
};

/** The text of an event or of a response; "" if it has none. */
export function textOf(event) {
  if (Array.isArray(event?.content)) return event.content.map((block) => block.text ?? block.thinking ?? "").join("");
  if (event?.type === "content_block_delta") return event.delta.text ?? event.delta.thinking ?? "";
  const choice = event?.choices?.[0];
  const message = choice?.delta ?? choice?.message ?? event?.message;
  const text = message
    ? message.content || message.reasoning_content || message.reasoning || message.thinking
    : (choice?.text ?? event?.text_output ?? event?.response ?? event?.token?.text ?? event?.generated_text);
  return typeof text === "string" ? text : "";
}

/** The error message of an event or a response, or "". */
export function errorOf(event) {
  const error = event?.error ?? event?.message;
  if (event?.choices || event?.message?.role || error === undefined || error === null) return "";
  return typeof error === "string" ? error : String(error.message ?? JSON.stringify(error));
}

/** The number of completion tokens, or null. */
export function tokensOf(event) {
  return event?.usage?.completion_tokens ?? event?.usage?.output_tokens ?? event?.eval_count ?? null;
}
