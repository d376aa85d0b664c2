// OpenAI's SDK for JavaScript: `node openai_js.mjs URL NODE_FOLDER`; the same lines in and out as serve.py.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [url, folder] = process.argv.slice(2);
const { OpenAI } = createRequire(`${folder}/`)("openai");

const used = (found) => (found ? [found.prompt_tokens, found.completion_tokens] : null);
const named = (call) => ({ name: call.function.name, arguments: call.function.arguments });

function given(asked) {
  const { model, messages, max_tokens, tools, seed } = asked;
  return { model, messages, max_tokens, tools, seed, temperature: asked.temperature ?? 0 };
}

async function streamed(client, asked) {
  const stream = await client.chat.completions.create({
    ...given(asked), stream: true, stream_options: { include_usage: true },
  });
  const found = { text: "", calls: [], usage: null, finish: null, pieces: 0 };
  for await (const chunk of stream) {
    found.pieces += 1;
    if (found.pieces === asked.stop_after) {
      stream.controller.abort();
      return { stopped: found.pieces };
    }
    found.usage = used(chunk.usage) ?? found.usage;
    for (const { delta, finish_reason } of chunk.choices) {
      found.text += delta.content ?? "";
      found.finish = finish_reason ?? found.finish;
      for (const call of delta.tool_calls ?? []) {
        const known = (found.calls[call.index] ??= { name: "", arguments: "" });
        known.name += call.function.name ?? "";
        known.arguments += call.function.arguments ?? "";
      }
    }
  }
  return found;
}

async function responses(client, asked) {
  const wish = { model: asked.model, input: asked.input, max_output_tokens: asked.max_tokens, temperature: 0, store: false };
  if (!asked.stream) {
    const answer = await client.responses.create(wish);
    return { text: answer.output_text, usage: [answer.usage.input_tokens, answer.usage.output_tokens], finish: answer.status };
  }
  let text = "", usage = null, finish = null, pieces = 0;
  for await (const event of await client.responses.create({ ...wish, stream: true })) {
    pieces += 1;
    if (event.type === "response.output_text.delta") text += event.delta;
    if (event.type === "response.completed" || event.type === "response.incomplete") {
      usage = [event.response.usage.input_tokens, event.response.usage.output_tokens];
      finish = event.response.status;
    }
  }
  return { text, usage, finish, pieces };
}

async function ask(asked) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: asked.key, maxRetries: asked.retries ?? 0, timeout: 60_000 });
  if (asked.input) return responses(client, asked);
  if (asked.stream) return streamed(client, asked);
  const answer = await client.chat.completions.create(given(asked));
  const { message, finish_reason } = answer.choices[0];
  return {
    text: message.content ?? "", calls: (message.tool_calls ?? []).map(named), usage: used(answer.usage),
    finish: finish_reason, pieces: 1,
  };
}

function told(error) {
  const { status, code, param, requestID, message } = error;
  const types = [];
  for (let kind = error.constructor; kind?.name; kind = Object.getPrototypeOf(kind)) types.push(kind.name);
  return {
    types, status: status ?? null, code: code ?? null, param: param ?? null, message,
    request_id: requestID ?? error.error?.request_id ?? null, retry_after: error.headers?.get("retry-after") ?? null,
  };
}

for await (const line of createInterface({ input: process.stdin })) {
  let found;
  try {
    found = await ask(JSON.parse(line));
  } catch (error) {
    found = { error: told(error) };
  }
  console.log(JSON.stringify(found));
}
