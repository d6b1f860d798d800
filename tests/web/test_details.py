"""Icons, the list of conversations, details, defaults, presets, attached files, tables, phones."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.web.chat_driver import ChatDriver, shown_text
from tests.web.fake import FakeServer
from tests.web.test_states import TOAST

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "min_p": 0.05, "top_k": 20, "max_tokens": 512}


def chats(title: str) -> str:
    """Return the text of an export file with one conversation."""
    conversation = {"title": title, "system": "", "chosen": {}, "created": 0}
    entries = [{"conversation": conversation, "messages": []}]
    return json.dumps({"format": "nano-inference-chats", "version": 1, "chats": entries})


def test_chat_defaults_are_sent_for_empty_settings(chat: ChatDriver, fake: FakeServer) -> None:
    fake.info |= {
        "chat_defaults": {**DEFAULTS, "repetition_penalty": None},
        "chat_defaults_source": "default for chats",
    }
    chat.page.reload()
    chat.wait_until_ready()
    chat.press("Settings")
    for name, value in DEFAULTS.items():
        assert chat.page.get_attribute(f"#set-{name}", "placeholder") == str(value)
    expect(chat.page.locator("#defaults-source")).to_have_text(
        "A field left empty has the value shown in grey. Temperature, top-p, top-k and min-p: default for chats."
    )
    chat.page.fill("#set-temperature", "0.1")
    chat.press("Done")
    chat.type("Hello")
    body = fake.answer().body
    assert {name: body[name] for name in DEFAULTS} == {**DEFAULTS, "temperature": 0.1}
    assert "repetition_penalty" not in body
    expect(chat.fact("Settings")).to_contain_text("temperature 0.1, top-p 0.95")


def test_saved_system_prompts(chat: ChatDriver, fake: FakeServer) -> None:
    page = chat.page
    chat.press("Settings")
    page.select_option("#preset", label="Brief")
    prompt = page.input_value("#system")
    assert "few words" in prompt
    page.fill("#system", "Speak like a sailor.")
    expect(page.locator("#preset")).to_have_value("")
    chat.press("Save current")
    chat.press("Done")
    chat.type("Hello")
    assert fake.answer().body["messages"][0] == {"role": "system", "content": "Speak like a sailor."}
    chat.press("Stop")
    page.reload()
    chat.wait_until_ready()
    chat.press("Settings")
    page.select_option("#preset", label="Translator")
    assert "Translate" in page.input_value("#system")
    expect(page.locator("#preset-delete")).to_be_hidden()
    page.select_option("#preset", label="Speak like a sailor.")
    assert page.input_value("#system") == "Speak like a sailor."
    chat.press("Delete", page.locator("#settings"))
    expect(page.locator("#preset option", has_text="sailor")).to_have_count(0)
    chat.watch.assert_clean()


def attach(chat: ChatDriver, name: str, content: bytes) -> None:
    chat.page.set_input_files("#attach-file", {"name": name, "mimeType": "", "buffer": content})


def test_text_file_is_attached_shown_and_removed(chat: ChatDriver, fake: FakeServer) -> None:
    page = chat.page
    attach(chat, "notes.md", b"One ```code``` two\n````\nfour\n````\n")
    attach(chat, "gone.txt", b"never sent")
    chat.press("Remove gone.txt")
    chip = page.locator("#attached li")
    expect(chip).to_have_count(1)
    chip.locator("summary").click()
    fenced = "notes.md:\n`````md\nOne ```code``` two\n````\nfour\n````\n`````"
    assert shown_text(chip.locator("pre")) == fenced
    chat.type("What does it say?")
    body = fake.answer().body
    assert body["messages"] == [{"role": "user", "content": f"What does it say?\n\n{fenced}"}]
    expect(page.locator(".message.user")).to_contain_text("notes.md:")
    expect(page.locator(".chat-name")).to_have_text("What does it say?")
    assert page.locator("#attached").is_hidden()
    chat.watch.assert_clean()


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("big.txt", b"x" * (64 * 1024 + 1), "“big.txt” is too large: at most 64 kB can be attached to a message."),
        ("a.png", b"\x89PNG\r\n\x1a\n\x00\x00", "“a.png” is not a text file (UTF-8)."),
        ("a.bin", b"abc\x00def", "“a.bin” is not a text file (UTF-8)."),
    ],
)
def test_unsuitable_file_is_refused_with_a_message(chat: ChatDriver, name: str, content: bytes, complaint: str) -> None:
    attach(chat, name, content)
    expect(chat.page.locator(f"{TOAST} span")).to_have_text(complaint)
    assert chat.page.locator("#attached").is_hidden()


def test_size_limit_applies_to_all_files_together(chat: ChatDriver) -> None:
    attach(chat, "one.txt", b"x" * 40_000)
    expect(chat.page.locator("#attached li")).to_have_count(1)
    attach(chat, "two.txt", b"x" * 40_000)
    expect(chat.page.locator(TOAST)).to_contain_text("at most 64 kB")
    expect(chat.page.locator("#attached li")).to_have_count(1)
