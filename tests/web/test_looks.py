"""Accessibility: themes, phones, keyboard, screen readers."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, expect

from tests.web.chat_driver import ChatDriver, answered, started
from tests.web.fake import FakeServer
from tests.web.watch import axe_violations

PHONE = {"width": 360, "height": 640}
BLOCKS = (
    *("# A", "text `code` [link](https://example.org)", "```python\nx = 'a'  # b\n```"),
    *("| a | b |\n|---|--:|\n| 1 | 2 |", "> quote", "\\[\\frac{a}{b}\\]", "and $x^2$"),
)
RICH = "\n\n".join(BLOCKS)


def fill(chat: ChatDriver, fake: FakeServer) -> None:
    """Fill the page with all kinds of content."""
    answered(chat, fake, "Hello", *re.findall(r"\S+\s*", RICH))
    chat.type("More")
    answer = fake.answer()
    parts = [
        {"type": "python", "text": "1+1"},
        {"type": "python_output", "text": "2"},
        {"type": "text", "text": "<think>"},
    ]
    answer.choice({"content": "[1+1 → 2]", "parts": parts}, token_ids=[1, 2], mask=[1, 0])
    answer.event({"error": {"message": "it broke"}})
    answer.raw(b"")
    expect(chat.page.locator(".toast.bad")).to_be_visible()


DESKTOP = {"width": 1280, "height": 800}
LOOKS = [("light", DESKTOP), ("dark", PHONE)]
"""Theme and size; each of them once, because neither changes what the other does."""


@pytest.mark.parametrize(("theme", "size"), LOOKS, ids=lambda one: one if isinstance(one, str) else str(one["width"]))
def test_axe_finds_no_violations(browser: Browser, fake: FakeServer, theme: str, size: dict[str, int]) -> None:
    context = browser.new_context(viewport=size, color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
    chat = ChatDriver(context, fake.url)
    page = chat.page
    found = {"empty": axe_violations(page)}
    fill(chat, fake)
    found["answers"] = axe_violations(page)
    expect(page.locator("math")).to_have_count(2)
    chat.answers().first.locator("summary", has_text="Details").click()
    page.set_input_files("#attach-file", {"name": "a.txt", "mimeType": "", "buffer": b"one\ntwo\n"})
    page.locator("#attached summary").click()
    found["details and a file"] = axe_violations(page)
    chat.press("Remove a.txt")
    chat.press("Tokens", chat.answers().first)
    page.locator(".tokens .token").first.click()
    found["tokens"] = axe_violations(page)
    page.keyboard.press("Escape")
    for name, selector in {
        "settings": "#settings-open",
        "help": "#help-open",
        "about": "#model",
        "export": "#export",
    }.items():
        page.click(selector)
        found[name] = axe_violations(page)
        page.keyboard.press("Escape")
    page.click("#settings-open")
    page.select_option("#preset", label="Brief")
    found["preset"] = axe_violations(page)
    page.keyboard.press("Escape")
    if size == PHONE:
        page.click("#open-sidebar")
        found["sidebar"] = axe_violations(page)
    else:
        page.locator(".chat-name").hover()
        found["a conversation's buttons"] = axe_violations(page)
    chat.press("Continue a text")
    page.fill("#text-field", "Once")
    chat.press("Continue")
    answer = fake.answer()
    answer.write(" upon", " a", " time")
    answer.end_text()
    chat.press("Tokens", page.locator("#text"))
    page.locator("#text-tokens .tokens .token").first.click()
    found["text"] = axe_violations(page)
    context.close()
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_keyboard_shortcuts(chat: ChatDriver, fake: FakeServer) -> None:
    page = chat.page
    page.focus("#draft")
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two")
    page.keyboard.press("Enter")
    answer = fake.answer()
    assert answer.body["messages"][0]["content"] == "One\nTwo"
    answer.complete("Yes")
    chat.wait_until_idle()
    page.keyboard.press("ArrowUp")
    field = page.get_by_label("Edit your message")
    expect(field).to_be_focused()
    expect(field).to_have_value("One\nTwo")
    page.keyboard.press("Escape")
    expect(field).to_have_count(0)
    page.keyboard.press("Control+k")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.press("Control+Shift+O")
    expect(chat.answers()).to_have_count(0)
    expect(page.locator("#draft")).to_be_focused()
    page.locator("#title").click()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    page.locator("#title").click()
    page.keyboard.press("/")
    expect(page.locator("#draft")).to_be_focused()
    assert page.input_value("#draft") == ""
    page.keyboard.press("Meta+k")
    expect(page.locator("#search")).to_be_focused()
    chat.watch.assert_clean()


def test_enter_during_input_method_composition_does_not_send(chat: ChatDriver) -> None:
    chat.page.fill("#draft", "にほ")
    chat.page.eval_on_selector(
        "#draft",
        "(one) => one.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true}))",
    )
    assert chat.page.input_value("#draft") == "にほ" and chat.page.locator(".message").count() == 0


def test_live_region_receives_sentences(chat: ChatDriver, fake: FakeServer) -> None:
    page = chat.page
    assert page.get_attribute("#messages", "role") == "log" and page.get_attribute("#spoken", "aria-live") == "polite"
    answer = started(chat, fake, "Hello", "Pi is", " 3.14")
    assert page.locator("#spoken p").count() == 0
    answer.say(". Well", " then")
    expect(page.locator("#spoken p")).to_have_text(["Pi is 3.14."])
    answer.end()
    expect(page.locator("#spoken p")).to_have_text(["Pi is 3.14.", "Well then"])
