// The server's OpenAI API as the page uses it: models, abilities, and one streamed answer.

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const headers = (key) => ({ "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) });

async function get(path, key) {
  const answer = await fetch(path, { headers: headers(key) });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

async function refusal(answer) {
  const body = await answer.json().catch(() => ({}));
  return new Refused(body.error?.message ?? `The server answered ${answer.status}.`, answer.status);
}

export const models = async (key) => (await get("/v1/models", key)).data.map((model) => model.id);
export const abilities = async (key) => (await get("/v1/capabilities", key)).models;

// Yields the `delta` of each chunk, then {usage}. Aborting `signal` ends the answer on the server, too.
export async function* chat(body, key, signal) {
  const answer = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!answer.ok) throw await refusal(answer);
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message, 500);
    if (chunk.usage) yield { usage: chunk.usage };
    for (const choice of chunk.choices) yield { ...choice.delta, finish: choice.finish_reason };
  }
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const event of whole) {
      for (const line of event.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
    }
  }
}
