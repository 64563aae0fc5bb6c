// What the page asks the server for, and the key that opens it.
import {recall, remember} from "./store.js";

// The API's defaults sample the whole distribution, on which small models lose their thread.
const SAMPLING = {temperature: 0.7, top_p: 0.95, min_p: 0.05};

export function headers() {
  const key = recall("key");
  return key ? {Authorization: "Bearer " + key} : {};
}

export function unlock(key) {
  remember("key", key);
}

/** Yields the data of every server-sent event. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    held += value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const event of whole) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

/** Why a request was refused; what stands between may answer something that is no JSON. */
async function refusal(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `The server answered with status ${response.status}.`;
}

/**
 * Streams an answer to `messages`: tells `onDelta` of each piece, `onStatus` of the HTTP status. Returns the chunk with the usage and
 * why the answer ended, and throws if it was cut.
 */
export async function complete(messages, signal, onStatus, onDelta) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", signal,
    headers: {"Content-Type": "application/json", ...headers()},
    body: JSON.stringify({messages, stream: true, stream_options: {include_usage: true}, ...SAMPLING}),
  });
  onStatus(response.status);
  if (!response.ok) throw new Error(await refusal(response));
  let usage = null, finish = null;
  for await (const data of events(response)) {
    if (data === "[DONE]") return {usage, finish};
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) usage = chunk;
    const choice = chunk.choices?.[0];
    finish = choice?.finish_reason ?? finish;
    if (choice?.delta) onDelta(choice.delta);
  }
  throw new Error("The connection was lost before the answer was complete.");
}
