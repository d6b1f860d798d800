"""The page while the server is loading, unreachable, rejecting requests, protected by a key, or below a path."""

from __future__ import annotations

import pytest
from playwright.sync_api import BrowserContext, expect

from tests.web.chat_driver import ChatDriver, answered
from tests.web.fake import FakeServer, serving

FAILED = "Failed to load resource"
"""Chromium's console message for a failed request."""
BANNER, SEND, TOAST = "#banner", "#send", ".toast.bad"


def test_page_waits_while_the_model_is_loaded(context: BrowserContext, fake: FakeServer) -> None:
    fake.ready = (503, "loading")
    chat = ChatDriver(context, fake.url, ready=False)
    expect(chat.page.locator(BANNER)).to_have_text("The model is being loaded…")
    expect(chat.page.locator(SEND)).to_be_disabled()
    fake.ready = (503, "dead")
    expect(chat.page.locator(BANNER)).to_contain_text("The engine has failed")
    fake.ready = (200, "ready")
    chat.wait_until_ready()
    answered(chat, fake, "Hello", "Yes")
    chat.watch.assert_clean([FAILED])


def test_error_message_of_the_server_is_shown_with_a_retry(chat: ChatDriver, fake: FakeServer) -> None:
    fake.refusals = [
        (400, {"message": "the prompt has 1203 tokens, the context is 1000", "code": "context_length_exceeded"})
    ]
    chat.type("Hello")
    expect(chat.page.locator(TOAST)).to_contain_text("the prompt has 1203 tokens, the context is 1000")
    expect(chat.last()).to_contain_text("the prompt has 1203 tokens")
    chat.press("Try again", chat.page.locator(TOAST))
    fake.answer().complete("Now it works")
    expect(chat.last().locator(".body")).to_have_text("Now it works")
    chat.watch.assert_clean([FAILED])


def test_error_in_the_stream_keeps_the_text(chat: ChatDriver, fake: FakeServer) -> None:
    chat.type("Hello")
    answer = fake.answer()
    answer.say("Half")
    answer.event({"error": {"message": "out of memory: 1 of 2 blocks", "code": "out_of_memory"}})
    answer.event("[DONE]")
    answer.raw(b"")
    expect(chat.page.locator(TOAST)).to_contain_text("out of memory: 1 of 2 blocks")
    expect(chat.last().locator(".body")).to_have_text("Half")
    chat.press("Try again", chat.page.locator(TOAST))
    rest = fake.answer()
    assert rest.body["answer_token_ids"] == [7]
    rest.complete(" and half")
    expect(chat.last().locator(".body")).to_have_text("Half and half")


@pytest.mark.parametrize("piece", [b"data: {\n\n", b"garbage\n\n: comment\n\n"])
def test_malformed_stream_is_an_error(chat: ChatDriver, fake: FakeServer, piece: bytes) -> None:
    chat.type("Hello")
    answer = fake.answer()
    answer.raw(piece)
    answer.raw(b"")
    expect(chat.page.locator(TOAST)).to_be_visible()
    chat.wait_until_idle()
    chat.watch.assert_clean()


def test_key_is_requested_and_stored_for_the_tab_only(context: BrowserContext, fake: FakeServer) -> None:
    fake.key = "secret-key"
    chat = ChatDriver(context, fake.url, ready=False)
    page = chat.page
    expect(page.locator("#key")).to_be_visible()
    page.fill("#key-field", "wrong-key")
    chat.press("Use this key")
    expect(page.locator("#key-text")).to_contain_text("this API key is not known")
    page.fill("#key-field", "secret-key")
    page.keyboard.press("Enter")
    chat.wait_until_ready()
    chat.type("Hello")
    answer = fake.answer()
    assert answer.headers["authorization"] == "Bearer secret-key"
    answer.complete("Yes")
    chat.wait_until_idle()
    page.reload()
    chat.wait_until_ready()
    kept = page.evaluate("[JSON.stringify(localStorage), document.cookie, JSON.stringify(sessionStorage)]")
    assert "secret-key" not in kept[0] + kept[1] and "secret-key" in kept[2]
    other = context.new_page()
    other.goto(fake.url)
    expect(other.locator("#key")).to_be_visible()
    chat.watch.assert_clean([FAILED])


def test_page_reconnects_to_a_restarted_server(context: BrowserContext) -> None:
    with serving() as server:
        chat = ChatDriver(context, server.url)
        chat.type("Hello")
        answer = server.answer()
        answer.say("Half")
        expect(chat.last().locator(".body")).to_have_text("Half")
        port = int(server.url.rpartition(":")[2])
    expect(chat.page.locator(BANNER)).to_contain_text("The server does not answer")
    expect(chat.last()).to_contain_text("This answer was interrupted.")
    expect(chat.page.locator(TOAST)).to_have_count(0)
    expect(chat.page.locator(".bad")).to_have_count(0)
    expect(chat.last().locator(".body")).to_have_text("Half")
    expect(chat.page.locator(SEND)).to_be_disabled()
    with serving(port=port) as server:
        chat.wait_until_ready()
        chat.press("Continue")
        rest = server.answer()
        assert rest.body["answer_token_ids"] == [7]
        rest.complete(" whole")
        expect(chat.last().locator(".body")).to_have_text("Half whole")
    chat.watch.assert_clean([FAILED, "ERR_INCOMPLETE_CHUNKED_ENCODING"])


def test_chat_works_below_a_path(context: BrowserContext) -> None:
    with serving("/llm/chat") as server:
        chat = ChatDriver(context, server.url, "/llm/chat/")
        answered(chat, server, "Hello", "Yes")
        chat.page.fill("#draft", "one two")
        expect(chat.page.locator("#meter-text")).to_contain_text("of 1,000")
        assert server.paths and all(path.startswith("/llm/chat/") for path in server.paths)
        chat.page.click("#dashboard")
        expect(chat.page).to_have_url(f"{server.url}/llm/chat/dashboard")
