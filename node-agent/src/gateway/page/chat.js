// The conversation: what is asked, how the answer grows, and which of the kept conversations is open.
import {complete, unlock} from "./api.js";
import {$, make, seconds} from "./make.js";
import {Reader, add, bubble, sent, update} from "./message.js";
import * as ring from "./ring.js";
import * as store from "./store.js";

let conversation = store.fresh();
let running = null;  // the AbortController of the answer that is being written
let ready = false;
let leaving = false;  // the page is about to go, and requests fail for that

addEventListener("beforeunload", () => {
  leaving = true;
  // It may stay after all.
  setTimeout(() => { leaving = false; }, 2000);
});
addEventListener("pagehide", () => { leaving = true; });
addEventListener("pageshow", () => { leaving = false; });

function locked(status) {
  $("unlock").hidden = status !== 401;
  if (status === 401) ring.say("Locked: an API key is needed.");
}

// ---- an answer ----

function put(message) {
  $("empty").hidden = true;
  const element = bubble(message);
  $("talk").append(element);
  $("talk").scrollTop = $("talk").scrollHeight;
  return element;
}

async function ask(question) {
  const asked = conversation;
  put({role: "user", content: question});
  asked.messages.push({role: "user", content: question});
  keep(asked);
  store.remember("conversation", asked.id);
  const message = {role: "assistant", content: ""};
  const element = put(message);
  element.classList.add("pending");
  const reader = new Reader($("said"));
  reader.say("The answer is being written.");
  const own = running = new AbortController();
  show();
  const start = performance.now();
  let first = null, pieces = 0, end = null, problem = "", drawing = false, stale = false, over = false;
  const draw = () => {
    const began = performance.now();
    const talk = $("talk");
    const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
    update(element, message, true);
    if (asked === conversation) reader.read(element, false);
    if (atEnd) talk.scrollTop = talk.scrollHeight;
    // Once a frame, and at most a fourth of the time however long the answer is.
    setTimeout(() => { drawing = false; if (stale) later(); }, 3 * (performance.now() - began));
    stale = false;
  };
  const later = () => {
    stale = true;
    if (drawing) return;
    drawing = true;
    requestAnimationFrame(() => { if (!over) draw(); });
  };
  const leave = () => store.save({...asked, messages: [...asked.messages, message]});
  addEventListener("pagehide", leave);
  try {
    end = await complete(asked.messages.map(sent), own.signal, locked, delta => {
      add(message, delta);
      if (!delta.content && !delta.reasoning_content && !delta.tool_calls) return;
      first ??= performance.now();
      pieces += 1;
      $("first").textContent = seconds((first - start) / 1000);
      later();
    });
  } catch (error) {
    problem = own.signal.aborted ? "stopped" : error.message;
    message.failed = problem !== "stopped";
  }
  over = true;
  removeEventListener("pagehide", leave);
  const notes = first === null ? [] : figures(end?.usage, pieces, first - start, performance.now() - first);
  if (end?.finish === "length") notes.push("cut off at the limit of tokens");
  message.note = [...notes, problem].filter(note => note).join(" · ");
  const talk = $("talk");
  const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
  update(element, message);
  if (atEnd) talk.scrollTop = talk.scrollHeight;
  element.classList.remove("pending");
  if (asked === conversation) {
    reader.read(element, true);
    reader.say(problem || "The answer is complete.");
  }
  if (message.content || message.tool_calls) {
    asked.messages.push(message);
  } else if (asked === conversation && !leaving) {
    // Unanswered: the question goes back where it can be sent again. (Of another conversation, when that is opened.)
    asked.messages.pop();
    if (!$("text").value) { $("text").value = question; grow(); }
  }
  // Deleted meanwhile: it stays deleted.
  if (store.find(asked.id)) keep(asked);
  if (running === own) running = null;
  show();
}

/** How the answer came, for the note below it. */
function figures(usage, pieces, wait, writing) {
  const {prompt_tokens: prompt = 0, completion_tokens: count = pieces, prompt_tokens_details: details} = usage?.usage ?? {};
  const cached = details?.cached_tokens ?? 0;
  const {predicted_per_second: measured, draft_n: drafted = 0, draft_n_accepted: accepted = 0} = usage?.timings ?? {};
  const speed = measured || (pieces - 1) / (writing / 1000);
  return [
    `${count} tokens`,
    cached > 0 && `${Math.round(100 * cached / prompt)} % of the prompt kept from before (${cached} of ${prompt} tokens)`,
    count > 1 && `${speed.toFixed(1)} tokens/s`,
    accepted > 0 && `${accepted} of ${drafted} drafted tokens right`,
    `first after ${seconds(wait / 1000)}`,
  ];
}

function show() {
  const button = document.activeElement;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("send").disabled = !ready || !$("text").value.trim();
  // A button that goes takes the focus with it.
  if (button === $("send") && running) $("stop").focus();
  if (button === $("stop") && !running) $("text").focus();
}

function grow() {
  $("text").style.height = "auto";
  $("text").style.height = $("text").scrollHeight + 2 + "px";
  show();
}

// ---- the conversations ----

/** A conversation without a message is not kept. */
function keep(changed) {
  if (changed.messages.length) store.save(changed);
  else store.remove(changed.id);
  drawList();
}

function open(next) {
  running?.abort();
  conversation = next;
  store.remember("conversation", next.id);
  for (const element of [...$("talk").children]) if (element.id !== "empty") element.remove();
  $("empty").hidden = next.messages.length > 0;
  $("said").replaceChildren();
  // The page was closed before an answer came.
  if (next.messages.at(-1)?.role === "user") {
    $("text").value = next.messages.at(-1).content;
    next = {...next, messages: next.messages.slice(0, -1)};
    conversation = next;
    grow();
  }
  for (const message of next.messages) put(message);
  drawList();
}

function drawList() {
  $("trouble").textContent = store.trouble;
  $("trouble").hidden = !store.trouble;
  const rows = store.list().map(one => {
    const row = make("li", "");
    const name = make("button", "open", one.title || "Without a title");
    const bin = make("button", "bin", "×");
    name.type = bin.type = "button";
    if (one.id === conversation.id) name.setAttribute("aria-current", "true");
    bin.setAttribute("aria-label", `Delete ${one.title}`);
    bin.title = "Delete";
    name.addEventListener("click", () => { open(one); fold(); here(); });
    bin.addEventListener("click", () => discard(one));
    row.append(name, bin);
    return row;
  });
  $("list").replaceChildren(...rows);
  $("none").hidden = rows.length > 0;
}

function discard(one) {
  if (!confirm(`Delete the chat "${one.title}"?`)) return;
  store.remove(one.id);
  if (one.id === conversation.id) open(store.fresh());
  drawList();
  ($("list").querySelector("button") ?? $("fresh")).focus();
}

/** Where to go on: the field, but a phone's keyboard would hide what was just opened. */
function here() {
  (matchMedia("(hover: hover)").matches ? $("text") : $("talk")).focus();
}

function fold(unfolded = false) {
  $("chats").classList.toggle("open", unfolded);
  $("menu").setAttribute("aria-expanded", String(unfolded));
}

// ---- what people do ----

$("text").addEventListener("input", grow);
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("ask").addEventListener("submit", event => {
  event.preventDefault();
  const question = $("text").value.trim();
  if (running || !ready || !question) return;
  $("text").value = "";
  ask(question);
  grow();
});
$("stop").addEventListener("click", () => running?.abort());
$("fresh").addEventListener("click", () => {
  open(store.fresh());
  fold();
  $("text").focus();
});
$("menu").addEventListener("click", () => {
  fold(!$("chats").classList.contains("open"));
  if ($("chats").classList.contains("open")) $("list").querySelector("button")?.focus();
});
addEventListener("keydown", event => {
  if (event.key !== "Escape" || !$("chats").classList.contains("open")) return;
  fold();
  $("menu").focus();
});
$("unlock").addEventListener("submit", event => {
  event.preventDefault();
  unlock($("key").value.trim());
  ring.watch();
});

store.watch(id => {
  // The open conversation goes on from what another tab made of it, unless it grows here.
  if (id === conversation.id && !running) open(store.find(id) ?? store.fresh());
  else drawList();
});
const last = store.find(store.recall("conversation"));
if (last) open(last);
else drawList();
ring.start(locked, now => { ready = now; show(); });
