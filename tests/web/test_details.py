"""The page's details: icons, the list, figures, facts, presets, attached files, tables, phones."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, expect

from tests.web.desk import Desk, begun, told
from tests.web.fake import FakeServer, serving
from tests.web.test_states import BANNER, FAILED, TOAST

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "min_p": 0.05, "top_k": 20, "max_tokens": 512}
NAMES = ".chat-name"


def test_a_wide_table_scrolls_in_its_own_box_and_keeps_its_alignment(desk: Desk, fake: FakeServer) -> None:
    desk.page.set_viewport_size({"width": 390, "height": 700})
    head = "| left | middle | right | " + " | ".join(f"column number {n}" for n in range(9)) + " |\n"
    rule = "|:--|:-:|--:|" + "---|" * 9 + "\n"
    told(desk, fake, "Hello", head, rule, "| a | b | c |" + " wordwordword |" * 9 + "\n")
    cells = desk.last().locator("td")
    for index, side in enumerate(("left", "center", "right")):
        expect(cells.nth(index)).to_have_css("text-align", side)
        expect(desk.last().locator("th").nth(index)).to_have_css("text-align", side)
    assert desk.page.evaluate("document.documentElement.scrollWidth") == 390
    box = desk.page.evaluate(
        "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])(document.querySelector('.table'))"
    )
    assert box[0] > box[1], "the table scrolls, and its words are whole"
    assert desk.page.evaluate("document.querySelector('.table').getBoundingClientRect().right") <= 390
    height = desk.page.evaluate("document.querySelector('td:last-child').getBoundingClientRect().height")
    assert height < 50, "no word is broken to make room"


def chats(title: str) -> str:
    """The text of a file with one conversation."""
    conversation = {"title": title, "system": "", "chosen": {}, "created": 0}
    entries = [{"conversation": conversation, "messages": []}]
    return json.dumps({"format": "nano-inference-chats", "version": 1, "chats": entries})


def test_conversations_are_grouped_by_date(desk: Desk, tmp_path: Path) -> None:
    now = datetime(2026, 3, 15, 12)
    path = tmp_path / "chats.json"
    for title, ago in {"Five": 100, "Four": 20, "Three": 5, "Two": 1, "One": 0}.items():
        desk.page.clock.set_fixed_time(now - timedelta(days=ago))
        path.write_text(chats(title))
        desk.page.set_input_files("#file", path)
        expect(desk.page.locator(NAMES).first).to_have_text(title)
    desk.page.reload()
    desk.wait_until_ready()
    lines = [line for line in desk.page.locator("#chats").inner_text().splitlines() if line.strip()]
    assert lines == [
        *("Today", "One", "Yesterday", "Two", "Previous 7 days", "Three"),
        *("Previous 30 days", "Four", "December 2025", "Five"),
    ]


def test_a_conversation_that_goes_on_moves_to_today(desk: Desk, fake: FakeServer, tmp_path: Path) -> None:
    now = datetime(2026, 3, 15, 12)
    path = tmp_path / "chats.json"
    for title, ago in {"Old": 9, "New": 1}.items():
        desk.page.clock.set_fixed_time(now - timedelta(days=ago))
        path.write_text(chats(title))
        desk.page.set_input_files("#file", path)
        expect(desk.page.locator(NAMES).first).to_have_text(title)
    desk.page.clock.set_fixed_time(now)
    desk.page.locator(NAMES, has_text="Old").click()
    told(desk, fake, "Hello", "Yes")
    expect(desk.page.locator("#chats h2")).to_have_text(["Today", "Yesterday"])


def test_the_list_shows_full_titles_and_buttons_on_hover_or_focus(desk: Desk, fake: FakeServer) -> None:
    page = desk.page
    told(desk, fake, "A question about many things, so that it needs more than a line", "Yes")
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


def test_buttons_have_drawn_icons_labels_and_tooltips(desk: Desk, fake: FakeServer) -> None:
    told(desk, fake, "Hello", "Yes")
    desk.press("Regenerate")
    fake.answer().tell("No")
    desk.wait_until_idle()
    page = desk.page
    found = page.evaluate(
        """() => [...document.querySelectorAll('button')].filter((one) => one.offsetParent).map((one) => ({
            text: one.textContent.trim(), label: one.getAttribute('aria-label'), title: one.title,
            icon: one.querySelector('svg[aria-hidden=true] path')?.getAttribute('d') ?? null }))"""
    )
    icons = [one for one in found if one["icon"]]
    for one in found:
        assert not re.search(r"[^\x00-\x7f]", one["text"]), f"a sign in the place of an icon: {one}"
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


def test_seed_and_weights_are_in_the_details_only(desk: Desk, fake: FakeServer) -> None:
    answer = begun(desk, fake, "Hello", "One")
    answer.say(" two")
    answer.finish(version="step-7", count=2)
    answer.end(None)
    desk.wait_until_idle()
    shown = desk.last().inner_text()
    assert str(answer.body["seed"]) not in shown and "step-7" not in shown and "weights" not in shown.lower()
    desk.last().locator("summary", has_text="Details").click()
    facts = desk.last().locator(".figures dl")
    expect(facts).to_contain_text("step-7")
    expect(facts).to_contain_text(str(answer.body["seed"]))
    desk.press(str(answer.body["seed"]), facts)
    expect(desk.page.locator(".toast")).to_contain_text("is used from now on")
    desk.press("Regenerate")
    assert fake.answer().body["seed"] == answer.body["seed"]


def test_info_is_told_in_words(desk: Desk, fake: FakeServer) -> None:
    fake.info |= {
        "architecture": "LlamaForCausalLM", "layers": 30, "parameters": 134_515_008, "device": "cpu",
        "chat_defaults": DEFAULTS, "chat_defaults_source": "measured for this model", "generation": None,
    }  # fmt: skip
    desk.page.reload()
    desk.wait_until_ready()
    desk.press("fake")
    lines = desk.page.locator("#facts li").all_inner_texts()
    assert all(re.fullmatch(r"[A-Za-z].* .*\.", line) for line in lines), lines
    text = "\n".join(lines)
    assert "Prompt and answer together can have 1,000 tokens." in text
    assert "a LlamaForCausalLM with 30 layers and 134.5 million parameters." in text
    assert "temperature 0.6" in text and "max-tokens 512; temperature and truncation: measured for this model." in text
    for raw in ("max_n", "_", "null", "undefined", "[object", "true", "false"):
        assert raw not in text


def test_chat_defaults_are_sent_where_the_user_has_set_nothing(desk: Desk, fake: FakeServer) -> None:
    fake.info |= {
        "chat_defaults": {**DEFAULTS, "repetition_penalty": None},
        "chat_defaults_source": "default for chats",
    }
    desk.page.reload()
    desk.wait_until_ready()
    desk.press("Settings")
    for name, value in DEFAULTS.items():
        assert desk.page.get_attribute(f"#set-{name}", "placeholder") == str(value)
    expect(desk.page.locator("#defaults-source")).to_have_text(
        "A field left empty has the value shown in grey. Temperature, top-p, top-k and min-p: default for chats."
    )
    desk.page.fill("#set-temperature", "0.1")
    desk.press("Done")
    desk.type("Hello")
    body = fake.answer().body
    assert {name: body[name] for name in DEFAULTS} == {**DEFAULTS, "temperature": 0.1}
    assert "repetition_penalty" not in body
    expect(desk.fact("Settings")).to_contain_text("temperature 0.1, top-p 0.95")


def test_details_name_the_settings_of_the_latest_request(desk: Desk, fake: FakeServer) -> None:
    fake.info["chat_defaults"] = DEFAULTS
    desk.page.reload()
    desk.wait_until_ready()
    desk.set(**{"set-temperature": 0.1})
    begun(desk, fake, "Hello", "Half").end("length")
    expect(desk.fact("Settings")).to_contain_text("temperature 0.1, top-p 0.95")
    desk.set(**{"set-temperature": 0.9})
    desk.press("Continue")
    rest = fake.answer()
    assert rest.body["temperature"] == 0.9
    rest.tell(" whole")
    expect(desk.fact("Settings")).to_contain_text("temperature 0.9, top-p 0.95")
    desk.set(**{"set-temperature": 0.4})
    desk.press("Tokens")
    desk.page.locator(".tokens .token").first.click()
    desk.page.get_by_role("button", name='Go on with "A"').click()
    fake.answer().tell(" else")
    expect(desk.last()).to_contain_text("2/2")
    expect(desk.fact("Settings")).to_contain_text("temperature 0.4, top-p 0.95")


def test_an_older_server_is_sent_no_defaults(desk: Desk, fake: FakeServer) -> None:
    desk.press("Settings")
    assert desk.page.locator("#defaults-source").inner_text() == ""
    desk.press("Done")
    desk.type("Hello")
    assert not {*DEFAULTS, "repetition_penalty"} & fake.answer().body.keys()


def test_no_error_stays_after_reconnecting(context: BrowserContext) -> None:
    with serving() as server:
        desk = Desk(context, server.url)
        begun(desk, server, "Hello", "Half")
        port = int(server.url.rpartition(":")[2])
    expect(desk.page.locator(TOAST)).to_contain_text("the connection was lost")
    expect(desk.page.locator(BANNER)).to_contain_text("The server does not answer")
    with serving(port=port):
        desk.wait_until_ready()
        expect(desk.page.locator(TOAST)).to_have_count(0)
    desk.watch.assert_clean([FAILED, "ERR_INCOMPLETE_CHUNKED_ENCODING"])


def test_no_error_stays_after_continue(desk: Desk, fake: FakeServer) -> None:
    answer = begun(desk, fake, "Hello", "Half")
    answer.event({"error": {"message": "out of memory"}})
    answer.raw(b"")
    expect(desk.page.locator(TOAST)).to_contain_text("out of memory")
    desk.press("Continue")
    fake.answer().say(" whole")
    expect(desk.page.locator(TOAST)).to_have_count(0)


def test_no_error_stays_after_a_key_is_entered(desk: Desk, fake: FakeServer) -> None:
    fake.key = "secret-key"
    desk.type("Hello")
    expect(desk.page.locator(TOAST)).to_contain_text("an API key is needed")
    desk.page.fill("#key-field", "secret-key")
    desk.press("Use this key")
    desk.wait_until_ready()
    expect(desk.page.locator(TOAST)).to_have_count(0)
    desk.watch.assert_clean([FAILED])


def speed_of(desk: Desk, index: int) -> float:
    found = re.search(r"([\d.]+) tokens/s", desk.answers().nth(index).locator(".figures").inner_text())
    assert found is not None
    return float(found[1])


def test_samples_side_by_side_have_a_clock_each(desk: Desk, fake: FakeServer) -> None:
    desk.page.evaluate("() => { window.nowMs = 1000; performance.now = () => window.nowMs; }")
    desk.set(samples=2)
    desk.type("Hello")
    answer = fake.answer()
    for index, word, gap_ms in ((0, "quick", 50), (1, "slow", 250)):
        for count in range(1, 6):
            desk.page.evaluate(f"window.nowMs += {gap_ms}")
            answer.say(word, index=index)
            expect(desk.answers().nth(index).locator(".body")).to_have_text(word * count)
        answer.finish(index=index)
    answer.end(None)
    desk.wait_until_idle()
    assert speed_of(desk, 0) == 20
    assert speed_of(desk, 1) == 4
    first = [
        float(re.findall(r"first after ([\d.]+) s", desk.answers().nth(at).locator(".figures").inner_text())[0])
        for at in (0, 1)
    ]
    assert first == [0.05, 0.5]


def test_phones_read_nothing_of_keys_that_they_lack(browser: Browser, fake: FakeServer) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    desk = Desk(context, fake.url)
    page = desk.page
    assert page.get_attribute("#search", "placeholder") == "Search"
    page.tap("#help-open")
    expect(page.locator("#help")).to_contain_text("Tokens")
    assert "Ctrl" not in page.locator("#help").inner_text()
    page.keyboard.press("Escape")
    assert "Ctrl" not in page.locator("body").inner_text()
    context.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_a_keyboards_owner_reads_of_it(desk: Desk, width: int) -> None:
    desk.page.set_viewport_size({"width": width, "height": 800})
    assert desk.page.get_attribute("#search", "placeholder") == "Search (Ctrl+K)"
    desk.press("Help")
    expect(desk.page.locator("#help")).to_contain_text("Ctrl/Cmd+K")


@pytest.mark.parametrize("samples", [1, 2])
def test_token_colours_stay_inside_the_column_on_a_phone(browser: Browser, fake: FakeServer, samples: int) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    desk = Desk(context, fake.url)
    desk.set(samples=samples)
    desk.page.fill("#draft", "Hello")
    desk.page.tap("#send")
    answer = fake.answer()
    for index in range(samples):
        answer.say("word", " " * 90, "x" * 120, "    and", " on" * 40, "\n", " " * 60, index=index)
        answer.finish(index=index)
    answer.end(None)
    desk.wait_until_idle()
    desk.press("Tokens", desk.answers().first)
    edges = desk.page.evaluate(
        """() => { const room = document.querySelector('.tokens').getBoundingClientRect();
            return [...document.querySelectorAll('.tokens .token, .legend .token')].flatMap((one) =>
                [...one.getClientRects()].map((box) => [box.left - room.left, box.right - room.right])) }"""
    )
    assert edges and all(left >= -1 and right <= 1 for left, right in edges), edges
    context.close()


def test_system_prompts_at_hand(desk: Desk, fake: FakeServer) -> None:
    page = desk.page
    desk.press("Settings")
    page.select_option("#preset", label="Brief")
    prompt = page.input_value("#system")
    assert "few words" in prompt
    page.fill("#system", "Speak like a sailor.")
    expect(page.locator("#preset")).to_have_value("")
    desk.press("Save the one below")
    desk.press("Done")
    desk.type("Hello")
    assert fake.answer().body["messages"][0] == {"role": "system", "content": "Speak like a sailor."}
    desk.press("Stop")
    page.reload()
    desk.wait_until_ready()
    desk.press("Settings")
    page.select_option("#preset", label="Translator")
    assert "Translate" in page.input_value("#system")
    expect(page.locator("#preset-delete")).to_be_hidden()
    page.select_option("#preset", label="Speak like a sailor.")
    assert page.input_value("#system") == "Speak like a sailor."
    desk.press("Delete", page.locator("#settings"))
    expect(page.locator("#preset option", has_text="sailor")).to_have_count(0)
    desk.watch.assert_clean()


def attach(desk: Desk, name: str, content: bytes) -> None:
    desk.page.set_input_files("#attach-file", {"name": name, "mimeType": "", "buffer": content})


def test_a_text_file_is_attached_seen_and_removed(desk: Desk, fake: FakeServer) -> None:
    page = desk.page
    attach(desk, "notes.md", b"One ```code``` two\n````\nfour\n````\n")
    attach(desk, "gone.txt", b"never sent")
    desk.press("Remove gone.txt")
    chip = page.locator("#attached li")
    expect(chip).to_have_count(1)
    chip.locator("summary").click()
    fenced = "notes.md:\n`````md\nOne ```code``` two\n````\nfour\n````\n`````"
    assert chip.locator("pre").inner_text() == fenced
    desk.type("What does it say?")
    body = fake.answer().body
    assert body["messages"] == [{"role": "user", "content": f"What does it say?\n\n{fenced}"}]
    expect(page.locator(".message.user")).to_contain_text("notes.md:")
    expect(page.locator(".chat-name")).to_have_text("What does it say?")
    assert page.locator("#attached").is_hidden()
    desk.watch.assert_clean()


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("big.txt", b"x" * (64 * 1024 + 1), "“big.txt” is too large: at most 64 kB can be attached to a message."),
        ("a.png", b"\x89PNG\r\n\x1a\n\x00\x00", "“a.png” is not a text file (UTF-8)."),
        ("a.bin", b"abc\x00def", "“a.bin” is not a text file (UTF-8)."),
    ],
)
def test_what_cannot_be_attached_is_refused_by_one_line(desk: Desk, name: str, content: bytes, complaint: str) -> None:
    attach(desk, name, content)
    expect(desk.page.locator(f"{TOAST} span")).to_have_text(complaint)
    assert desk.page.locator("#attached").is_hidden()


def test_files_together_have_the_limit(desk: Desk) -> None:
    attach(desk, "one.txt", b"x" * 40_000)
    expect(desk.page.locator("#attached li")).to_have_count(1)
    attach(desk, "two.txt", b"x" * 40_000)
    expect(desk.page.locator(TOAST)).to_contain_text("at most 64 kB")
    expect(desk.page.locator("#attached li")).to_have_count(1)


def drop(desk: Desk, *files: tuple[str, str]) -> None:
    """Drop files of a name and a content onto the page, each on its own, none waiting for the one before."""
    desk.page.evaluate(
        """(files) => { for (const [name, text] of files) {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([text], name));
            for (const kind of ["dragover", "drop"]) document.querySelector("main").dispatchEvent(
                new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true })); } }""",
        files,
    )


def test_a_file_can_be_dropped(desk: Desk) -> None:
    drop(desk, ("drop.txt", "dropped"))
    expect(desk.page.locator("#attached summary")).to_have_text("drop.txt, 7 bytes")


def test_files_dropped_in_quick_succession_have_the_limit_together(desk: Desk) -> None:
    drop(desk, ("one.txt", "x" * 40_000), ("two.txt", "x" * 40_000))
    expect(desk.page.locator(TOAST)).to_contain_text("“two.txt” is too large: at most 64 kB")
    expect(desk.page.locator("#attached summary")).to_have_text("one.txt, 39.1 kB")


def test_a_file_dropped_on_a_text_is_inserted_at_the_cursor(desk: Desk, fake: FakeServer) -> None:
    page = desk.page
    desk.press("Continue a text")
    page.fill("#text-field", "Once  upon")
    page.evaluate("document.querySelector('#text-field').setSelectionRange(5, 5)")
    drop(desk, ("drop.txt", "dropped"))
    expect(page.locator("#text-field")).to_have_value("Once dropped upon")
    drop(desk, ("big.txt", "x" * (64 * 1024 + 1)))
    expect(page.locator(TOAST)).to_contain_text("“big.txt” is too large")
    desk.press("Continue")
    answer = fake.answer()
    assert answer.body["prompt"] == "Once dropped upon"
    drop(desk, ("late.txt", "late"))
    page.wait_for_timeout(200)
    answer.write(" a")
    answer.end_text()
    expect(page.locator("#text-go")).to_be_visible()
    expect(page.locator("#text-field")).to_have_value("Once dropped upon a")
    desk.press("New chat")
    expect(page.locator("#attached")).to_be_hidden()
    desk.watch.assert_clean()
