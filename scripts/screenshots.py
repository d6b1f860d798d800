"""Take the pictures of the documentation: the pages in Chromium, the chat in a terminal, with the real models.

`python scripts/screenshots.py` serves the default model and the calculator, and writes to `docs/images/`. Seeds are
fixed, so that a picture changes only with what it shows. Needs the `dev` extra and Chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pyte
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
QUESTION = "What is the capital of France?"
WIDTH, HEIGHT = 1280, 800
_PATIENCE_MS = 120_000
_PROMPT = r">( |\x08\x1b\[2C)"
"""The chat's prompt: the space behind it may be a movement of the cursor."""
_COLOURS = {"default": "#e7eaf0", "brown": "#f0bd6a"}


def main() -> None:
    """Take all pictures."""
    path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if path is None:
        raise SystemExit("chromium is not installed (`make browser`)")
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, serving("default") as chat, serving("calculator") as calculator:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        take_chats(browser, chat)
        take_tool_call(browser, calculator)
        take_dashboard(browser, chat)
        take_terminal(browser)
        browser.close()


@contextmanager
def serving(model: str) -> Iterator[str]:
    """Serve a model while the block runs; its address."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "nano_inference",
        "serve",
        "--model",
        model,
        "--port",
        "0",
        "--no-log-requests",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            found = re.search(r"listening on (\S+),", line)
            url = found[1] if found else url
            if line.startswith("ready:"):
                break
        try:
            yield url
        finally:
            process.terminate()


def opened(browser: Browser, url: str, *, settings: str = "{}") -> Page:
    """Open the chat page with settings, ready for a message."""
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
    context.add_init_script(f"localStorage.setItem('nano-inference.settings', '{settings}')")
    page = context.new_page()
    page.set_default_timeout(_PATIENCE_MS)
    page.goto(url)
    expect(page.locator("#send")).to_be_enabled(timeout=_PATIENCE_MS)
    return page


def ask(page: Page, question: str, count: int = 1) -> None:
    """Send a message and wait for so many answers."""
    page.fill("#draft", question)
    page.click("#send")
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(count, timeout=_PATIENCE_MS)
    expect(page.locator("#stop")).to_be_hidden(timeout=_PATIENCE_MS)
    expect(page.locator("#meter-text")).not_to_be_empty()


def take(page: Page, name: str) -> None:
    """Write a picture."""
    page.screenshot(path=IMAGES / f"{name}.png")
    print(IMAGES / f"{name}.png")


def take_chats(browser: Browser, url: str) -> None:
    """The page on a desktop, and its tokens."""
    settings = '{"sampling": {"max_tokens": 120}, "seed": 7}'
    page = opened(browser, url, settings=settings)
    ask(page, QUESTION)
    ask(page, "Write a Python function that returns the square of a number.", 2)
    take(page, "page-desktop")
    page.get_by_role("button", name="Tokens").last.click()
    page.locator(".tokens .token.p3, .tokens .token.p4").first.click()
    take(page, "page-tokens")
    page.context.close()


def take_tool_call(browser: Browser, url: str) -> None:
    """The calculator's call, opened."""
    page = opened(browser, url, settings='{"sampling": {"temperature": 0}}')
    ask(page, "What is 123 + 456?")
    page.locator("details.call summary").click()
    take(page, "page-tool-call")
    page.context.close()


def take_dashboard(browser: Browser, url: str) -> None:
    """The dashboard while two conversations are answered."""
    talkers = [opened(browser, url, settings='{"sampling": {"temperature": 1}, "seed": 5}') for _ in range(2)]
    context = browser.new_context(viewport={"width": WIDTH, "height": 1000})
    page = context.new_page()
    page.goto(f"{url}/dashboard")
    page.get_by_label("1 min", exact=True).check(force=True)
    for turn in range(2):
        for talker in talkers:
            talker.fill("#draft", f"Tell me a long story, part {turn}.")
            talker.click("#send")
        page.wait_for_timeout(8000)  # a picture of time passing needs some
        for talker in talkers:
            if talker.locator("#stop").is_visible():
                talker.click("#stop")
            expect(talker.locator("#stop")).to_be_hidden(timeout=_PATIENCE_MS)
        page.wait_for_timeout(3000)
    take(page, "dashboard")
    for one in (*talkers, page):
        one.context.close()


def take_terminal(browser: Browser) -> None:
    """The chat in a terminal of 92 by 20, drawn as text."""
    screen = pyte.Screen(92, 20)
    stream = pyte.Stream(screen)
    command = [sys.executable, "-P", "-m", "nano_inference", "chat", "--seed", "7", "--max-tokens", "70"]
    child = pexpect.spawn(command[0], command[1:], dimensions=(20, 92), encoding="utf-8", timeout=120)
    child.logfile_read = Feeder(stream)
    child.expect(_PROMPT)
    child.sendline(QUESTION)
    child.expect(r"tokens/s")
    child.expect(_PROMPT)
    child.sendline("/tokens on")
    child.expect(_PROMPT)
    child.sendline("And of Italy?")
    child.expect(r"tokens/s")
    child.expect(_PROMPT)
    page = browser.new_page(viewport={"width": 900, "height": 460})
    page.set_content(drawn(screen))
    take(page, "terminal")
    page.close()
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()


class Feeder:
    """Takes what a program writes and gives it to a terminal's emulator, as pexpect's log."""

    def __init__(self, stream: pyte.Stream) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Take text."""
        self._stream.feed(text)

    def flush(self) -> None:
        """There is nothing to wait for."""


def drawn(screen: pyte.Screen) -> str:
    """Return a terminal's screen as a page."""
    rows = [
        "".join(cell(screen.buffer[row][column]) for column in range(screen.columns)) for row in range(screen.lines)
    ]
    style = (
        "margin: 0; padding: 16px; background: #14171c; color: #e7eaf0; font: 15px/1.42 'DejaVu Sans Mono', monospace"
    )
    return f'<body style="margin: 0; background: #14171c"><pre style="{style}">{chr(10).join(rows)}</pre></body>'


def cell(char: pyte.screens.Char) -> str:
    """Return one character with its colours."""
    text = char.data.replace("&", "&amp;").replace("<", "&lt;") or " "
    front, back = css(char.fg), css(char.bg) if char.bg != "default" else "transparent"
    if char.reverse:
        front, back = "#14171c", front
    weight = ";font-weight:bold" if char.bold else ""
    line = ";text-decoration:underline" if char.underscore else ""
    return f'<span style="color:{front};background:{back}{weight}{line}">{text}</span>'


def css(name: str) -> str:
    """Return a terminal's colour as CSS has it."""
    return f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else _COLOURS.get(name, name.removeprefix("bright"))


if __name__ == "__main__":
    main()
