"""Sizes of the pages, and incremental rendering. `benchmarks/page.py` measures the speed."""

from __future__ import annotations

import gzip
import re

import httpx2
from playwright.sync_api import expect

from nano_inference.server.pages import bundled, load_page
from tests.web.chat_driver import ChatDriver
from tests.web.fake import FakeServer

MAX_PACKED = 82_000


def test_pages_are_small_and_self_contained() -> None:
    for name in ("chat", "dashboard", "docs"):
        page = load_page(name)
        assert len(page.packed) <= MAX_PACKED and gzip.decompress(page.packed) == page.body
        html = page.body.decode()
        assert not [line for line in html.splitlines() if line.startswith(("import ", "export "))]
        outside = re.sub(r"<template .*?</template>", "", html)
        assert "<script src" not in outside and 'rel="stylesheet"' not in html and "sourceMappingURL" not in html
        assert bundled(f"{name}/page.html") == html


def test_complete_blocks_are_not_rendered_again(chat: ChatDriver, fake: FakeServer) -> None:
    chat.type("Hello")
    answer = fake.answer()
    answer.say(*(f"Paragraph {n} of *many*.\n\n" for n in range(300)), "```\n", "line 1\n")
    body = chat.last().locator(".body")
    expect(body).to_contain_text("line 1")
    chat.page.evaluate("document.querySelectorAll('.body .block, .body pre').forEach((one, at) => { one.mark = at; })")
    answer.say(*(f"line {n}\n" for n in range(2, 200)))
    expect(body).to_contain_text("line 199")
    marked = "[...document.querySelectorAll('.body .block, .body pre')].every((one, at) => one.mark === at)"
    assert chat.page.evaluate(marked), "text was only appended to the incomplete code block"
    answer.end()
    chat.wait_until_idle()
    expect(body.locator("p")).to_have_count(300)
    expect(body.locator("pre")).to_contain_text("line 199")


def test_page_is_compressed_and_cached(server_url: str) -> None:
    with httpx2.Client(base_url=server_url, timeout=60) as client:
        first = client.get("/", headers={"accept-encoding": "gzip"})
        assert first.headers["content-encoding"] == "gzip" and first.text == load_page("chat").body.decode()
        again = client.get("/", headers={"if-none-match": first.headers["etag"]})
        assert again.status_code == 304 and not again.content
        plain = client.get("/", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers and plain.text == first.text
