"""Icons, the list of conversations, details, defaults, presets, attached files, tables, phones."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, expect

from tests.web.chat_driver import ChatDriver, answered, shown_text, started
from tests.web.fake import FakeServer, serving
from tests.web.test_states import BANNER, FAILED, TOAST

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "min_p": 0.05, "top_k": 20, "max_tokens": 512}
NAMES = ".chat-name"


def test_wide_table_scrolls_and_keeps_its_alignment(chat: ChatDriver, fake: FakeServer) -> None:
    chat.page.set_viewport_size({"width": 390, "height": 700})
    head = "| left | middle | right | " + " | ".join(f"column number {n}" for n in range(9)) + " |\n"
    rule = "|:--|:-:|--:|" + "---|" * 9 + "\n"
    answered(chat, fake, "Hello", head, rule, "| a | b | c |" + " wordwordword |" * 9 + "\n")
    cells = chat.last().locator("td")
    for index, side in enumerate(("left", "center", "right")):
        expect(cells.nth(index)).to_have_css("text-align", side)
        expect(chat.last().locator("th").nth(index)).to_have_css("text-align", side)
    assert chat.page.evaluate("document.documentElement.scrollWidth") == 390
    box = chat.page.evaluate(
        "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])(document.querySelector('.table'))"
    )
    assert box[0] > box[1], "the table scrolls inside its box"
    assert chat.page.evaluate("document.querySelector('.table').getBoundingClientRect().right") <= 390
    height = chat.page.evaluate("document.querySelector('td:last-child').getBoundingClientRect().height")
    assert height < 50, "words are not broken"


def chats(title: str) -> str:
    """Return the text of an export file with one conversation."""
    conversation = {"title": title, "system": "", "chosen": {}, "created": 0}
    entries = [{"conversation": conversation, "messages": []}]
    return json.dumps({"format": "nano-inference-chats", "version": 1, "chats": entries})


def test_conversations_are_grouped_by_date(chat: ChatDriver, tmp_path: Path) -> None:
    now = datetime(2026, 3, 15, 12)
    path = tmp_path / "chats.json"
    for title, ago in {"Five": 100, "Four": 20, "Three": 5, "Two": 1, "One": 0}.items():
        chat.page.clock.set_fixed_time(now - timedelta(days=ago))
        path.write_text(chats(title))
        chat.page.set_input_files("#file", path)
        expect(chat.page.locator(NAMES).first).to_have_text(title)
    chat.page.reload()
    chat.wait_until_ready()
    lines = [line for line in chat.page.locator("#chats").inner_text().splitlines() if line.strip()]
    assert lines == [
        *("Today", "One", "Yesterday", "Two", "Previous 7 days", "Three"),
        *("Previous 30 days", "Four", "December 2025", "Five"),
    ]


def test_continued_conversation_moves_to_today(chat: ChatDriver, fake: FakeServer, tmp_path: Path) -> None:
    now = datetime(2026, 3, 15, 12)
    path = tmp_path / "chats.json"
    for title, ago in {"Old": 9, "New": 1}.items():
        chat.page.clock.set_fixed_time(now - timedelta(days=ago))
        path.write_text(chats(title))
        chat.page.set_input_files("#file", path)
        expect(chat.page.locator(NAMES).first).to_have_text(title)
    chat.page.clock.set_fixed_time(now)
    chat.page.locator(NAMES, has_text="Old").click()
    answered(chat, fake, "Hello", "Yes")
    expect(chat.page.locator("#chats h2")).to_have_text(["Today", "Yesterday"])


def test_list_shows_full_titles_and_buttons_on_hover_or_focus(chat: ChatDriver, fake: FakeServer) -> None:
    page = chat.page
    answered(chat, fake, "A question about many things, so that it needs more than a line", "Yes")
    name = page.locator(NAMES)
    title = name.inner_text()
    assert name.get_attribute("title") == title and len(title) > 50
    assert name.evaluate("(one) => one.scrollWidth <= one.clientWidth && one.scrollHeight <= one.clientHeight")
    expect(name).to_have_css("text-overflow", "clip")
    buttons = page.locator(".row-actions")
    page.mouse.move(900, 400)
    page.focus("#draft")
    expect(buttons).to_have_css("opacity", "0")
    name.hover()
    expect(buttons).to_have_css("opacity", "1")
    page.mouse.move(900, 400)
    expect(buttons).to_have_css("opacity", "0")
    page.focus(f"[aria-label='Rename {title}']")
    expect(buttons).to_have_css("opacity", "1")


def test_buttons_have_icons_labels_and_tooltips(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Hello", "Yes")
    chat.press("Regenerate")
    fake.answer().complete("No")
    chat.wait_until_idle()
    page = chat.page
    found = page.evaluate(
        """() => [...document.querySelectorAll('button')].filter((one) => one.offsetParent).map((one) => ({
            text: one.textContent.trim(), label: one.getAttribute('aria-label'), title: one.title,
            icon: one.querySelector('svg[aria-hidden=true] path')?.getAttribute('d') ?? null }))"""
    )
    icons = [one for one in found if one["icon"]]
    for one in found:
        assert not re.search(r"[^\x00-\x7f]", one["text"]), f"a character instead of an icon: {one}"
        if not one["text"]:
            assert one["icon"] and one["label"] and one["title"], one
    labels = {one["label"] or one["text"] for one in icons}
    assert {
        "Settings",
        "Export",
        "Help",
        "Light or dark",
        "Attach a text file",
        "Previous version",
        "New chat",
    } <= labels
    assert {"Copy", "Edit", "Regenerate", "Tokens", "Rename Hello", "Delete Hello", "Send", "Dashboard"} - labels <= {
        "Dashboard"
    }
    width = page.evaluate("document.querySelector('#settings-open svg').getBoundingClientRect().width")
    assert width >= 12


def test_seed_and_weights_are_in_the_details_only(chat: ChatDriver, fake: FakeServer) -> None:
    answer = started(chat, fake, "Hello", "One")
    answer.say(" two")
    answer.finish(version="step-7", count=2)
    answer.end(None)
    chat.wait_until_idle()
    shown = shown_text(chat.last())
    assert str(answer.body["seed"]) not in shown and "step-7" not in shown and "weights" not in shown.lower()
    chat.last().locator("summary", has_text="Details").click()
    facts = chat.last().locator(".figures dl")
    expect(facts).to_contain_text("step-7")
    expect(facts).to_contain_text(str(answer.body["seed"]))
    chat.press(str(answer.body["seed"]), facts)
    expect(chat.page.locator(".toast")).to_contain_text("is used from now on")
    chat.press("Regenerate")
    assert fake.answer().body["seed"] == answer.body["seed"]


def test_info_is_shown_as_sentences(chat: ChatDriver, fake: FakeServer) -> None:
    fake.info |= {
        "architecture": "LlamaForCausalLM", "layers": 30, "parameters": 134_515_008, "device": "cpu",
        "chat_defaults": DEFAULTS, "chat_defaults_source": "measured for this model", "generation": None,
    }  # fmt: skip
    chat.page.reload()
    chat.wait_until_ready()
    chat.press("fake")
    lines = chat.page.locator("#facts li").all_inner_texts()
    assert all(re.fullmatch(r"[A-Za-z].* .*\.", line) for line in lines), lines
    text = "\n".join(lines)
    assert "Prompt and answer together can have 1,000 tokens." in text
    assert "a LlamaForCausalLM with 30 layers and 134.5 million parameters." in text
    assert "temperature 0.6" in text and "max-tokens 512; temperature and truncation: measured for this model." in text
    for raw in ("max_n", "_", "null", "undefined", "[object", "true", "false"):
        assert raw not in text


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


def test_details_show_the_settings_of_the_latest_request(chat: ChatDriver, fake: FakeServer) -> None:
    fake.info["chat_defaults"] = DEFAULTS
    chat.page.reload()
    chat.wait_until_ready()
    chat.set(**{"set-temperature": 0.1})
    started(chat, fake, "Hello", "Half").end("length")
    expect(chat.fact("Settings")).to_contain_text("temperature 0.1, top-p 0.95")
    chat.set(**{"set-temperature": 0.9})
    chat.press("Continue")
    rest = fake.answer()
    assert rest.body["temperature"] == 0.9
    rest.complete(" whole")
    expect(chat.fact("Settings")).to_contain_text("temperature 0.9, top-p 0.95")
    chat.set(**{"set-temperature": 0.4})
    chat.press("Tokens")
    chat.page.locator(".tokens .token").first.click()
    chat.page.get_by_role("button", name='Continue with "A"').click()
    fake.answer().complete(" else")
    expect(chat.last()).to_contain_text("2/2")
    expect(chat.fact("Settings")).to_contain_text("temperature 0.4, top-p 0.95")


def test_no_defaults_are_sent_to_an_older_server(chat: ChatDriver, fake: FakeServer) -> None:
    chat.press("Settings")
    assert chat.page.locator("#defaults-source").inner_text() == ""
    chat.press("Done")
    chat.type("Hello")
    assert not {*DEFAULTS, "repetition_penalty"} & fake.answer().body.keys()


def test_errors_are_closed_after_reconnecting(context: BrowserContext) -> None:
    with serving() as server:
        chat = ChatDriver(context, server.url)
        chat.press("Continue a text")
        chat.page.fill("#text-field", "Once")
        chat.page.click("#text-go")
        server.answer().write(" upon")
        expect(chat.page.locator("#text-field")).to_have_value("Once upon")
        port = int(server.url.rpartition(":")[2])
    expect(chat.page.locator(TOAST)).to_contain_text("the connection was lost")
    expect(chat.page.locator(BANNER)).to_contain_text("The server does not answer")
    with serving(port=port):
        chat.wait_until_ready()
        expect(chat.page.locator(TOAST)).to_have_count(0)
    chat.watch.assert_clean([FAILED, "ERR_INCOMPLETE_CHUNKED_ENCODING"])


def test_errors_are_closed_after_continue(chat: ChatDriver, fake: FakeServer) -> None:
    answer = started(chat, fake, "Hello", "Half")
    answer.event({"error": {"message": "out of memory"}})
    answer.raw(b"")
    expect(chat.page.locator(TOAST)).to_contain_text("out of memory")
    chat.press("Continue")
    fake.answer().say(" whole")
    expect(chat.page.locator(TOAST)).to_have_count(0)


def test_errors_are_closed_after_entering_a_key(chat: ChatDriver, fake: FakeServer) -> None:
    fake.key = "secret-key"
    chat.type("Hello")
    expect(chat.page.locator(TOAST)).to_contain_text("an API key is needed")
    chat.page.fill("#key-field", "secret-key")
    chat.press("Use this key")
    chat.wait_until_ready()
    expect(chat.page.locator(TOAST)).to_have_count(0)
    chat.watch.assert_clean([FAILED])


def speed_of(chat: ChatDriver, index: int) -> float:
    text = shown_text(chat.answers().nth(index).locator(".figures"))
    found = re.search(r"([\d.]+) tokens/s", text)
    assert found is not None, text
    return float(found[1])


def test_samples_side_by_side_are_timed_separately(chat: ChatDriver, fake: FakeServer) -> None:
    chat.page.evaluate("() => { window.nowMs = 1000; performance.now = () => window.nowMs; }")
    chat.set(samples=2)
    chat.type("Hello")
    answer = fake.answer()
    for index, word, gap_ms in ((0, "quick", 50), (1, "slow", 250)):
        for count in range(1, 6):
            chat.page.evaluate(f"window.nowMs += {gap_ms}")
            answer.say(word, index=index)
            expect(chat.answers().nth(index).locator(".body")).to_have_text(word * count)
        answer.finish(index=index)
    answer.end(None)
    chat.wait_until_idle()
    assert speed_of(chat, 0) == 20
    assert speed_of(chat, 1) == 4
    first = [
        float(re.findall(r"first after ([\d.]+) s", shown_text(chat.answers().nth(at).locator(".figures")))[0])
        for at in (0, 1)
    ]
    assert first == [0.05, 0.5]


def test_phones_show_no_keyboard_shortcuts(browser: Browser, fake: FakeServer) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    chat = ChatDriver(context, fake.url)
    page = chat.page
    assert page.get_attribute("#search", "placeholder") == "Search"
    page.tap("#help-open")
    expect(page.locator("#help")).to_contain_text("Tokens")
    assert "Ctrl" not in page.locator("#help").inner_text()
    page.keyboard.press("Escape")
    assert "Ctrl" not in page.locator("body").inner_text()
    context.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_keyboard_shortcuts_are_shown_without_touch_screen(chat: ChatDriver, width: int) -> None:
    chat.page.set_viewport_size({"width": width, "height": 800})
    assert chat.page.get_attribute("#search", "placeholder") == "Search (Ctrl+K)"
    chat.press("Help")
    expect(chat.page.locator("#help")).to_contain_text("Ctrl/Cmd+K")


@pytest.mark.parametrize("samples", [1, 2])
def test_token_colours_do_not_overflow_on_a_phone(browser: Browser, fake: FakeServer, samples: int) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    chat = ChatDriver(context, fake.url)
    chat.set(samples=samples)
    chat.page.fill("#draft", "Hello")
    chat.page.tap("#send")
    answer = fake.answer()
    for index in range(samples):
        answer.say("word", " " * 90, "x" * 120, "    and", " on" * 40, "\n", " " * 60, index=index)
        answer.finish(index=index)
    answer.end(None)
    chat.wait_until_idle()
    chat.press("Tokens", chat.answers().first)
    edges = chat.page.evaluate(
        """() => { const room = document.querySelector('.tokens').getBoundingClientRect();
            return [...document.querySelectorAll('.tokens .token, .legend .token')].flatMap((one) =>
                [...one.getClientRects()].map((box) => [box.left - room.left, box.right - room.right])) }"""
    )
    assert edges and all(left >= -1 and right <= 1 for left, right in edges), edges
    context.close()


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


def drop(chat: ChatDriver, *files: tuple[str, str]) -> None:
    """Drop files (name, content) onto the page one by one, without waiting."""
    chat.page.evaluate(
        """(files) => { for (const [name, text] of files) {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([text], name));
            for (const kind of ["dragover", "drop"]) document.querySelector("main").dispatchEvent(
                new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true })); } }""",
        files,
    )


def test_dropped_file_is_attached(chat: ChatDriver) -> None:
    drop(chat, ("drop.txt", "dropped"))
    expect(chat.page.locator("#attached summary")).to_have_text("drop.txt, 7 bytes")


def test_size_limit_applies_to_files_dropped_in_quick_succession(chat: ChatDriver) -> None:
    drop(chat, ("one.txt", "x" * 40_000), ("two.txt", "x" * 40_000))
    expect(chat.page.locator(TOAST)).to_contain_text("“two.txt” is too large: at most 64 kB")
    expect(chat.page.locator("#attached summary")).to_have_text("one.txt, 39.1 kB")


def test_file_dropped_on_the_text_pane_is_inserted_at_the_cursor(chat: ChatDriver, fake: FakeServer) -> None:
    page = chat.page
    chat.press("Continue a text")
    page.fill("#text-field", "Once  upon")
    page.evaluate("document.querySelector('#text-field').setSelectionRange(5, 5)")
    drop(chat, ("drop.txt", "dropped"))
    expect(page.locator("#text-field")).to_have_value("Once dropped upon")
    drop(chat, ("big.txt", "x" * (64 * 1024 + 1)))
    expect(page.locator(TOAST)).to_contain_text("“big.txt” is too large")
    chat.press("Continue")
    answer = fake.answer()
    assert answer.body["prompt"] == "Once dropped upon"
    drop(chat, ("late.txt", "late"))
    page.wait_for_timeout(200)
    answer.write(" a")
    answer.end_text()
    expect(page.locator("#text-go")).to_be_visible()
    expect(page.locator("#text-field")).to_have_value("Once dropped upon a")
    chat.press("New chat")
    expect(page.locator("#attached")).to_be_hidden()
    chat.watch.assert_clean()
