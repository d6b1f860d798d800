"""Conversations (checklist 15 to 19): the context's meter, names, deletion, search, files, reloads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.web.desk import Desk, begun, told
from tests.web.fake import FakeServer

NAMES = ".chat-name"


def test_15_the_meter_counts_and_warns_before_the_context_is_full(desk: Desk, fake: FakeServer) -> None:
    page = desk.page
    page.fill("#draft", "one two three")
    expect(page.locator("#meter-text")).to_have_text("3 of 1,000 tokens")
    assert page.locator("#meter-warning").is_hidden()
    fake.tokens_per_word = 300
    page.fill("#draft", "one two three four")
    expect(page.locator("#meter-text")).to_have_text("1,200 of 1,000 tokens")
    expect(page.locator("#meter-warning")).to_contain_text("longer than the model's context")
    page.fill("#draft", "one two three")
    expect(page.locator("#meter-warning")).to_contain_text("Only 100 tokens are left")
    expect(page.locator("#meter-warning")).to_be_visible()


def test_16_conversations_are_named_renamed_deleted_and_brought_back(desk: Desk, fake: FakeServer) -> None:
    page = desk.page
    told(desk, fake, "About apples", "Red")
    desk.press("New chat")
    told(desk, fake, "About pears", "Green")
    expect(page.locator(NAMES)).to_have_text(["About pears", "About apples"])
    desk.press("Rename About apples")
    page.get_by_label("Name of the conversation").fill("Fruit")
    page.keyboard.press("Enter")
    expect(page.locator(NAMES)).to_have_text(["About pears", "Fruit"])
    page.locator(NAMES, has_text="Fruit").click()
    expect(desk.last().locator(".body")).to_have_text("Red")
    desk.press("Delete Fruit")
    expect(page.locator(NAMES)).to_have_text(["About pears"])
    expect(desk.answers()).to_have_count(0)
    desk.press("Undo")
    expect(page.locator(NAMES)).to_have_count(2)
    expect(desk.last().locator(".body")).to_have_text("Red")
    desk.press("Delete Fruit")
    expect(page.locator(NAMES)).to_have_text(["About pears"])
    page.reload()
    desk.wait_until_ready()
    expect(page.locator(NAMES)).to_have_text(["About pears"])
    desk.watch.assert_clean()


def test_17_search_looks_into_names_and_texts(desk: Desk, fake: FakeServer) -> None:
    told(desk, fake, "About apples", "They are red")
    desk.press("New chat")
    told(desk, fake, "About pears", "They are green")
    page = desk.page
    page.fill("#search", "RED")
    expect(page.locator(NAMES)).to_have_text(["About apples"])
    page.fill("#search", "pears")
    expect(page.locator(NAMES)).to_have_text(["About pears"])
    page.fill("#search", "plums")
    expect(page.locator("#no-chats")).to_have_text("Nothing found.")
    page.fill("#search", "")
    expect(page.locator(NAMES)).to_have_count(2)


def downloaded(desk: Desk, *names: str) -> str:
    with desk.page.expect_download() as download:
        for name in names:
            desk.press(name)
    return Path(download.value.path()).read_text()


def test_18_a_conversation_leaves_as_json_or_markdown_and_comes_back(
    desk: Desk, fake: FakeServer, tmp_path: Path
) -> None:
    told(desk, fake, "Hello", "First")
    desk.press("Regenerate")
    fake.answer().tell("Second")
    desk.wait_until_idle()
    assert downloaded(desk, "Export", "Markdown") == "# Hello\n\n## You\n\nHello\n\n## Answer\n\nSecond\n"
    text = downloaded(desk, "Export", "JSON (can be imported)")
    (chat,) = json.loads(text)["chats"]
    assert [one["text"] for one in chat["messages"]] == ["Hello", "First", "Second"]
    assert json.loads(downloaded(desk, "Export all"))["chats"][0]["conversation"]["title"] == "Hello"
    desk.press("Delete Hello")
    expect(desk.page.locator(NAMES)).to_have_count(0)
    path = tmp_path / "chat.json"
    path.write_text(text)
    desk.page.set_input_files("#file", path)
    expect(desk.page.locator(NAMES)).to_have_text(["Hello"])
    expect(desk.last().locator(".body")).to_have_text("Second")
    desk.press("Previous version", desk.last())
    expect(desk.last().locator(".body")).to_have_text("First")
    desk.watch.assert_clean()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "the file is not JSON"),
        ('{"format": "other"}', 'the file has no format "nano-inference-chats"'),
        ('{"format": "nano-inference-chats", "chats": [{}]}', "chats[0] is not a conversation with messages"),
        (
            '{"format": "nano-inference-chats", "chats": [{"conversation": {"title": "a", "system": ""}, '
            '"messages": [{"id": "x", "role": "<img>", "text": "t", "parent": null, "tokens": [], "parts": null, '
            '"versions": []}]}]}',
            "chats[0] is not a conversation with messages",
        ),
    ],
)
def test_18_a_file_that_is_none_is_refused(desk: Desk, tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    desk.page.set_input_files("#file", path)
    expect(desk.page.locator(".toast.bad")).to_contain_text(f"Not imported: {complaint}.")
    expect(desk.page.locator(NAMES)).to_have_count(0)
    desk.watch.assert_clean()


def test_19_a_reload_keeps_everything_also_half_an_answer(desk: Desk, fake: FakeServer) -> None:
    told(desk, fake, "Hello", "Whole")
    begun(desk, fake, "More", "Half", " an")
    desk.page.reload()
    desk.wait_until_ready()
    expect(desk.answers()).to_have_count(2)
    expect(desk.answers().first.locator(".body")).to_have_text("Whole")
    expect(desk.last().locator(".body")).to_have_text("Half an")
    expect(desk.last()).to_contain_text("This answer was interrupted.")
    desk.press("Continue")
    rest = fake.answer()
    assert rest.body["answer_token_ids"] == [7, 7]
    rest.tell(" answer")
    expect(desk.last().locator(".body")).to_have_text("Half an answer")
    desk.watch.assert_clean()


def test_an_answer_goes_on_in_a_conversation_that_is_not_open(desk: Desk, fake: FakeServer) -> None:
    answer = begun(desk, fake, "Slow", "One")
    desk.press("New chat")
    told(desk, fake, "Quick", "Done")
    answer.tell(" two")
    desk.page.locator(NAMES, has_text="Slow").click()
    expect(desk.last().locator(".body")).to_have_text("One two")
    desk.wait_until_idle()
    expect(desk.last()).not_to_contain_text("interrupted")


def test_the_system_prompt_belongs_to_its_conversation(desk: Desk, fake: FakeServer) -> None:
    desk.set(system="Rhyme.")
    told(desk, fake, "Hello", "Yellow")
    desk.press("New chat")
    desk.set(system="")
    desk.type("Hello")
    assert [one["role"] for one in fake.answer().body["messages"]] == ["user"]
    desk.press("Stop")
    desk.page.locator(NAMES).last.click()
    expect(desk.last().locator(".body")).to_have_text("Yellow")
    desk.type("Again")
    assert fake.answer().body["messages"][0] == {"role": "system", "content": "Rhyme."}
