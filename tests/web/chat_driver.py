"""What a person does with the chat page, in words."""

from __future__ import annotations

import time
from typing import Any

from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.web.fake import PATIENCE_S, Answer, FakeServer
from tests.web.watch import Watch


class ChatDriver:
    """A chat page in front of a server, watched."""

    def __init__(self, context: BrowserContext, url: str, path: str = "/", *, ready: bool = True) -> None:
        self.page: Page = context.new_page()
        self.watch = Watch(self.page, url)
        self.failed: list[tuple[str, str]] = []
        """Requests that came to nothing: their address and the browser's reason."""
        self.page.on("requestfailed", lambda request: self.failed.append((request.url, request.failure or "")))
        self.page.goto(url + path)
        if ready:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until the page takes messages."""
        expect(self.page.locator("#banner")).to_be_hidden()
        expect(self.page.locator("#send")).to_be_enabled()

    def type(self, text: str) -> None:
        """Write a message and send it."""
        self.page.fill("#draft", text)
        self.page.press("#draft", "Enter")

    def answers(self) -> Locator:
        """The answers on the page."""
        return self.page.locator(".message.assistant")

    def last(self) -> Locator:
        """The last answer on the page."""
        return self.answers().last

    def press(self, name: str, within: Locator | None = None) -> None:
        """Press a button by its name."""
        (within or self.page).get_by_role("button", name=name, exact=True).click()

    def fact(self, name: str, within: Locator | None = None) -> Locator:
        """What an answer's details say under a name."""
        return (within or self.last()).locator(f"dt:text-is('{name}') + dd")

    def wait_until_idle(self) -> None:
        """Wait until no answer is under way."""
        expect(self.page.locator("#stop")).to_be_hidden()

    def until(self, expression: str) -> None:
        """Ask the page again and again until something holds there; its policy lets no script of ours wait in it."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"it never came about: {expression}"
            self.page.wait_for_timeout(10)

    def set(self, **values: Any) -> None:
        """Fill in the settings and close them."""
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
    """Ask, and have the fake server say the first words; return its answer, which is under way."""
    chat.type(question)
    answer = server.answer()
    answer.say(*words)
    expect(chat.last().locator(".body")).to_have_text("".join(words))
    return answer


def answered(chat: ChatDriver, server: FakeServer, question: str, *words: str) -> None:
    """Ask, and have the fake server answer."""
    chat.type(question)
    server.answer().tell(*words)
    chat.wait_until_idle()
