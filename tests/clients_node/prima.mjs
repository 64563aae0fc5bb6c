//! The ring that these clients talk to, and what several of them ask. tests/tests/clients_node.rs starts it and says where it is.

import assert from "node:assert/strict";
import test from "node:test";

export const URL = process.env.PRIMA_URL;
export const MODEL = process.env.PRIMA_MODEL;
export const KEY = process.env.PRIMA_KEY;

// Long enough for a slow machine, short enough to end a hang.
export const TIMEOUT = 300_000;

export const QUESTION = "Write one sentence about rivers.";
export const ORDER = "Turn the light on.";

/** The JSON Schema of a tool's arguments, so narrow that every call ends soon. */
export const LIGHT = {
  type: "object",
  properties: { on: { type: "boolean" }, room: { enum: ["kitchen", "hall"] } },
  required: ["on", "room"],
  additionalProperties: false,
};

/** An independent reading of LIGHT. */
export function checkLight(said) {
  assert.deepEqual(Object.keys(said).sort(), ["on", "room"]);
  assert.equal(typeof said.on, "boolean");
  assert.ok(["kitchen", "hall"].includes(said.room), said.room);
}

export function timedTest(name, body) {
  test(name, { timeout: TIMEOUT }, body);
}
