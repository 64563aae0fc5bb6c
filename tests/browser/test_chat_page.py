"""The chat page in Chromium, before a ring that serves. tests/tests/browser_chat.rs starts the ring and says where it is."""

import json
import os
import re
import shutil

import pytest
from playwright.sync_api import expect, sync_playwright

URL = os.environ["PRIMA_URL"]
MODEL = os.environ["PRIMA_MODEL"]
KEY = os.environ["PRIMA_KEY"]
AXE = os.environ["PRIMA_AXE"]
MEMBERS = int(os.environ["PRIMA_MEMBERS"])
LAYERS = int(os.environ["PRIMA_LAYERS"])

# Milliseconds; far more than anything takes.
DEADLINE = 300_000
expect.set_options(timeout=DEADLINE)


@pytest.fixture(scope="module")
def browser():
    # Chromium's sandbox does not work for root; nothing here may reach for the network.
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=quiet)
        yield browser
        browser.close()


def new_context(browser, **options):
    context = browser.new_context(**options)
    context.set_default_timeout(DEADLINE)
    return context


@pytest.fixture
def locked(browser):
    """The page as a stranger sees it. Everything that it asks for must come from the ring, and nothing may go wrong in it."""
    context = new_context(browser)
    page = context.new_page()
    asked, wrong = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    # Markup that ran, or what the page's policy had to stop.
    page.on("dialog", lambda dialog: wrong.append(dialog.message) if dialog.type == "alert" else None)
    page.on("console", lambda message: wrong.append(message.text) if "Content Security Policy" in message.text else None)
    page.goto(URL)
    yield page
    context.close()
    assert all(url.startswith((URL, "data:")) for url in asked), asked
    assert wrong == []


@pytest.fixture
def page(locked):
    unlock(locked)
    return locked


def unlock(page):
    """And waits until the page knows of the ring: before, it takes no question."""
    page.fill("#key", KEY)
    page.click("text=Unlock")
    expect(page.locator("#unlock")).to_be_hidden()
    expect(page.locator("#members li")).to_have_count(MEMBERS)


def ask(page, question):
    page.fill("#text", question)
    # After a reload the page has to hear from the ring again.
    expect(page.locator("#send")).to_be_enabled()
    page.press("#text", "Enter")


def until(page, condition):
    """The page's content security policy forbids wait_for_function, which evaluates a string."""
    for _ in range(DEADLINE // 20):
        if condition():
            return
        page.wait_for_timeout(20)
    pytest.fail(f"not within {DEADLINE} ms")


def steer(page, **options):
    """From now on what the page asks for has these options too, and the ring answers."""

    def forward(route):
        route.continue_(post_data=json.dumps({**route.request.post_data_json, **options}))

    page.route("**/v1/chat/completions", forward)


def answers(page, events):
    """From now on the server's answer to a chat is this stream of events."""
    body = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def streams(page, pieces):
    """As answers(), but piece by piece, so that the page draws between them; the answer does not leave the page."""
    events = [json.dumps(one) for one in pieces] + ["[DONE]"]
    page.evaluate("""events => {
        const real = window.fetch;
        const write = async stream => {
            for (const event of events) {
                stream.enqueue(new TextEncoder().encode(`data: ${event}\\n\\n`));
                await new Promise(go => setTimeout(go, 1));
            }
            stream.close();
        };
        window.fetch = (url, options) => url.endsWith("/chat/completions")
            ? Promise.resolve(new Response(new ReadableStream({start: stream => void write(stream)}))) : real(url, options);
    }""", events)


def piece(text):
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def test_the_key_unlocks_the_page(locked):
    expect(locked.locator("#state")).to_contain_text("API key")
    locked.fill("#key", KEY + "x")
    with locked.expect_response("**/ring") as answer:
        locked.click("text=Unlock")
    assert answer.value.status == 401
    expect(locked.locator("#unlock")).to_be_visible()
    expect(locked.locator("#send")).to_be_disabled()
    locked.fill("#key", KEY)
    locked.press("#key", "Enter")
    expect(locked.locator("#unlock")).to_be_hidden()
    expect(locked.locator("#state")).to_contain_text(f"{LAYERS} layers on {MEMBERS} members")


def test_the_ring_is_shown(page):
    expect(page.locator("#model")).to_have_text(MODEL)
    expect(page.locator("#members li")).to_have_count(MEMBERS)
    windows = re.findall(r"(\d+)–(\d+)", page.inner_text("#members"))
    layers = sorted(layer for first, last in windows for layer in range(int(first), int(last) + 1))
    assert layers == list(range(LAYERS))
    # The full circle behind, and one arc for each window.
    assert page.locator("svg circle").count() == 1 + len(windows)


def test_what_is_read_from_disk_is_shown(page):
    with page.expect_response("**/ring") as answer:
        pass
    state = answer.value.json()
    member = state["ring"]["members"][0]
    member.update(resident_weight_bytes=3 * 2**30, streamed_weight_bytes=2**30, planned_read_bytes=2**29)
    page.route("**/ring", lambda route: route.fulfill(json=state))
    shown = page.locator("#members li").first
    expect(shown).to_contain_text("75 % of weights in memory, 1.0 GiB read from disk when a token needs them, planned 512.0 MiB per token;")
    page.unroute("**/ring")
    member.update(expert_misses=1234, read_bytes=5 * 2**30)

    def next_look(route):
        member["expert_hits"] += 9
        member["expert_misses"] += 1
        route.fulfill(json=state)

    page.route("**/ring", next_look)
    expect(shown).to_contain_text(
        re.compile(r"\d % of experts were there when needed, 90 % lately; read so far: 1,2\d\d experts, 5\.0 GiB in all;"))
    page.unroute("**/ring")


def test_a_ring_that_stands_still_is_shown(page):
    with page.expect_response("**/ring") as answer:
        pass
    state = answer.value.json()
    assert "standing_still" in state
    state["standing_still"] = "what goes round it is late"
    page.route("**/ring", lambda route: route.fulfill(json=state))
    expect(page.locator("#state")).to_have_text("Standing still: what goes round it is late")
    page.unroute("**/ring")
    expect(page.locator("#state")).to_contain_text(f"{LAYERS} layers on {MEMBERS} members")


def test_a_question_is_answered(page):
    steer(page, temperature=0, max_tokens=24)
    before = int(page.inner_text("#generated"))
    ask(page, "Say hello.")
    expect(page.locator(".user .words")).to_have_text("Say hello.")
    expect(page.locator(".assistant .note")).to_have_text(
        re.compile(r"^\d+ tokens · [\d.]+ tokens/s · first after [\d.]+ m?s( · cut off at the limit of tokens)?$"))
    assert page.inner_text(".assistant .words").strip()
    tokens = int(re.match(r"\d+", page.inner_text(".assistant .note"))[0])
    # The token that ends an answer is counted as usage, but has no text.
    expected = before + tokens - 1
    until(page, lambda: int(page.inner_text("#generated")) >= expected)
    expect(page.locator("#running")).to_have_text("0")
    expect(page.locator("#kv")).to_have_text(re.compile(r", \d+ % of planned$"))
    # The conversation goes on, and starts anew.
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And again.")
    roles = [message["role"] for message in sent.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]
    page.click("text=New chat")
    expect(page.locator(".user")).to_have_count(0)


def test_stop_stops_the_ring(page):
    steer(page, temperature=0)
    ask(page, "Write a very long story about a journey around the world, with many chapters.")
    until(page, lambda: len(page.inner_text(".assistant .words")) > 20)
    expect(page.locator("#running")).to_have_text("1")
    page.click("#stop")
    expect(page.locator(".assistant .note")).to_contain_text("stopped")
    expect(page.locator("#running")).to_have_text("0")
    kept = page.inner_text(".assistant .words")
    assert kept.strip()
    expect(page.locator("#send")).to_be_visible()


def test_what_is_written_stays_text(page):
    markup = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    answers(page, [piece(markup + "\n``"), piece("`html\n"), piece("<b>bold</b>\n"), piece("```\ndone"), "[DONE]"])
    ask(page, markup)
    expect(page.locator(".user .words")).to_have_text(markup)
    expect(page.locator(".assistant code")).to_have_text("<b>bold</b>")
    assert page.inner_text(".assistant .words").startswith(markup)
    assert page.inner_text(".assistant .words").endswith("done")
    assert page.locator("#talk img, #talk script, #talk b").count() == 0


HOSTILE = """<script>alert(1)</script>

<div onclick="alert(2)"><img src="http://evil.example/a.png" onerror="alert(3)"></div>

<svg onload=alert(4)><style>@import "http://evil.example/b.css"</style><iframe src="http://evil.example/c"></iframe>

<pre><code><img src=x onerror=alert(5)></code></pre>

![picture](http://evil.example/d.png) ![](javascript:alert(6)) ![x](data:text/html,<script>alert(7)</script>)

[a](javascript:alert(8)) [b](JaVaScRiPt:alert(9)) [c](&#106;avascript:alert(10)) [d](data:text/html,x) [e](vbscript:x) [f](/ring)
[g](java\tscript:alert(11)) <javascript:alert(12)>

[ok](https://evil.example/e "on\" onmouseover=alert(13)")

| <img src=x onerror=alert(14)> | a<br>b |
| --- | --- |
| `<img src=x onerror=alert(15)>` | [h](javascript:alert(16)) |

```"><img src=x onerror=alert(17)>
<img src="http://evil.example/f.png">
```
"""


@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_hostile_answers_do_and_fetch_nothing(page, cut):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    pieces = [piece(HOSTILE[start:start + cut]) for start in range(0, len(HOSTILE), cut)]
    streams(page, pieces)
    ask(page, "Be evil.")
    expect(page.locator(".assistant .note")).to_contain_text("tokens")
    expect(page.locator(".assistant a").last).to_be_visible()
    # Words with markup are shown as words, by an element that is harmless.
    tags = page.evaluate("[...new Set([...document.querySelectorAll('.assistant .words *')].map(e => e.localName))]")
    assert set(tags) <= {"div", "p", "br", "a", "code", "pre", "span", "button", "table", "thead", "tbody", "tr", "th", "td"}, tags
    hrefs = page.evaluate("[...document.querySelectorAll('.assistant a[href]')].map(a => a.href)")
    assert {"http://evil.example/d.png", "https://evil.example/e"} <= set(hrefs)
    assert all(re.match("https?://evil.example/", href) for href in hrefs), hrefs
    handlers = "[...document.querySelectorAll('.assistant *')].flatMap(e => e.getAttributeNames()).filter(n => n.startsWith('on') || n === 'src')"
    assert page.evaluate(handlers) == []
    # What watches would have been asked for by now; only the ring's state was.
    page.wait_for_timeout(500)
    paths = {url.removeprefix(URL) for url in asked}
    assert paths <= {"/ring"}, paths


LONG = """# A heading

Some **bold**, *slanted* and ~~struck~~ words with `code`, and [a link](https://example.org/).

## Steps

1. First
2. Second, with
   - one thing
   - [x] another that is done
   - [ ] and one that is not

> What somebody said.

| Member | Layers | Tokens per second |
| --- | ---: | :---: |
| m0 | 12 | 5.5 |
| a-member-with-quite-a-long-name-indeed | 18 | 6.25 |

```python
def greet(name):
    return f"Hello, {name}, this is a line that is much wider than the width of any telephone that people carry about"
```

3. An item with code:

   ```sh
   ls -la
   ```

---

The end.
"""


def test_markdown_is_rendered(page):
    streams(page, [piece(LONG[start:start + 5]) for start in range(0, len(LONG), 5)])
    ask(page, "Write Markdown.")
    words = page.locator(".assistant .words")
    expect(words).to_contain_text("The end.")
    for selector, text in [("h2", "A heading"), ("strong", "bold"), ("em", "slanted"), ("del", "struck"), ("p code", "code"),
                           ("a", "a link"), ("h3", "Steps"), ("blockquote", "What somebody said."), ("td >> nth=0", "m0")]:
        expect(words.locator(selector).first).to_have_text(text)
    expect(words.locator("ol").last).to_have_attribute("start", "3")
    expect(words.locator("td").nth(1)).to_have_attribute("align", "right")
    expect(words).to_contain_text("☑ another that is done")
    expect(words.locator("pre code").nth(1)).to_have_text("ls -la")
    assert words.locator("a").get_attribute("rel") == "noopener noreferrer"


def test_code_is_copied(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answers(page, [piece("```sh\necho <b>\nls\n```"), "[DONE]"])
    ask(page, "Code?")
    page.click(".copy")
    expect(page.locator(".copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "echo <b>\nls"
    # Over plain HTTP browsers give no clipboard.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    expect(page.locator(".copy")).to_have_text("Copy")
    page.click(".copy")
    expect(page.locator(".copy")).to_have_text("Copied")
    expect(page.locator(".copy")).to_be_focused()


def test_thoughts_and_calls_of_tools_are_shown(page):
    def delta(**delta):
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    def call(**function):
        return delta(tool_calls=[{"index": 0, "function": function}])

    usage = {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 30}},
             "timings": {"predicted_per_second": 12.5, "draft_n": 5, "draft_n_accepted": 3}}
    answers(page, [delta(reasoning_content="Let me "), delta(reasoning_content="look."), piece("I will look."),
                   call(name="get_<weather>", arguments=""), call(arguments='{"city":'), call(arguments='"Oslo"}'), usage, "[DONE]"])
    ask(page, "How is the weather?")
    expect(page.locator(".assistant details")).not_to_have_attribute("open", "")
    page.click("text=Thoughts")
    expect(page.locator(".assistant details p")).to_have_text("Let me look.")
    expect(page.locator(".call .name")).to_have_text("Calls the tool get_<weather>")
    assert page.inner_text(".call .arguments") == '{\n  "city": "Oslo"\n}'
    expect(page.locator(".assistant .note")).to_have_text(
        re.compile(r"^9 tokens · 75 % of the prompt kept from before \(30 of 40 tokens\) · 12\.5 tokens/s · 3 of 5 drafted tokens right · first after [\d.]+ m?s$"))
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "And now?")
    said = request.value.post_data_json["messages"][1]
    assert said["reasoning_content"] == "Let me look."
    assert said["content"].startswith("I will look.\n") and "tool_calls" not in said


def test_chats_are_kept_listed_and_deleted(page):
    answers(page, [piece("Certainly."), "[DONE]"])
    ask(page, "First question")
    expect(page.locator(".assistant")).to_have_text(re.compile("Certainly"))
    page.click("text=New chat")
    ask(page, "Second question")
    expect(page.locator("#list .open")).to_have_text(["Second question", "First question"])
    page.reload()
    expect(page.locator("#list .open")).to_have_text(["Second question", "First question"])
    expect(page.locator(".user .words")).to_have_text("Second question")
    page.click("#list >> text=First question")
    expect(page.locator(".user .words")).to_have_text("First question")
    expect(page.locator("#list [aria-current]")).to_have_text("First question")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("[aria-label='Delete First question']")
    expect(page.locator(".user")).to_have_count(0)
    expect(page.locator("#list .open")).to_be_focused()
    page.reload()
    expect(page.locator("#list .open")).to_have_text(["Second question"])


def test_a_question_stays_if_its_request_fails_as_the_page_goes(page):
    page.evaluate("""() => {
        const real = window.fetch;
        window.fetch = (url, options) => url.endsWith("/chat/completions")
            ? new Promise((_, fail) => addEventListener("beforeunload", () => fail(new TypeError("the page goes")))) : real(url, options);
    }""")
    ask(page, "Are you there?")
    expect(page.locator("#list .open")).to_have_text("Are you there?")
    page.reload()
    expect(page.locator("#list .open")).to_have_text("Are you there?")
    expect(page.locator("#text")).to_have_value("Are you there?")


@pytest.mark.parametrize("broken, told", [
    ("Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError') }", "no room left"),
    ("for (const n of ['localStorage', 'sessionStorage']) Object.defineProperty(window, n, {get() { throw new DOMException('', 'SecurityError') }})",
     "keeps nothing"),
    ("localStorage['prima.conversation.a'] = '{'; localStorage['prima.conversation.b'] = '{\"title\":\"\",\"at\":1,\"messages\":[null]}'", None),
])
def test_it_works_where_storage_is_broken(browser, broken, told):
    context = new_context(browser)
    context.add_init_script(broken)
    page = context.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(URL)
    unlock(page)
    answers(page, [piece("Certainly."), "[DONE]"])
    ask(page, "A question")
    expect(page.locator("#list .open")).to_have_text(["A question"])
    if told:
        expect(page.locator("#trouble")).to_contain_text(told)
    else:
        expect(page.locator("#trouble")).to_be_hidden()
    expect(page.locator(".assistant .words")).to_have_text("Certainly.")
    page.click("text=New chat")
    page.click("#list >> text=A question")
    expect(page.locator(".assistant .words")).to_have_text("Certainly.")
    assert wrong == []
    context.close()


def test_a_question_that_is_left_before_its_answer_is_kept(page):
    page.route("**/v1/chat/completions", lambda route: None)
    ask(page, "A question")
    page.click("text=New chat")
    page.click("#list >> text=A question")
    expect(page.locator("#text")).to_have_value("A question")


def test_room_made_by_deleting_is_used(page):
    """A browser gives a page about five million characters."""
    page.evaluate("""() => {
        const chat = content => JSON.stringify({title: "Old", at: 1, messages: [{role: "user", content}, {role: "assistant", content: ""}]});
        let room = 8e6;
        for (let content = ""; room > 1; room = Math.floor(room / 2)) {
            try { localStorage["prima.conversation.old"] = chat(content + "x".repeat(room)); content += "x".repeat(room); } catch {}
        }
    }""")
    page.reload()
    answers(page, [piece("Certainly."), "[DONE]"])
    ask(page, "A question")
    expect(page.locator("#trouble")).to_contain_text("no room left")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("[aria-label='Delete Old']")
    expect(page.locator("#trouble")).to_be_hidden()
    page.reload()
    expect(page.locator("#list .open")).to_have_text(["A question"])


def test_keys_alone_are_enough(page):
    page.set_viewport_size({"width": 360, "height": 700})
    answers(page, [piece("Certainly."), "[DONE]"])
    page.focus("#text")
    page.keyboard.type("A question")
    page.keyboard.press("Tab")
    expect(page.locator("#send")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#said")).to_contain_text("Certainly.")
    expect(page.locator("#said")).to_contain_text("The answer is complete.")
    # The button that had the focus went, and came back.
    expect(page.locator("#text")).to_be_focused()
    page.focus("#menu")
    page.keyboard.press("Enter")
    expect(page.locator("#menu")).to_have_attribute("aria-expanded", "true")
    expect(page.locator("#list .open")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#chats")).to_be_hidden()
    expect(page.locator("#menu")).to_be_focused()


def test_only_the_end_of_a_long_answer_is_drawn_again(page):
    """While an answer grows, only its end is read and drawn again."""
    text = "\n\n".join(f"Paragraph {n} has **words** and `code` in it, as many as paragraphs have." for n in range(1500))
    page.evaluate("""() => { window.lost = 0; new MutationObserver(all => { for (const one of all) lost += one.removedNodes.length; })
        .observe(document.getElementById('talk'), {childList: true, subtree: true});
        window.read = []; const lex = marked.Lexer.prototype.lex;
        marked.Lexer.prototype.lex = function(text) { read.push(text.length); return lex.call(this, text); }; }""")
    streams(page, [piece(text[start:start + 150]) for start in range(0, len(text), 150)])
    ask(page, "Write a book.")
    expect(page.locator(".assistant .note")).to_contain_text("tokens")
    assert page.locator(".assistant .block").count() == 1500
    lost, (*growing, whole) = page.evaluate("[lost, read]")
    assert 0 < lost < 1500
    # Each time what is new and a few paragraphs before it; all of it only at the end.
    assert sum(growing) <= len(text) + 500 * len(growing)
    assert whole == len(text) and len(growing) > 1


def test_errors_are_told_and_the_question_is_kept(page):
    lost = {"error": {"message": "ring member m1 was lost: connection reset"}}
    answers(page, [piece("Half an "), lost])
    ask(page, "Hello?")
    expect(page.locator(".assistant.error .note")).to_contain_text("m1 was lost: connection reset")
    expect(page.locator(".assistant .words")).to_have_text("Half an")
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json={"error": {"message": "full"}}))
    ask(page, "Once more?")
    expect(page.locator(".error .note").last).to_have_text("full")
    expect(page.locator("#text")).to_have_value("Once more?")


@pytest.mark.parametrize("width", [360, 800, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(page, width, scheme):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for id in ("text", "send", "state", "members"):
        expect(page.locator(f"#{id}")).to_be_in_viewport()
    ink, ground = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    assert contrast(ink, ground) >= 7


@pytest.mark.parametrize("width", [360, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, width, scheme):
    context = new_context(browser, viewport={"width": width, "height": 800}, color_scheme=scheme)
    context.add_init_script(path=AXE)
    page = context.new_page()
    page.goto(URL)
    expect(page.locator("#unlock")).to_be_visible()
    found = serious(page)
    unlock(page)
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "Let me think."}}]}
    call = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": '{"at": "it"}'}}]}}]}
    answers(page, [thought, piece(LONG), call, "[DONE]"])
    ask(page, "Write Markdown.")
    expect(page.locator(".call")).to_be_visible()
    found += serious(page)
    page.unroute("**/v1/chat/completions")
    answers(page, [piece("Half an "), {"error": {"message": "ring member m1 was lost"}}])
    ask(page, "Another question, whose words are many, so that they do not fit into the list of chats")
    expect(page.locator(".error")).to_be_visible()
    if width == 360:
        page.click("#menu")
    found += serious(page)
    context.close()
    assert found == []


def serious(page):
    """What axe-core finds that hinders people seriously or wholly: its rule, and where."""
    result = page.evaluate("axe.run()")
    assert len(result["passes"]) > 10
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in result["violations"] if one["impact"] in ("serious", "critical")]


def contrast(*colours):
    """The contrast ratio of WCAG 2 between two colours such as rgb(1, 2, 3)."""

    def luminance(colour):
        channels = (int(channel) / 255 for channel in re.findall(r"\d+", colour)[:3])
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted(map(luminance, colours))
    return (light + 0.05) / (dark + 0.05)
