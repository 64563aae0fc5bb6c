//! The loop of an agent with a server of the Model Context Protocol: its tools are offered, a call is carried out, the model answers.

import assert from "node:assert/strict";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { InMemoryTransport } from "@modelcontextprotocol/sdk/inMemory.js";
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import OpenAI from "openai";
import { z } from "zod";
import { KEY, MODEL, TIMEOUT, timedTest, URL } from "./prima.mjs";

const openai = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0, timeout: TIMEOUT });

/** A client of a server with one tool. */
async function connect() {
  const server = new McpServer({ name: "weather", version: "1.0.0" });
  const inputSchema = { city: z.enum(["Rome", "Oslo"]).describe("where"), days: z.number().int().min(1).max(7).default(1) };
  server.registerTool("get_weather", { description: "The weather in a city.", inputSchema }, async ({ city, days }) => ({
    content: [{ type: "text", text: `${city}: sunny for ${days} days` }],
  }));
  const client = new Client({ name: "prima-tests", version: "1.0.0" });
  const [ours, theirs] = InMemoryTransport.createLinkedPair();
  await Promise.all([server.connect(theirs), client.connect(ours)]);
  return client;
}

timedTest("a call goes to the server, and its result to the model", async () => {
  const mcp = await connect();
  const tools = (await mcp.listTools()).tools.map(({ name, description, inputSchema }) => ({
    type: "function",
    function: { name, description, parameters: inputSchema },
  }));
  const messages = [{ role: "user", content: "What is the weather in Rome?" }];
  const ask = { model: MODEL, temperature: 0, max_tokens: 200, tools, parallel_tool_calls: false };

  const called = (await openai.chat.completions.create({ ...ask, messages, tool_choice: "required" })).choices[0].message;
  messages.push(called);
  assert.equal(called.tool_calls.length, 1);
  const { id, function: call } = called.tool_calls[0];
  const result = await mcp.callTool({ name: call.name, arguments: JSON.parse(call.arguments) });
  assert.ok(!result.isError, JSON.stringify(result));
  assert.match(result.content[0].text, /^(Rome|Oslo): sunny for [1-7] days$/);

  messages.push({ role: "tool", tool_call_id: id, content: result.content[0].text });
  const answer = await openai.chat.completions.create({ ...ask, messages, max_tokens: 24, tool_choice: "none" });
  assert.ok(answer.choices[0].message.content);
  await mcp.close();
});
