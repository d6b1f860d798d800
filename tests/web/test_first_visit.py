"""What a first visitor of the chat page meets."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.web.chat_driver import ChatDriver, answered, started
from tests.web.fake import TIMEOUT_S, FakeServer


def test_message_field_has_the_focus(chat: ChatDriver) -> None:
    expect(chat.page.locator("#draft")).to_be_focused()


def test_example_question_is_put_into_the_message_field(chat: ChatDriver, fake: FakeServer) -> None:
    chat.press("What is the capital of France?")
    expect(chat.page.locator("#draft")).to_have_value("What is the capital of France?")
    expect(chat.page.locator("#draft")).to_be_focused()
    chat.page.keyboard.press("Enter")
    answer = fake.answer()
    assert answer.body["messages"] == [{"role": "user", "content": "What is the capital of France?"}]
    answer.complete("Paris")
    chat.wait_until_idle()
    expect(chat.page.locator("#empty")).to_be_hidden()
    chat.watch.assert_clean()


def test_notice_of_an_empty_list_is_at_the_top_of_the_list(chat: ChatDriver) -> None:
    notice, search = (chat.page.locator(name).bounding_box() for name in ("#no-chats", "#search"))
    assert notice is not None and search is not None
    assert 0 <= notice["y"] - search["y"] - search["height"] < 40


def test_escape_stops_the_answer_while_alternatives_are_shown(chat: ChatDriver, fake: FakeServer) -> None:
    """Wherever the focus is."""
    answered(chat, fake, "Hello", "Whole", " answer")
    chat.press("Tokens", chat.last())
    token = chat.page.locator(".tokens .token").first
    for is_focused in (True, False):
        answer = started(chat, fake, "Again", "Half")
        token.press("Enter")
        if not is_focused:
            chat.page.focus("#draft")
        expect(chat.page.locator("#alternatives")).to_be_visible()
        chat.page.keyboard.press("Escape")
        assert answer.gone.wait(TIMEOUT_S), "the request was not aborted"
        chat.wait_until_idle()
        expect(chat.page.locator("#alternatives")).to_be_hidden()
        expect(chat.last()).to_contain_text("Stopped.")
    chat.watch.assert_clean()


def test_settings_discarded_by_escape_can_be_applied(chat: ChatDriver, fake: FakeServer) -> None:
    notice = chat.page.locator("#toasts")
    chat.press("Settings")
    chat.page.keyboard.press("Escape")
    expect(chat.page.locator("#settings")).to_be_hidden()
    expect(notice).to_be_empty()
    chat.press("Settings")
    chat.page.fill("#set-temperature", "0.3")
    chat.page.keyboard.press("Escape")
    expect(notice).to_contain_text("The changed settings were discarded.")
    chat.press("Apply them")
    chat.type("Hello")
    assert fake.answer().body["temperature"] == 0.3


def test_help_names_the_distribution_of_the_probabilities(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Hello", "Yes")
    chat.press("Help")
    expect(chat.page.locator("#help")).to_contain_text("the model's own, at temperature 1 and without top-p")
