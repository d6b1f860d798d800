"""Drives the chat page in a browser."""

from __future__ import annotations

import time
from typing import Any

from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.web.fake import TIMEOUT_S, Answer, FakeServer
from tests.web.watch import Watch


class ChatDriver:
    """The chat page of a server, in a new tab."""

    def __init__(self, context: BrowserContext, url: str, path: str = "/", *, ready: bool = True) -> None:
        self.page: Page = context.new_page()
        self.watch = Watch(self.page, url)
        self.failed: list[tuple[str, str]] = []
        """Failed requests: address and the browser's reason."""
        self.page.on("requestfailed", lambda request: self.failed.append((request.url, request.failure or "")))
        self.page.goto(url + path)
        if ready:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until the page can send messages."""
        expect(self.page.locator("#banner")).to_be_hidden()
        expect(self.page.locator("#send")).to_be_enabled()

    def type(self, text: str) -> None:
        self.page.fill("#draft", text)
        self.page.press("#draft", "Enter")

    def answers(self) -> Locator:
        return self.page.locator(".message.assistant")

    def last(self) -> Locator:
        """Return the last answer on the page."""
        return self.answers().last

    def press(self, name: str, within: Locator | None = None) -> None:
        (within or self.page).get_by_role("button", name=name, exact=True).click()

    def fact(self, name: str, within: Locator | None = None) -> Locator:
        """Return the value of an answer's detail."""
        return (within or self.last()).locator(f"dt:text-is('{name}') + dd")

    def wait_until_idle(self) -> None:
        """Wait until no answer is running."""
        expect(self.page.locator("#stop")).to_be_hidden()

    def until(self, expression: str) -> None:
        """Poll an expression in the page until it is true (the page's policy blocks `wait_for_function`)."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"still false: {expression}"
            self.page.wait_for_timeout(10)

    def set(self, **values: Any) -> None:
        """Change settings by the ids of their fields."""
        self.press("Settings")
        for name, value in values.items():
            self.page.fill(f"#{name}", str(value))
        self.press("Done")


def shown_text(locator: Locator) -> str:
    """Return the rendered text; before the first frame, a message with `content-visibility: auto` renders none."""
    locator.scroll_into_view_if_needed()  # waits for two frames
    text = locator.inner_text()
    assert text, "nothing is rendered"
    return text


def started(chat: ChatDriver, server: FakeServer, question: str, *words: str) -> Answer:
    """Send a question, stream the first words of the answer, and return the running answer."""
    chat.type(question)
    answer = server.answer()
    answer.say(*words)
    expect(chat.last().locator(".body")).to_have_text("".join(words))
    return answer


def answered(chat: ChatDriver, server: FakeServer, question: str, *words: str) -> None:
    """Send a question and stream the whole answer."""
    chat.type(question)
    server.answer().complete(*words)
    chat.wait_until_idle()
