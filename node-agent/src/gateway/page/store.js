// Where conversations are kept: in this browser, and nowhere else. A browser may forbid storage, or have no room left: then
// conversations last until the page is closed, and the page says so.

const PREFIX = "prima.conversation.";
const TITLE_LENGTH = 60;

/** All conversations, by id: {id, title, at, messages}; messages as the API takes them, with what the page shows beside. */
const kept = new Map();

/** Those that the browser did not take. */
const unsaved = new Set();

/** What people are to know of the storage; empty while all is well. */
export let trouble = "";

/** For this tab only: the key and the open conversation. */
const tab = {};
export function remember(name, value) {
  tab[name] = value;
  try { sessionStorage.setItem(name, value); } catch { /* the page itself remembers it */ }
}
export function recall(name) {
  try { tab[name] ??= sessionStorage.getItem(name); } catch { /* only what this page was told */ }
  return tab[name];
}

export function fresh() {
  return {id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, title: "", at: 0, messages: []};
}

export function find(id) {
  return kept.get(id);
}

/** The latest first. */
export function list() {
  return [...kept.values()].sort((one, other) => other.at - one.at);
}

export function save(conversation) {
  const question = conversation.messages.find(message => message.role === "user")?.content ?? "";
  conversation.title = question.replace(/\s+/g, " ").slice(0, TITLE_LENGTH);
  conversation.at = Date.now();
  kept.set(conversation.id, conversation);
  put(conversation);
}

function put(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    unsaved.delete(conversation.id);
    if (unsaved.size === 0) trouble = "";
  } catch (error) {
    unsaved.add(conversation.id);
    trouble = error.name === "QuotaExceededError"
      ? "This browser has no room left: the newest chats are lost when the page is closed. Delete older ones to keep them."
      : "This browser keeps nothing for this page: chats are lost when the page is closed.";
  }
}

export function remove(id) {
  kept.delete(id);
  unsaved.delete(id);
  if (unsaved.size === 0) trouble = "";
  try { localStorage.removeItem(PREFIX + id); } catch { /* it was never there */ }
  // There may be room now.
  for (const other of [...unsaved]) put(kept.get(other));
}

/** Reads what is stored under one key. Something else may have written there: what does not look like a conversation is left alone. */
function read(key, text) {
  const id = key.slice(PREFIX.length);
  try {
    const {title, at, messages} = JSON.parse(text);
    const whole = typeof title === "string" && Number.isFinite(at) && messages.length > 0 && messages.every(message =>
      ["user", "assistant"].includes(message.role) && typeof message.content === "string" &&
      (message.tool_calls ?? []).every(call => typeof call.function.name === "string" && typeof call.function.arguments === "string"));
    if (whole) kept.set(id, {id, title, at, messages});
  } catch { /* no conversation */ }
}

/** Reads everything, and from then on what other tabs of this page store; `onChange` hears which conversation changed. */
export function watch(onChange) {
  try {
    for (const key of Object.keys(localStorage)) if (key.startsWith(PREFIX)) read(key, localStorage.getItem(key));
  } catch { /* forbidden: the first save will tell */ }
  addEventListener("storage", ({key, newValue}) => {
    if (!key?.startsWith(PREFIX)) return;
    if (newValue === null) remove(key.slice(PREFIX.length));
    else read(key, newValue);
    onChange(key.slice(PREFIX.length));
  });
}
