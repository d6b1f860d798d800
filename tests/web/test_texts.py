"""The text pane: continuing a text with a base model and with a chat model."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, expect

from tests.server.tiny import running
from tests.web.chat_driver import ChatDriver
from tests.web.fake import FakeServer

FIELD = "#text-field"


@pytest.fixture
def base(context: BrowserContext, fake: FakeServer) -> ChatDriver:
    """The page of a model without a chat template."""
    fake.info["chats"] = False
    chat = ChatDriver(context, fake.url, ready=False)
    expect(chat.page.locator("#text")).to_be_visible()
    return chat


def test_base_model_continues_a_text(base: ChatDriver, fake: FakeServer) -> None:
    page = base.page
    assert page.locator("#composer").is_hidden() and page.locator("#banner").is_hidden()
    expect(page.locator("#text-go")).to_be_disabled()
    page.fill(FIELD, "Once upon")
    base.press("Continue")
    answer = fake.answer()
    assert answer.body["prompt"] == "Once upon" and answer.body["stream"] and answer.body["max_tokens"] == 200
    assert "messages" not in answer.body
    answer.write(" a", " time")
    expect(page.locator(FIELD)).to_have_value("Once upon a time")
    expect(page.locator(FIELD)).not_to_be_editable()
    answer.end_text()
    expect(page.locator("#text-go")).to_be_visible()
    expect(page.locator("#text-figures")).to_contain_text("2 tokens")
    base.press("Continue")
    assert fake.answer().body["prompt"] == "Once upon a time"
    base.watch.assert_clean()


def test_continuation_shows_tokens_and_alternatives(base: ChatDriver, fake: FakeServer) -> None:
    page = base.page
    page.fill(FIELD, "Once")
    base.press("Continue")
    answer = fake.answer()
    assert answer.body["logprobs"] == 5
    answer.write(" upon", " a", " time")
    answer.end_text()
    base.press("Tokens")
    tokens = page.locator("#text-tokens .tokens .token")
    expect(tokens).to_have_text([" upon", " a", " time"])
    expect(tokens.first).to_have_class("token p0")
    tokens.nth(1).click()
    panel = page.locator("#alternatives")
    expect(panel).to_contain_text("90.5 %")
    page.get_by_role("button", name='Continue with " B"').click()
    other = fake.answer()
    assert other.body["prompt"] == "Once upon B"
    other.write(" side")
    other.end_text()
    expect(page.locator(FIELD)).to_have_value("Once upon B side")
    base.watch.assert_clean()


def test_real_server_continues_a_text(context: BrowserContext, tiny_directory: Path) -> None:
    with running(tiny_directory) as server:
        chat = ChatDriver(context, server.url)
        page = chat.page
        chat.press("Settings")
        page.fill("#seed", "4")
        for name, value in {"temperature": "1", "max_tokens": "12"}.items():
            page.fill(f"#set-{name}", value)
        chat.press("Done")
        chat.press("Continue a text")
        page.fill(FIELD, "Tell me")
        chat.press("Continue")
        expect(page.locator("#text-go")).to_be_visible()
        body = {"prompt": "Tell me", "seed": 4, "temperature": 1, "max_tokens": 12, "logprobs": 5}
        answered = server.post("/v1/completions", body).json()["choices"][0]
        expect(page.locator(FIELD)).to_have_value("Tell me" + answered["text"])
        chat.press("Tokens")
        tokens = page.locator("#text-tokens .tokens .token")
        expect(tokens).to_have_count(len(answered["logprobs"]["tokens"]))
        tokens.nth(2).click()
        expect(page.locator("#alternatives li")).to_have_count(len(answered["logprobs"]["top_logprobs"][2]))
        chat.watch.assert_clean()
