// @ai-sdk/openai on its default API, Responses: prints one JSON line for each use.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: `${process.env.AGENTS_URL}/v1`, apiKey: "sk-clients" });
const get_weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const request = {
  model: openai("weather"),
  prompt: "go",
  tools: { get_weather },
  stopWhen: stepCountIs(4),
  maxRetries: 0,
};

const whole = await generateText(request);
console.log(JSON.stringify({ text: whole.text, steps: whole.steps.length }));

const streamed = streamText(request);
const kinds = new Set();
for await (const part of streamed.fullStream) kinds.add(part.type);
const failed = kinds.has("error");
console.log(JSON.stringify({ text: await streamed.text, called: kinds.has("tool-call"), failed }));

const schema = z.object({ name: z.string(), age: z.number() });
const model = openai("structured");
const parsed = await generateObject({ model, prompt: "who?", schema, maxRetries: 0 });
console.log(JSON.stringify(parsed.object));
