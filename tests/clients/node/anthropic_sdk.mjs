// Anthropic's SDK for TypeScript: prints what it made of each answer, as one JSON object.
import { createRequire } from 'node:module';

const [url, key, modules] = process.argv.slice(2);
const { default: Anthropic } = createRequire(`${modules}/`)('@anthropic-ai/sdk');

const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const hi = [{ role: 'user', content: 'hi there' }];
const history = [{ role: 'user', content: 'use the tool' }];
const tools = [{ name: 'f', input_schema: { type: 'object' } }];
const base = { model: 'chat', max_tokens: 50, messages: hi };

async function fails(call) {
  try {
    await call();
  } catch (error) {
    return [error.constructor.name, error.status ?? null, error.type ?? null];
  }
  return 'answered';
}

const message = await client.messages.create(base);
const deltas = [];
const stream = client.messages.stream(base).on('text', (text) => deltas.push(text));
const final = await stream.finalMessage();
const raw = [];
for await (const event of await client.messages.create({ ...base, stream: true })) raw.push(event.type);
const call = await client.messages.stream({ ...base, messages: history, tools }).finalMessage();
const count = await client.messages.countTokens({ model: 'chat', messages: hi, system: 'x' });
const models = [];
for await (const model of client.models.list({ limit: 2 })) models.push(model.id);
const one = await client.models.retrieve('org/chat');

console.log(JSON.stringify({
  text: message.content[0].text,
  request: typeof message._request_id,
  deltas,
  final: [final.content[0].text, final.stop_reason, final.usage.input_tokens, final.usage.output_tokens],
  raw,
  call: [call.stop_reason, call.content[0].name, call.content[0].input],
  count: count.input_tokens,
  models,
  one: one.id,
  unknown: await fails(() => client.messages.create({ ...base, model: 'none' })),
  limited: await fails(() => client.messages.create({ ...base, model: 'limited' })),
  broken: await fails(() => client.messages.stream({ ...base, model: 'broken' }).finalMessage()),
  key: await fails(() => new Anthropic({ baseURL: url, apiKey: 'no', maxRetries: 0 }).messages.create(base)),
}));
