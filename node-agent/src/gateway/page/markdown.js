// Markdown of a model's answer, as elements of the page. Marked reads it, DOMPurify lets through only what is listed here: markup of
// the answer itself stays text, pictures become links, and nothing is fetched before somebody follows a link.
import {make} from "./make.js";

const {Marked} = window.marked;
const DOMPurify = window.DOMPurify;

const ALLOWED = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: ["p", "br", "hr", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "a", "ul", "ol", "li", "blockquote",
    "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "start", "align", "class"],
  ADD_URI_SAFE_ATTR: ["start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

const markdown = new Marked({
  gfm: true,
  breaks: true,
  tokenizer: {
    // Markup is no markup here, except the line breaks that models write into tables.
    html: () => undefined,
    tag: source => {
      const raw = /^<br *\/?>/i.exec(source)?.[0];
      return raw && {type: "br", raw};
    },
  },
  renderer: {
    // The page's own title is the first heading.
    heading({tokens, depth}) {
      const level = Math.min(depth + 1, 6);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    image({href, text, raw}) {
      return this.link({href, tokens: [{type: "text", raw, text: text || href}]});
    },
    checkbox: ({checked}) => checked ? "☑ " : "☐ ",
  },
});

/** What each block shows, so that blocks that did not change stay as they are. */
const shown = new WeakMap();

/** How many characters and blocks of a growing text, by its place, nothing that follows can change. */
const settled = new WeakMap();

/** As many blocks at the end of a growing text are read again: what comes next may belong to them. */
const OPEN = 3;

/**
 * Shows `text` in `place`, one element per block. While it is `growing` only its end is read again, so that a token costs the same
 * however long the answer is; the last time all of it is read.
 */
export function write(place, text, growing) {
  // As Marked does, so that lengths are those of what it read.
  text = text.replace(/\r\n?/g, "\n");
  const from = growing && settled.get(place) || {length: 0, blocks: 0};
  const tokens = markdown.lexer(text.slice(from.length));
  // A definition of a link at the end changes blocks before it.
  const links = Object.keys(tokens.links).length;
  const blocks = tokens.filter(({type}) => type !== "space" && type !== "def");
  blocks.forEach((token, index) => draw(place, from.blocks + index, token, links));
  while (place.children.length > from.blocks + blocks.length) place.lastChild.remove();
  if (growing && blocks.length > OPEN) {
    const whole = tokens.slice(0, tokens.indexOf(blocks.at(-OPEN))).map(({raw}) => raw).join("");
    if (text.startsWith(whole, from.length)) {
      settled.set(place, {length: from.length + whole.length, blocks: from.blocks + blocks.length - OPEN});
    }
  }
}

function draw(place, index, token, links) {
  const old = place.children[index];
  const before = old && shown.get(old);
  const now = {raw: token.raw.trimEnd(), links, language: token.type === "code" ? token.lang ?? "" : null};
  if (before?.raw === now.raw && before.links === links) return;
  if (now.language !== null && before?.language === now.language) {
    // In place: the button keeps the focus, and a selection stays.
    old.querySelector("code").textContent = token.text;
    shown.set(old, now);
    return;
  }
  const block = make("div", "block");
  block.append(now.language !== null ? code(now.language, token.text) : clean(token));
  shown.set(block, now);
  if (old) old.replaceWith(block);
  else place.append(block);
}

/** What a screen reader says of a block; nobody listens to code being spelled. */
export function spoken(block) {
  const code = block.querySelector(":scope > .code");
  return code ? `${code.getAttribute("aria-label")}.` : block.textContent;
}

function clean(token) {
  const fragment = DOMPurify.sanitize(markdown.parser([token]), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const block of fragment.querySelectorAll("pre")) {
    const language = /^language-(\S+)/.exec(block.firstElementChild?.className)?.[1];
    block.replaceWith(code(language, block.textContent.replace(/\n$/, "")));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const wide = scroller("div", "table", "Table");
    table.replaceWith(wide);
    wide.append(table);
  }
  return fragment;
}

function code(language, text) {
  const name = language?.split(/\s/)[0] ?? "";
  const block = make("div", "code");
  block.setAttribute("role", "group");
  block.setAttribute("aria-label", name ? `Code in ${name}` : "Code");
  const button = make("button", "copy", "Copy");
  button.type = "button";
  button.addEventListener("click", () => copy(button, block.querySelector("code")));
  const head = make("div", "head");
  head.append(make("span", "", name), button);
  const words = scroller("pre", "", "Code");
  words.append(make("code", "", text));
  block.append(head, words);
  return block;
}

/** What is wider than the page scrolls by itself, with the keyboard too. */
function scroller(tag, className, label) {
  const element = make(tag, className);
  element.tabIndex = 0;
  element.setAttribute("role", "region");
  element.setAttribute("aria-label", label);
  return element;
}

async function copy(button, code) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    // Browsers give the clipboard to secure pages only, and a machine at home is reached by plain HTTP.
    getSelection().selectAllChildren(code);
    copied = document.execCommand("copy");
    getSelection().removeAllRanges();
    button.focus();
  }
  button.textContent = copied ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}
