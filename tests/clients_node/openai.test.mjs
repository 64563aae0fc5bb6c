//! OpenAI's API, by OpenAI's own client for Node.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { checkLight, KEY, LIGHT, MODEL, ORDER, QUESTION, TIMEOUT, timedTest, URL } from "./prima.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0, timeout: TIMEOUT });
const GREEDY = { model: MODEL, temperature: 0, max_tokens: 24 };
const ask = (text) => ({ ...GREEDY, messages: [{ role: "user", content: text }] });
const tools = [{ type: "function", function: { name: "turn_light", description: "Turns a light on or off.", parameters: LIGHT } }];

timedTest("a stream says what a whole answer says", async () => {
  const whole = await client.chat.completions.create(ask(QUESTION));
  const stream = client.chat.completions.stream(ask(QUESTION));
  const pieces = [];
  stream.on("content", (piece) => pieces.push(piece));
  const said = (await stream.finalChatCompletion()).choices[0];
  assert.ok(whole.choices[0].message.content);
  assert.equal(pieces.join(""), whole.choices[0].message.content);
  assert.equal(said.message.content, whole.choices[0].message.content);
  assert.equal(said.finish_reason, whole.choices[0].finish_reason);
});

timedTest("a text goes on", async () => {
  const asked = { ...GREEDY, prompt: "Once upon a time" };
  const whole = await client.completions.create(asked);
  const pieces = [];
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) pieces.push(chunk.choices[0].text);
  assert.ok(whole.choices[0].text);
  assert.equal(pieces.join(""), whole.choices[0].text);
  assert.equal(whole.usage.completion_tokens, GREEDY.max_tokens);
});

timedTest("a streamed call of a tool is put together", async () => {
  const stream = client.chat.completions.stream({ ...ask(ORDER), max_tokens: 200, tools, tool_choice: "required", parallel_tool_calls: false });
  const choice = (await stream.finalChatCompletion()).choices[0];
  assert.equal(choice.finish_reason, "tool_calls");
  assert.equal(choice.message.tool_calls.length, 1);
  assert.equal(choice.message.tool_calls[0].function.name, "turn_light");
  checkLight(JSON.parse(choice.message.tool_calls[0].function.arguments));
});

timedTest("runTools calls functions until the model answers", async () => {
  const said = [];
  const light = { type: "function", function: { name: "turn_light", parameters: LIGHT, parse: JSON.parse, function: (args) => { said.push(args); return "done"; } } };
  const runner = client.chat.completions.runTools(
    { ...ask(ORDER), max_tokens: 100, tools: [light], tool_choice: { type: "function", function: { name: "turn_light" } } },
  );
  await runner.done();
  assert.ok(said.length > 0);
  said.forEach(checkLight);
  assert.ok(runner.messages.some((message) => message.role === "tool" && message.content === "done"));
});

timedTest("parse returns an object of the zod schema", async () => {
  const River = z.object({ name: z.enum(["Nile", "Rhine"]), long: z.boolean() });
  const answer = await client.chat.completions.parse({ ...ask(QUESTION), max_tokens: 100, response_format: zodResponseFormat(River, "river") });
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(typeof answer.choices[0].message.parsed.long, "boolean");
  River.parse(answer.choices[0].message.parsed);
});

timedTest("responses stream text and calls", async () => {
  const greedy = { model: MODEL, input: QUESTION, temperature: 0, max_output_tokens: 24 };
  const whole = await client.responses.create(greedy);
  const text = [];
  const stream = client.responses.stream(greedy);
  stream.on("response.output_text.delta", (event) => text.push(event.delta));
  await stream.finalResponse();
  assert.ok(whole.output_text);
  assert.equal(text.join(""), whole.output_text);

  const light = { type: "function", name: "turn_light", parameters: LIGHT, strict: true };
  const calls = await client.responses
    .stream({ ...greedy, input: ORDER, max_output_tokens: 200, tools: [light], tool_choice: "required", parallel_tool_calls: false })
    .finalResponse();
  const call = calls.output.at(-1);
  assert.equal(call.name, "turn_light");
  checkLight(JSON.parse(call.arguments));
});

timedTest("embeddings are the same as floats and as base64", async () => {
  const input = ["a river", "the sea"];
  const floats = await client.embeddings.create({ model: MODEL, input, encoding_format: "float" });
  // The client asks for base64 unless told otherwise, and decodes it.
  const decoded = await client.embeddings.create({ model: MODEL, input });
  assert.equal(floats.data.length, 2);
  floats.data.forEach(({ embedding, index }) => {
    const length = Math.hypot(...embedding);
    assert.ok(Math.abs(length - 1) < 1e-4, `${length}`);
    decoded.data[index].embedding.forEach((number, place) => assert.ok(Math.abs(number - embedding[place]) < 1e-6));
  });
  const short = await client.embeddings.create({ model: MODEL, input, dimensions: 16 });
  assert.equal(short.data[0].embedding.length, 16);
});

timedTest("errors are those of the API", async () => {
  await assert.rejects(client.chat.completions.create({ ...ask(QUESTION), temperature: 9 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  await assert.rejects(client.chat.completions.create({ ...ask(QUESTION), model: "gpt" }), OpenAI.NotFoundError);
  await assert.rejects(client.withOptions({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
});
