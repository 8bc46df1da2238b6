// The endpoints of each protocol, and where its responses have their text.

const SAME = { max_tokens: "max_tokens", temperature: "temperature", top_p: "top_p", seed: "seed" };
const chat = (prompt) => ({ messages: [{ role: "user", content: prompt }] });
const completion = (prompt) => ({ prompt });

/** An endpoint with the model in the body. */
function modelInBody(label, path, content) {
  return {
    label,
    path: () => path,
    body: (input) => ({ model: input.model, ...content(input.prompt), ...input.sampling(SAME), stream: input.stream }),
  };
}

/** An endpoint with the model in the path. */
function modelInPath(label, path, body) {
  return { label, path: (input) => path(encodeURIComponent(input.model), input), body };
}

function generate(extra) {
  return modelInPath(
    "generate",
    (model, input) => `/v2/models/${model}/generate${input.stream ? "_stream" : ""}`,
    (input) => ({ text_input: input.prompt, ...extra(input) }),
  );
}

const LLM_API = {
  max_tokens: "sampling_param_max_tokens",
  temperature: "sampling_param_temperature",
  top_p: "sampling_param_top_p",
  seed: "sampling_param_seed",
};
const TRITON = {
  "": (input) => ({ ...input.sampling(SAME), stream: input.stream, exclude_input_in_output: true }),
  trtllm: (input) => ({ ...input.sampling(SAME), stream: input.stream, exclude_input_in_output: true }),
  llmapi: (input) => ({ ...input.sampling(LLM_API), streaming: input.stream, sampling_param_exclude_input_from_output: true }),
  plain: (input) => ({ ...input.sampling(SAME), stream: input.stream }),
};
const MINDIE = { ...SAME, max_tokens: "max_new_tokens" };
const ANTHROPIC = { max_tokens: "max_tokens", temperature: "temperature", top_p: "top_p" };
const OLLAMA = { ...SAME, max_tokens: "num_predict" };

/** An endpoint of Ollama, whose parameters are options. */
function ollama(label, content) {
  return {
    label,
    path: () => `/api/${label}`,
    body: (input) => ({ model: input.model, ...content(input.prompt), options: input.sampling(OLLAMA), stream: input.stream }),
  };
}

/** The endpoints of a protocol with this profile. */
export const ENDPOINTS = {
  openai: () => [modelInBody("chat", "/v1/chat/completions", chat), modelInBody("completion", "/v1/completions", completion)],
  ovms: () => [modelInBody("chat", "/v3/chat/completions", chat), modelInBody("completion", "/v3/completions", completion)],
  databricks: () => [
    modelInPath(
      "invocations",
      (model) => `/serving-endpoints/${model}/invocations`,
      (input) => ({ ...chat(input.prompt), ...input.sampling(SAME), stream: input.stream }),
    ),
    modelInBody("chat", "/serving-endpoints/chat/completions", chat),
  ],
  triton: (profile) => [generate(TRITON[profile] ?? TRITON[""])],
  mindie: () => [
    modelInBody("chat", "/v1/chat/completions", chat),
    generate((input) => ({ parameters: input.sampling(MINDIE) })),
  ],
  ollama: () => [ollama("chat", chat), ollama("generate", completion)],
  anthropic: () => [
    {
      label: "messages",
      path: () => "/v1/messages",
      body: (input) => ({ model: input.model, max_tokens: 1024, ...chat(input.prompt), ...input.sampling(ANTHROPIC), stream: input.stream }),
    },
  ],
  tgi: () => [
    {
      label: "generate",
      path: (input) => `/generate${input.stream ? "_stream" : ""}`,
      body: (input) => ({ model: input.model, inputs: input.prompt, parameters: input.sampling(MINDIE) }),
    },
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
