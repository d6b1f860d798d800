"""The choice of a model on the chat page, with a real server of two models and with scripted states."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext, expect

from tests.server.served import Process
from tests.server.tiny import make_tiny
from tests.web.chat_driver import ChatDriver, answered
from tests.web.fake import FakeServer

MODELS = [{"id": "fake", "state": "loaded"}, {"id": "other", "state": "unloaded"}, {"id": "bad", "state": "failed"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with room for one of two models."""
    root = tmp_path_factory.mktemp("chosen")
    one, two = make_tiny(root / "one"), make_tiny(root / "two", positions=256)
    options = ["--port", "0", "--num-threads", "1", "--kv-cache-bytes", "8MiB", "--max-loaded-models", "1"]
    process = Process(["--model", str(one), "--further-model", f"two={two}", *options], {})
    try:
        (listening,) = process.wait_for(r"^listening on (\S+), loading one")
        process.wait_for("^ready: one")
        yield listening[1]
    finally:
        assert process.end() == 0


def test_another_model_is_loaded_and_answers(context: BrowserContext, url: str) -> None:
    chat = ChatDriver(context, url)
    picker = chat.page.get_by_label("Model for the next answer")
    expect(picker).to_have_value("one")
    expect(picker.locator("option")).to_have_text(["one", "two (not loaded)"])
    chat.set(**{"set-max_tokens": 4})
    picker.select_option("two")
    chat.wait_until_ready()
    expect(chat.page.locator("#model")).to_have_text("two")
    expect(picker.locator("option")).to_have_text(["one (not loaded)", "two"])
    chat.type("hello")
    chat.wait_until_idle()
    expect(chat.last().locator(".body")).not_to_be_empty()
    chat.press("two")  # the facts are those of the chosen model
    expect(chat.page.locator("#facts")).to_contain_text("can have 256 tokens")
    chat.page.keyboard.press("Escape")
    chat.page.reload()
    chat.wait_until_ready()
    expect(picker).to_have_value("two")


def test_the_chosen_model_is_named_in_requests_and_a_missing_one_is_forgotten(
    context: BrowserContext, fake: FakeServer
) -> None:
    fake.info["models"] = MODELS
    chat = ChatDriver(context, fake.url)
    picker = chat.page.get_by_label("Model for the next answer")
    expect(picker.locator("option")).to_have_text(["fake", "other (not loaded)", "bad (failed to load)"])
    fake.by_model["other"] = {**fake.info, "model": "other"}
    picker.select_option("other")
    expect(chat.page.locator("#model")).to_have_text("other")
    chat.type("hello")
    answer = fake.answer()
    assert answer.body["model"] == "other"
    expect(picker).to_be_disabled()
    answer.complete("hi")
    chat.wait_until_idle()
    expect(picker).to_be_enabled()
    del fake.by_model["other"]  # the server was restarted without it
    chat.page.reload()
    chat.wait_until_ready()
    expect(chat.page.locator("#model")).to_have_text("fake")
    answered(chat, fake, "hello", "again")


def test_a_model_that_cannot_be_loaded_is_said_and_another_one_can_be_chosen(
    context: BrowserContext, fake: FakeServer
) -> None:
    fake.info["models"] = MODELS
    fake.by_model["bad"] = None
    chat = ChatDriver(context, fake.url)
    picker = chat.page.get_by_label("Model for the next answer")
    picker.select_option("bad")
    expect(chat.page.locator("#banner")).to_contain_text("could not be loaded: damaged")
    expect(chat.page.locator("#send")).to_be_disabled()
    fake.by_model["other"] = {**fake.info, "model": "other"}
    picker.select_option("other")
    chat.wait_until_ready()
    expect(chat.page.locator("#model")).to_have_text("other")
