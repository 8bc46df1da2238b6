// The Agents SDK on its default API, Responses: prints one JSON line for each use.
import { Agent, run, setDefaultOpenAIClient, setTracingDisabled, tool } from "@openai/agents";
import { OpenAI } from "openai";
import { z } from "zod";

const baseURL = `${process.env.AGENTS_URL}/v1`;
setDefaultOpenAIClient(new OpenAI({ baseURL, apiKey: "sk-clients", maxRetries: 0 }));
setTracingDisabled(true);
const get_weather = tool({
  name: "get_weather",
  description: "The weather in a city.",
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});

const weather = new Agent({ name: "weather", model: "weather", tools: [get_weather] });
console.log(JSON.stringify((await run(weather, "go")).finalOutput));

const expert = new Agent({ name: "expert", model: "plain" });
const triage = Agent.create({ name: "triage", model: "triage", handoffs: [expert] });
const handed = await run(triage, "go");
console.log(JSON.stringify([handed.lastAgent.name, handed.finalOutput]));

const stream = await run(weather, "go", { stream: true });
const kinds = new Set();
for await (const event of stream) kinds.add(event.type);
await stream.completed;
console.log(JSON.stringify([stream.finalOutput, kinds.has("raw_model_stream_event")]));
