"""Conversations: the context meter, renaming, deletion, search, export and import, reloads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.web.chat_driver import ChatDriver, answered, started
from tests.web.fake import FakeServer

NAMES = ".chat-name"


def test_conversations_are_renamed_deleted_and_restored(chat: ChatDriver, fake: FakeServer) -> None:
    page = chat.page
    answered(chat, fake, "About apples", "Red")
    chat.press("New chat")
    answered(chat, fake, "About pears", "Green")
    expect(page.locator(NAMES)).to_have_text(["About pears", "About apples"])
    chat.press("Rename About apples")
    page.get_by_label("Name of the conversation").fill("Fruit")
    page.keyboard.press("Enter")
    expect(page.locator(NAMES)).to_have_text(["About pears", "Fruit"])
    page.locator(NAMES, has_text="Fruit").click()
    expect(chat.last().locator(".body")).to_have_text("Red")
    chat.press("Delete Fruit")
    expect(page.locator(NAMES)).to_have_text(["About pears"])
    expect(chat.answers()).to_have_count(0)
    chat.press("Undo")
    expect(page.locator(NAMES)).to_have_count(2)
    expect(chat.last().locator(".body")).to_have_text("Red")
    chat.press("Delete Fruit")
    expect(page.locator(NAMES)).to_have_text(["About pears"])
    page.reload()
    chat.wait_until_ready()
    expect(page.locator(NAMES)).to_have_text(["About pears"])
    chat.watch.assert_clean()


def test_search_finds_titles_and_texts(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "About apples", "They are red")
    chat.press("New chat")
    answered(chat, fake, "About pears", "They are green")
    page = chat.page
    page.fill("#search", "RED")
    expect(page.locator(NAMES)).to_have_text(["About apples"])
    page.fill("#search", "pears")
    expect(page.locator(NAMES)).to_have_text(["About pears"])
    page.fill("#search", "plums")
    expect(page.locator("#no-chats")).to_have_text("Nothing found.")
    page.fill("#search", "")
    expect(page.locator(NAMES)).to_have_count(2)


def downloaded(chat: ChatDriver, *names: str) -> str:
    with chat.page.expect_download() as download:
        for name in names:
            chat.press(name)
    return Path(download.value.path()).read_text()


def test_export_as_json_or_markdown_and_import(chat: ChatDriver, fake: FakeServer, tmp_path: Path) -> None:
    answered(chat, fake, "Hello", "First")
    chat.press("Regenerate")
    fake.answer().complete("Second")
    chat.wait_until_idle()
    assert downloaded(chat, "Export", "Markdown") == "# Hello\n\n## You\n\nHello\n\n## Answer\n\nSecond\n"
    text = downloaded(chat, "Export", "JSON (can be imported)")
    (entry,) = json.loads(text)["chats"]
    assert [one["text"] for one in entry["messages"]] == ["Hello", "First", "Second"]
    assert json.loads(downloaded(chat, "Export all"))["chats"][0]["conversation"]["title"] == "Hello"
    chat.press("Delete Hello")
    expect(chat.page.locator(NAMES)).to_have_count(0)
    path = tmp_path / "chat.json"
    path.write_text(text)
    chat.page.set_input_files("#file", path)
    expect(chat.page.locator(NAMES)).to_have_text(["Hello"])
    expect(chat.last().locator(".body")).to_have_text("Second")
    chat.press("Previous version", chat.last())
    expect(chat.last().locator(".body")).to_have_text("First")
    chat.watch.assert_clean()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "the file is not JSON"),
        ('{"format": "nano-inference-chats", "chats": [{}]}', "chats[0] is not a conversation with messages"),
        (
            '{"format": "nano-inference-chats", "chats": [{"conversation": {"title": "a", "system": ""}, '
            '"messages": [{"id": "x", "role": "<img>", "text": "t", "parent": null, "tokens": [], "parts": null, '
            '"versions": []}]}]}',
            "chats[0] is not a conversation with messages",
        ),
    ],
)
def test_import_of_an_invalid_file_is_refused(chat: ChatDriver, tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    chat.page.set_input_files("#file", path)
    expect(chat.page.locator(".toast.bad")).to_contain_text(f"Not imported: {complaint}.")
    expect(chat.page.locator(NAMES)).to_have_count(0)
    chat.watch.assert_clean()


def test_reload_keeps_conversations_and_partial_answers(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Hello", "Whole")
    started(chat, fake, "More", "Half", " an")
    chat.page.reload()
    chat.wait_until_ready()
    expect(chat.answers()).to_have_count(2)
    expect(chat.answers().first.locator(".body")).to_have_text("Whole")
    expect(chat.last().locator(".body")).to_have_text("Half an")
    expect(chat.last()).to_contain_text("This answer was interrupted.")
    chat.press("Continue")
    rest = fake.answer()
    assert rest.body["answer_token_ids"] == [7, 7]
    rest.complete(" answer")
    expect(chat.last().locator(".body")).to_have_text("Half an answer")
    chat.watch.assert_clean()
