// One message of a conversation on the page: words, thoughts, calls of tools, and a note on how the answer came.
import {make} from "./make.js";
import {spoken, write} from "./markdown.js";

/** An element for `message`, as it is now. */
export function bubble(message) {
  const element = make("article", message.role);
  element.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  element.append(make("div", "words"), make("div", "note"));
  update(element, message);
  return element;
}

/** Brings `element` to what `message` is now, while it is `growing` or at its end. */
export function update(element, message, growing = false) {
  const words = element.querySelector(":scope > .words");
  if (message.role === "user") words.textContent = message.content;
  else write(words, message.content, growing);
  if (message.reasoning_content) think(element, words, message.reasoning_content);
  for (const [index, call] of (message.tool_calls ?? []).entries()) show(element, index, call);
  element.lastChild.textContent = message.note ?? "";
  element.classList.toggle("error", message.failed === true);
}

/** What a model thinks before it answers; folded, since few read it. */
function think(element, words, thought) {
  let details = element.querySelector(":scope > .thought");
  if (!details) {
    details = make("details", "thought");
    details.append(make("summary", "", "Thoughts"), make("p", ""));
    words.before(details);
  }
  details.lastChild.textContent = thought;
}

/** A call of a tool that the model asks for. The page has no tools: it shows the call, and nothing runs. */
function show(element, index, call) {
  let shown = element.querySelectorAll(":scope > .call")[index];
  if (!shown) {
    shown = make("div", "call");
    shown.setAttribute("role", "group");
    shown.setAttribute("aria-label", "Call of a tool");
    shown.append(make("div", "name"), make("div", "arguments"));
    element.lastChild.before(shown);
  }
  shown.firstChild.textContent = `Calls the tool ${call.function?.name ?? ""}`;
  shown.lastChild.textContent = pretty(call.function?.arguments ?? "");
}

/** Arguments come in pieces: they are laid out once they are whole. */
function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

/** Adds the pieces of a delta to the message. */
export function add(message, {content, reasoning_content, tool_calls}) {
  if (content) message.content += content;
  if (reasoning_content) message.reasoning_content = (message.reasoning_content ?? "") + reasoning_content;
  for (const piece of tool_calls ?? []) {
    message.tool_calls ??= [];
    const index = Math.min(piece.index ?? 0, message.tool_calls.length);
    const call = message.tool_calls[index] ??= {function: {name: "", arguments: ""}};
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
  }
}

/** As the API takes it. It would want results for calls, and the page has none, so calls go back as words. */
export function sent({role, content, reasoning_content, tool_calls}) {
  const calls = (tool_calls ?? []).map(call => JSON.stringify({name: call.function?.name, arguments: call.function?.arguments}));
  const message = {role, content: [content, ...calls].filter(part => part).join("\n")};
  return reasoning_content ? {...message, reasoning_content} : message;
}

/** Reads a growing answer to who listens, block by block: half a word is worse than a moment later. */
export class Reader {
  #place;
  #said = 0;

  constructor(place) {
    this.#place = place;
    place.replaceChildren();
  }

  read(element, whole) {
    const blocks = element.querySelector(":scope > .words").children;
    const ready = whole ? blocks.length : blocks.length - 1;
    for (; this.#said < ready; this.#said++) this.say(spoken(blocks[this.#said]));
  }

  say(text) {
    this.#place.append(make("p", "", text));
  }
}
