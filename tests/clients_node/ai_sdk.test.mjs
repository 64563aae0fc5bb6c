//! Vercel's AI SDK, by its provider for APIs that are like OpenAI's.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { KEY, MODEL, ORDER, QUESTION, TIMEOUT, timedTest, URL } from "./prima.mjs";

const prima = createOpenAICompatible({ name: "prima", baseURL: `${URL}/v1`, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true });
const ask = (prompt) => ({ model: prima(MODEL), prompt, temperature: 0, maxOutputTokens: 24, maxRetries: 0, abortSignal: AbortSignal.timeout(TIMEOUT) });
const River = z.object({ name: z.enum(["Nile", "Rhine"]), long: z.boolean() });

function light(done) {
  return tool({
    description: "Turns a light on or off.",
    inputSchema: z.object({ on: z.boolean(), room: z.enum(["kitchen", "hall"]) }),
    execute: async (input) => {
      done.push(input);
      return "done";
    },
  });
}

timedTest("a stream says what a whole answer says", async () => {
  const whole = await generateText(ask(QUESTION));
  assert.ok(whole.text);
  const stream = streamText(ask(QUESTION));
  const pieces = [];
  for await (const piece of stream.textStream) pieces.push(piece);
  assert.equal(pieces.join(""), whole.text);
  assert.equal(await stream.finishReason, whole.finishReason);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
});

timedTest("objects keep to their schema, whole and streamed", async () => {
  const whole = await generateObject({ ...ask(QUESTION), maxOutputTokens: 100, schema: River });
  River.parse(whole.object);
  const stream = streamObject({ ...ask(QUESTION), maxOutputTokens: 100, schema: River });
  for await (const _ of stream.partialObjectStream);
  assert.deepEqual(await stream.object, whole.object);
});

timedTest("a tool is called, and the model goes on with its result", async () => {
  const done = [];
  const options = { ...ask(ORDER), maxOutputTokens: 100, tools: { turn_light: light(done) } };
  const answer = await generateText({
    ...options,
    toolChoice: "required",
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => (stepNumber > 0 ? { toolChoice: "none" } : {}),
  });
  assert.ok(done.length > 0);
  assert.equal(answer.steps.length, 2);
  assert.equal(answer.steps[0].finishReason, "tool-calls");
  assert.ok(answer.text);
});

timedTest("a streamed call of a tool is put together", async () => {
  const done = [];
  const stream = streamText({ ...ask(ORDER), maxOutputTokens: 100, tools: { turn_light: light(done) }, toolChoice: { type: "tool", toolName: "turn_light" } });
  await stream.consumeStream();
  assert.equal(await stream.finishReason, "tool-calls");
  assert.ok(done.length > 0);
});
