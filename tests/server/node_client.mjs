// What OpenAI's SDK for Node makes of a server: node node_client.mjs URL prints one JSON object.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , url, folder] = process.argv;
const require = createRequire(pathToFileURL(`${folder}/package.json`));
const { OpenAI } = require("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const found = {};

const whole = await client.chat.completions.create({ model: "stub", messages });
found.whole = whole.choices[0].message.content;

found.streamed = "";
const stream = await client.chat.completions.create({ model: "stub", messages, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) found.tokens = chunk.usage.completion_tokens;
}

const helper = client.chat.completions.stream({ model: "stub", messages });
found.final = (await helper.finalChatCompletion()).choices[0].message.content;

const response = await client.responses.create({ model: "stub", input: "hi" });
found.response = response.output_text;
found.events = [];
for await (const event of await client.responses.create({ model: "stub", input: "hi", stream: true })) found.events.push(event.type);

found.models = [];
for await (const model of client.models.list()) found.models.push(model.id);
found.embedding = (await client.embeddings.create({ model: "stub", input: "abc" })).data[0].embedding;
found.completion = (await client.completions.create({ model: "stub", prompt: "hi" })).choices[0].text;

try {
  await client.chat.completions.create({ model: "stub", messages, temperature: "hot" });
} catch (error) {
  found.error = { kind: error.constructor.name, status: error.status, param: error.param };
}

const controller = new AbortController();
const long = await client.chat.completions.create({ model: "stub", messages: [{ role: "user", content: "long" }], stream: true }, { signal: controller.signal });
try {
  for await (const _ of long) controller.abort();
} catch (error) {
  found.aborted = error.constructor.name;
}
found.aborted ??= "ended";

console.log(JSON.stringify(found));
