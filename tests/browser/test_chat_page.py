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
MEMBERS = int(os.environ["PRIMA_MEMBERS"])
LAYERS = int(os.environ["PRIMA_LAYERS"])

# Milliseconds; far more than anything takes.
DEADLINE = 120_000


@pytest.fixture(scope="module")
def browser():
    # Chromium's sandbox does not work for root; nothing here may reach for the network.
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=quiet)
        yield browser
        browser.close()


@pytest.fixture
def locked(browser):
    """The page as a stranger sees it. Everything that it asks for must come from the ring, and nothing may go wrong in it."""
    context = browser.new_context()
    context.set_default_timeout(DEADLINE)
    page = context.new_page()
    asked, wrong = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(URL)
    yield page
    context.close()
    assert all(url.startswith((URL, "data:")) for url in asked), asked
    assert wrong == []


@pytest.fixture
def page(locked):
    locked.fill("#key", KEY)
    locked.click("text=Unlock")
    expect(locked.locator("#unlock")).to_be_hidden(timeout=DEADLINE)
    return locked


def ask(page, question):
    page.fill("#text", question)
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


def test_a_question_is_answered(page):
    steer(page, temperature=0, max_tokens=24)
    before = int(page.inner_text("#generated"))
    ask(page, "Say hello.")
    expect(page.locator(".user .words")).to_have_text("Say hello.")
    expect(page.locator(".assistant .note")).to_have_text(
        re.compile(r"^\d+ tokens · [\d.]+ tokens/s · first after [\d.]+ m?s$"), timeout=DEADLINE)
    assert page.inner_text(".assistant .words").strip()
    tokens = int(re.match(r"\d+", page.inner_text(".assistant .note"))[0])
    # The token that ends an answer is counted as usage, but has no text.
    expected = before + tokens - 1
    until(page, lambda: int(page.inner_text("#generated")) >= expected)
    expect(page.locator("#running")).to_have_text("0")
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
    expect(page.locator("#running")).to_have_text("1", timeout=DEADLINE)
    page.click("#stop")
    expect(page.locator(".assistant .note")).to_contain_text("stopped")
    expect(page.locator("#running")).to_have_text("0", timeout=DEADLINE)
    kept = page.inner_text(".assistant .words")
    assert kept.strip()
    expect(page.locator("#send")).to_be_visible()


def test_what_is_written_stays_text(page):
    markup = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    answers(page, [piece(markup + "\n``"), piece("`html\n"), piece("<b>bold</b>\n"), piece("```\ndone"), "[DONE]"])
    page.on("dialog", lambda dialog: pytest.fail("markup was run"))
    ask(page, markup)
    expect(page.locator(".user .words")).to_have_text(markup)
    expect(page.locator(".assistant code")).to_have_text("<b>bold</b>")
    assert page.inner_text(".assistant .words").startswith(markup)
    assert page.inner_text(".assistant .words").endswith("done")
    assert page.locator("#talk img, #talk script, #talk b").count() == 0


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


def contrast(*colours):
    """The contrast ratio of WCAG 2 between two colours such as rgb(1, 2, 3)."""

    def luminance(colour):
        channels = (int(channel) / 255 for channel in re.findall(r"\d+", colour)[:3])
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted(map(luminance, colours))
    return (light + 0.05) / (dark + 0.05)
