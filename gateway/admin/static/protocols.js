// How each protocol is asked, and where its answers have their text. One line for each way to ask.

const SAME = { max_tokens: "max_tokens", temperature: "temperature", top_p: "top_p", seed: "seed" };
const chat = (prompt) => ({ messages: [{ role: "user", content: prompt }] });
const completion = (prompt) => ({ prompt });

/** A way that names the model in the body. */
function named(label, path, content) {
  return {
    label,
    path: () => path,
    body: (told) => ({ model: told.model, ...content(told.prompt), ...told.sampling(SAME), stream: told.stream }),
  };
}

/** A way that names it in the path. */
function placed(label, path, body) {
  return { label, path: (told) => path(encodeURIComponent(told.model), told), body };
}

function generate(extra) {
  return placed(
    "generate",
    (model, told) => `/v2/models/${model}/generate${told.stream ? "_stream" : ""}`,
    (told) => ({ text_input: told.prompt, ...extra(told) }),
  );
}

const LLM_API = {
  max_tokens: "sampling_param_max_tokens",
  temperature: "sampling_param_temperature",
  top_p: "sampling_param_top_p",
  seed: "sampling_param_seed",
};
const TRITON = {
  "": (told) => ({ ...told.sampling(SAME), stream: told.stream, exclude_input_in_output: true }),
  trtllm: (told) => ({ ...told.sampling(SAME), stream: told.stream, exclude_input_in_output: true }),
  llmapi: (told) => ({ ...told.sampling(LLM_API), streaming: told.stream, sampling_param_exclude_input_from_output: true }),
  plain: (told) => ({ ...told.sampling(SAME), stream: told.stream }),
};
const MINDIE = { ...SAME, max_tokens: "max_new_tokens" };

/** The ways to ask in a protocol, of this profile. */
export const WAYS = {
  openai: () => [named("chat", "/v1/chat/completions", chat), named("completion", "/v1/completions", completion)],
  ovms: () => [named("chat", "/v3/chat/completions", chat), named("completion", "/v3/completions", completion)],
  databricks: () => [
    placed(
      "invocations",
      (model) => `/serving-endpoints/${model}/invocations`,
      (told) => ({ ...chat(told.prompt), ...told.sampling(SAME), stream: told.stream }),
    ),
    named("chat", "/serving-endpoints/chat/completions", chat),
  ],
  triton: (profile) => [generate(TRITON[profile] ?? TRITON[""])],
  mindie: () => [
    named("chat", "/v1/chat/completions", chat),
    generate((told) => ({ parameters: told.sampling(MINDIE) })),
  ],
};

/** The text of an event or of a whole answer; "" where it has none. */
export function textOf(told) {
  const one = told?.choices?.[0];
  const said = one?.delta ?? one?.message;
  const text = said ? said.content || said.reasoning_content || said.reasoning : (one?.text ?? told?.text_output);
  return typeof text === "string" ? text : "";
}

/** What went wrong, where an event or an answer tells it. */
export function errorOf(told) {
  const error = told?.error ?? told?.message;
  if (told?.choices || error === undefined || error === null) return "";
  return typeof error === "string" ? error : String(error.message ?? JSON.stringify(error));
}

/** The tokens that the answer came to, where it tells. */
export function tokensOf(told) {
  return told?.usage?.completion_tokens ?? null;
}
