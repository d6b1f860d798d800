"""Take pictures of the chat page in its states, at two sizes and in both themes, in front of a server that is scripted.

`python scripts/screenshots.py --looks DIRECTORY` runs this for this tree, and with `--before REVISION` for an earlier
one, too, with that tree's own pages and tests/web: states that it does not have are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.web.chromium import chromium_path
from tests.web.fake import FakeServer, serving

SIZES = {"1280": (1280, 800), "390": (390, 844)}
QUESTION = "What are the roots of a quadratic equation, and how does one find them?"
ANSWER = r"""The roots of $ax^2 + bx + c = 0$ are

\[ x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a} \]

with \(\Delta = b^2 - 4ac\). For example:

| Equation | Roots | Note |
|:--|--:|:-:|
| $x^2 - 1 = 0$ | 1, -1 | two |
| $x^2 = 0$ | 0 | one |

```python
def roots(a, b, c): return None  # left to the reader
```
"""


def main() -> None:
    """Take the pictures and write them into the directory that is given."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, serving() as server:
        server.info |= {"parameters": 134_515_008, "architecture": "LlamaForCausalLM", "layers": 30, "device": "cpu"}
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        for size, (width, height) in SIZES.items():
            for theme in ("light", "dark"):
                take_states(browser, server, width, height, theme, out / f"{size}-{theme}")
        browser.close()


def take_states(browser: Browser, server: FakeServer, width: int, height: int, theme: str, base: Path) -> None:
    """Lead one page through its states."""
    is_phone = width < 720
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if theme == "dark" else "light",
        has_touch=is_phone,
        is_mobile=is_phone,
    )
    page = context.new_page()
    page.goto(server.url)
    expect(page.locator("#send")).to_be_enabled()

    def shot(name: str) -> None:
        page.wait_for_timeout(300)  # what moves has come to rest
        page.screenshot(path=f"{base}-{name}.png")

    ask(page, server)
    page.locator("#scroll").evaluate("(one) => { one.scrollTop = 0; }")
    shot("answer")
    for name, selector in {"settings": "#settings-open", "about": "#model"}.items():
        page.click(selector)
        shot(name)
        page.keyboard.press("Escape")
    tokens = page.get_by_role("button", name="Tokens", exact=True).first
    tokens.press("Enter")  # a pointer would come to lie on a token, and open its alternatives
    page.mouse.move(width / 2, 5)
    shot("tokens")
    tokens.press("Enter")
    if page.locator("summary", has_text="Details").count():
        page.locator("summary", has_text="Details").first.click()
        page.set_input_files("#attach-file", {"name": "notes.md", "mimeType": "", "buffer": b"# Notes\n\nOne line.\n"})
        page.locator("#attached summary").click()
        shot("details")
    take_list(page, shot, is_phone=is_phone)
    if page.locator("#text-open").count():
        take_text(page, server)
        shot("text")
    context.close()


def ask(page: Page, server: FakeServer) -> None:
    """Ask, and have the server answer in pieces."""
    page.fill("#draft", QUESTION)
    page.click("#send")
    answer = server.answer()
    answer.say(*(ANSWER[at : at + 6] for at in range(0, len(ANSWER), 6)))
    answer.finish(version="step-7")
    answer.end(None)
    expect(page.locator("#stop")).to_be_hidden()


def take_list(page: Page, shot: Callable[[str], None], *, is_phone: bool) -> None:
    """The list of conversations, with the pointer on one where there is a pointer."""
    if is_phone:
        page.click("#open-sidebar")
    else:
        page.locator(".chat-name").first.hover()
    shot("list")


def take_text(page: Page, server: FakeServer) -> None:
    """A text that is continued, with its tokens."""
    page.click("#text-open")
    page.fill("#text-field", "Once upon a time")
    page.click("#text-go")
    answer = server.answer()
    answer.write(" there", " was", " a", " model")
    answer.end_text()
    page.click("#text-show")


if __name__ == "__main__":
    main()
