"""Measure the chat page: size, first paint on loopback, frame rate while 10,000 tokens arrive and in long histories.

The server serves the page, and a script the answers at a given speed, without a model.
Needs Chromium and `pip install playwright`. Prints a table and, last, a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from nano_inference.server.pages import load_page
from tests.web.chat_driver import ChatDriver
from tests.web.chromium import chromium_path
from tests.web.fake import FakeServer, serving

WORDS = (
    "The",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "then",
    "**rests**",
    "a while.\n\n",
)
FRAMES = """() => { window.frames = []; let last = performance.now();
    const tick = (now) => { window.frames.push(now - last); last = now; requestAnimationFrame(tick); };
    requestAnimationFrame(tick); }"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="page loads")
    parser.add_argument("--tokens", type=int, default=10_000, help="of the long answer")
    parser.add_argument("--speed", type=int, default=500, help="tokens a second")
    arguments = parser.parse_args()
    path = chromium_path()
    if path is None:
        raise SystemExit("chromium is not installed")
    with sync_playwright() as playwright, serving() as server:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        cold = [first_paint(browser, server.url) for _ in range(arguments.repeat)]
        tab = browser.new_page()
        warm = [painted(tab, server.url) for _ in range(arguments.repeat + 1)][1:]
        stream = streamed(browser, server, arguments.tokens, arguments.speed)
        history = scrolled(browser, server)
        browser.close()
    facts = {
        "packed_bytes": len(load_page("chat").packed),
        "first_paint_ms": round(statistics.median(warm), 1),
        "first_paint_of_a_new_profile_ms": round(statistics.median(cold), 1),
        "stream_frames_per_s": round(stream[0], 1),
        "stream_slow_frames_share": round(stream[1], 4),
        "history_frames_per_s": round(history[0], 1),
        "history_slow_frames_share": round(history[1], 4),
    }
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<34}{value}")
    print(json.dumps(facts))


def first_paint(browser: Browser, url: str) -> float:
    """Return milliseconds from navigation to the first contentful paint, the start of a browser's process included."""
    context = browser.new_context()
    paint = painted(context.new_page(), url)
    context.close()
    return paint


def painted(page: Page, url: str) -> float:
    """Return the same in a tab that is there already; the page is fetched anew."""
    page.goto(url)
    page.wait_for_selector("#send:enabled")
    return float(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))


def streamed(browser: Browser, server: FakeServer, count: int, speed: int) -> tuple[float, float]:
    """Return frames a second, and the share of those over 20 ms, while a long answer comes."""
    chat = ChatDriver(browser.new_context(), server.url)
    chat.type("Hello")
    answer = server.answer()
    chat.page.evaluate(FRAMES)
    began = time.perf_counter()
    for n in range(count):
        answer.say(f"{WORDS[n % len(WORDS)]}{n % 997} ")  # an answer that repeats itself is stopped
        ahead = n / speed - (time.perf_counter() - began)
        if ahead > 0.02:
            time.sleep(ahead)
    frames = rates(chat.page)
    answer.end()
    chat.wait_until_idle()
    chat.page.context.close()
    return frames


def scrolled(browser: Browser, server: FakeServer) -> tuple[float, float]:
    """Return the same while a history of 200 messages is scrolled through."""
    chat = ChatDriver(browser.new_context(), server.url)
    for _ in range(100):
        chat.type("Hello")
        server.answer().complete(*(word + " " for word in 4 * WORDS))
        chat.wait_until_idle()
    chat.page.evaluate(FRAMES)
    for step in range(60):
        chat.page.mouse.move(700, 400)
        chat.page.mouse.wheel(0, -400 if step < 30 else 400)
        chat.page.wait_for_timeout(30)
    frames = rates(chat.page)
    chat.page.context.close()
    return frames


def rates(page: Page) -> tuple[float, float]:
    """Return frames a second and the share of slow ones since they have been counted."""
    frames: list[float] = page.evaluate("window.frames")
    return 1000 * len(frames) / sum(frames), sum(frame > 20 for frame in frames) / len(frames)


if __name__ == "__main__":
    main()
