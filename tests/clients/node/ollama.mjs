// Ollama's own client for JavaScript: prints what it made of each answer, as one JSON object.
import { createRequire } from 'node:module';

const [url, key, modules] = process.argv.slice(2);
const { Ollama } = createRequire(`${modules}/`)('ollama');

const client = new Ollama({ host: url, headers: { Authorization: `Bearer ${key}` } });
const messages = [{ role: 'user', content: 'say hi' }];
const history = [{ role: 'user', content: 'use the tool' }];
const parameters = { type: 'object', properties: { x: { type: 'integer' } }, required: ['x'] };
const tools = [{ type: 'function', function: { name: 'f', description: 'A tool.', parameters } }];

async function fails(call) {
  try {
    await call();
  } catch (error) {
    return [error.constructor.name, error.status_code ?? null];
  }
  return 'answered';
}

const unary = await client.chat({ model: 'chat', messages });
const pieces = [];
for await (const part of await client.chat({ model: 'chat', messages, stream: true })) {
  pieces.push([part.message.content, part.done]);
}
const call = await client.chat({ model: 'chat', messages: history, tools });
const generated = await client.generate({ model: 'chat', prompt: 'say hi', raw: true });
const structured = await client.chat({ model: 'structured', messages, format: parameters });
const embedded = await client.embed({ model: 'embed', input: ['a', 'b'] });
const { models } = await client.list();
const shown = await client.show({ model: 'chat' });

console.log(JSON.stringify({
  unary: [unary.message.content, unary.done_reason, unary.prompt_eval_count, unary.eval_count],
  pieces,
  call: call.message.tool_calls[0].function,
  generated: [generated.response, generated.done],
  structured: JSON.parse(structured.message.content),
  embedded: embedded.embeddings.length,
  models: models.map((one) => one.name),
  shown: shown.capabilities.includes('completion'),
  unknown: await fails(() => client.chat({ model: 'none', messages })),
  key: await fails(() => new Ollama({ host: url }).chat({ model: 'chat', messages })),
  broken: await fails(async () => {
    for await (const _ of await client.chat({ model: 'broken', messages, stream: true })) continue;
  }),
}));
