//! Anthropic's API, by Anthropic's own client for Node.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { checkLight, KEY, LIGHT, MODEL, ORDER, QUESTION, TIMEOUT, timedTest, URL } from "./prima.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0, timeout: TIMEOUT });
const ask = (text) => ({ model: MODEL, temperature: 0, max_tokens: 24, messages: [{ role: "user", content: text }] });
const tools = [{ name: "turn_light", description: "Turns a light on or off.", input_schema: LIGHT }];

timedTest("a stream says what a whole message says", async () => {
  const whole = await client.messages.create(ask(QUESTION));
  const pieces = [];
  const stream = client.messages.stream(ask(QUESTION)).on("text", (piece) => pieces.push(piece));
  const said = await stream.finalMessage();
  assert.ok(whole.content[0].text);
  assert.equal(pieces.join(""), whole.content[0].text);
  assert.deepEqual(said.content.map((block) => block.text), [whole.content[0].text]);
  assert.equal(said.stop_reason, whole.stop_reason);
  assert.equal(said.usage.output_tokens, whole.usage.output_tokens);
});

timedTest("a tool is used and its result answered", async () => {
  const options = { ...ask(ORDER), max_tokens: 200, tools, tool_choice: { type: "any", disable_parallel_tool_use: true } };
  const message = await client.messages.stream(options).finalMessage();
  assert.equal(message.stop_reason, "tool_use");
  const uses = message.content.filter((block) => block.type === "tool_use");
  assert.deepEqual(uses.map((use) => use.name), ["turn_light"]);
  checkLight(uses[0].input);
  const messages = [
    ...options.messages,
    { role: "assistant", content: message.content },
    { role: "user", content: [{ type: "tool_result", tool_use_id: uses[0].id, content: "the light is on" }] },
  ];
  const answer = await client.messages.create({ ...options, messages, tool_choice: { type: "none" }, max_tokens: 24 });
  assert.ok(answer.content[0].text);
});

timedTest("tokens are counted", async () => {
  const { messages } = ask(QUESTION);
  const counted = await client.messages.countTokens({ model: MODEL, messages });
  const { usage } = await client.messages.create({ ...ask(QUESTION), max_tokens: 1 });
  assert.equal(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
});

timedTest("errors are those of the API", async () => {
  await assert.rejects(client.messages.create({ ...ask(QUESTION), model: "claude" }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ ...ask(QUESTION), temperature: 9 }), Anthropic.BadRequestError);
});
