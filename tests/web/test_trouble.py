"""What a person's browser, model or second tab can do to the page: it stays usable, and nothing is lost in silence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, expect
from playwright.sync_api import Error as PlaywrightError

from tests.web.chat_driver import ChatDriver, answered, started
from tests.web.fake import PATIENCE_S, FakeServer

TOAST, NAMES = ".toast.bad", ".chat-name"
FAILED = "Failed to load resource"


@pytest.mark.parametrize("text", [">" * 4000, "1. " * 3000, "[" * 20000])
def test_an_answer_that_is_no_sane_markdown_is_shown_as_it_is(chat: ChatDriver, fake: FakeServer, text: str) -> None:
    answered(chat, fake, "Hello", text)
    expect(chat.last().locator(".body")).to_contain_text(text.strip()[:100])
    answered(chat, fake, "Again", "Fine")
    chat.page.reload()
    chat.wait_until_ready()
    expect(chat.last().locator(".body")).to_have_text("Fine")
    chat.watch.assert_clean()


GOOD: dict[str, Any] = {
    "id": "a", "parent": None, "role": "assistant", "text": "Text", "parts": None, "finish": "stop", "error": None,
    "tokens": [[1, "Text", -0.5, 0, [[1, "Text", -0.5], [2, "Other", -1.5]]]], "stats": None, "seed": 3,
    "versions": [{"version": "0", "number": 0, "start": 0, "end": 1}], "created": 1,
}  # fmt: skip


def import_message(chat: ChatDriver, directory: Path, **fields: Any) -> None:
    imported = {"conversation": {"title": "File", "system": ""}, "messages": [{**GOOD, **fields}]}
    path = directory / "chats.json"
    path.write_text(json.dumps({"format": "nano-inference-chats", "version": 1, "chats": [imported]}))
    chat.page.set_input_files("#file", path)


@pytest.mark.parametrize(
    "fields",
    [{"versions": [None]}, {"tokens": [[1, "a", "x", 0, []]]}, {"tokens": [[1, "a", 0, 0, [None]]]}, {"parts": [{}]}],
)
def test_a_message_that_could_not_be_shown_is_not_taken(
    chat: ChatDriver, tmp_path: Path, fields: dict[str, Any]
) -> None:
    import_message(chat, tmp_path, **fields)
    expect(chat.page.locator(TOAST)).to_contain_text("is not a conversation with messages")
    chat.page.reload()
    chat.wait_until_ready()
    assert chat.page.locator(NAMES).count() == 0


def test_what_else_a_file_says_is_made_harmless(chat: ChatDriver, tmp_path: Path) -> None:
    odd = {"stats": {"speed": "x", "first": {}}, "finish": {"a": 1}, "seed": "<b>", "sample": "y", "error": {}}
    import_message(chat, tmp_path, **odd, extra="z")
    expect(chat.last().locator(".body")).to_have_text("Text")
    expect(chat.last()).to_contain_text("This answer was interrupted.")
    chat.press("Tokens")
    chat.page.locator(".tokens .token").first.click()
    expect(chat.page.locator("#alternatives li")).to_have_count(2)
    chat.watch.assert_clean()


def test_a_full_disk_is_told_once_and_the_talk_goes_on(context: BrowserContext, fake: FakeServer) -> None:
    full = "IDBObjectStore.prototype.put = () => { throw new DOMException('no room', 'QuotaExceededError'); }"
    context.add_init_script(full)
    chat = ChatDriver(context, fake.url)
    answered(chat, fake, "Hello", "First")
    chat.press("Regenerate")
    fake.answer().tell("Second")
    chat.wait_until_idle()
    expect(chat.last().locator(".body")).to_have_text("Second")
    expect(chat.page.locator(TOAST)).to_have_count(1)
    expect(chat.page.locator(TOAST)).to_contain_text("does not keep the conversation (QuotaExceededError)")
    chat.watch.assert_clean()


def test_a_browser_that_allows_no_storage_at_all(context: BrowserContext, fake: FakeServer) -> None:
    denied = "{ get() { throw new DOMException('denied', 'SecurityError'); } }"
    for name in ("localStorage", "sessionStorage", "indexedDB"):
        context.add_init_script(f"Object.defineProperty(window, '{name}', {denied});")
    fake.key = "secret-key"
    chat = ChatDriver(context, fake.url, ready=False)
    chat.page.fill("#key-field", "secret-key")
    chat.press("Use this key")
    chat.wait_until_ready()
    answered(chat, fake, "About apples", "Red")
    chat.press("New chat")
    answered(chat, fake, "About pears", "Green")
    chat.page.locator(NAMES, has_text="apples").click()
    expect(chat.last().locator(".body")).to_have_text("Red")
    chat.page.fill("#search", "green")
    expect(chat.page.locator(NAMES)).to_have_text(["About pears"])
    chat.page.click("#theme")
    chat.watch.assert_clean([FAILED])


def test_another_tab_shows_what_this_one_does(context: BrowserContext, fake: FakeServer) -> None:
    one = ChatDriver(context, fake.url)
    answered(one, fake, "Hello", "Yes")
    two = ChatDriver(context, fake.url)
    expect(two.last().locator(".body")).to_have_text("Yes")
    answer = started(one, fake, "More", "Half")
    expect(two.answers()).to_have_count(2)
    expect(two.page.locator("#stop")).to_be_visible()
    assert two.page.get_by_text("interrupted").count() == 0
    two.press("Stop")
    assert answer.gone.wait(PATIENCE_S), "stopped from the other tab"
    for chat in (one, two):
        expect(chat.last()).to_contain_text("Stopped.")
        expect(chat.last().locator(".body")).to_have_text("Half")
    two.press("Delete Hello")
    expect(one.page.locator(NAMES)).to_have_count(0)
    expect(one.answers()).to_have_count(0)
    one.watch.assert_clean()
    two.watch.assert_clean()


def test_a_tab_that_crashes_while_it_writes_holds_nobody_up(context: BrowserContext, fake: FakeServer) -> None:
    one = ChatDriver(context, fake.url)
    answered(one, fake, "Hello", "Yes")
    two = ChatDriver(context, fake.url)
    one.type("More")
    answer = fake.answer()
    answer.say("Half")
    expect(two.page.locator("#stop")).to_be_visible()
    one.page.on("crash", lambda _: None)
    with pytest.raises(PlaywrightError, match="crash"):
        one.page.goto("chrome://crash")
    expect(two.page.locator("#stop")).to_be_hidden()
    expect(two.last()).to_contain_text("interrupted")
    assert answer.gone.wait(PATIENCE_S)
    answered(two, fake, "Again", "Whole")
    expect(two.last().locator(".body")).to_have_text("Whole")
    two.watch.assert_clean()


_SLOW_SAVES = """
const { set } = Object.getOwnPropertyDescriptor(IDBTransaction.prototype, "oncomplete");
window.held = [];
Object.defineProperty(IDBTransaction.prototype, "oncomplete", {
  set(then) { set.call(this, (event) => (window.isSlow ? held.push(() => then(event)) : then(event))); },
});
"""


def test_nothing_begins_before_what_ended_is_saved(context: BrowserContext, fake: FakeServer) -> None:
    """What began then would never have let go of its lock."""
    context.add_init_script(_SLOW_SAVES)
    chat = ChatDriver(context, fake.url)
    answer = started(chat, fake, "Hello", "Half")
    chat.page.evaluate("window.isSlow = true")
    answer.end()
    expect(chat.last()).to_have_attribute("aria-busy", "false")
    chat.until("held.length > 0")
    chat.type("Too early")
    expect(chat.page.locator("#draft")).to_have_value("Too early")
    chat.page.evaluate("() => { window.isSlow = false; for (const one of held) one(); }")
    chat.wait_until_idle()
    answered(chat, fake, "Again", "Yes")
    expect(chat.last().locator(".body")).to_have_text("Yes")
    chat.until("navigator.locks.query().then(({ held, pending }) => !held.length && !pending.length)")
    chat.watch.assert_clean()


def test_who_tries_again_at_once_is_heard(context: BrowserContext, fake: FakeServer) -> None:
    """An answer that failed is under way until it is saved, so that is when a press of its button comes to nothing."""
    context.add_init_script(_SLOW_SAVES)
    chat = ChatDriver(context, fake.url)
    answer = started(chat, fake, "Hello", "Half")
    chat.page.evaluate("window.isSlow = true")
    answer.raw(None)
    expect(chat.last()).to_have_attribute("aria-busy", "false")
    chat.until("held.length > 0")
    assert chat.page.locator(TOAST).count() == 0
    chat.page.evaluate("() => { window.isSlow = false; for (const one of held) one(); }")
    chat.press("Try again", chat.page.locator(TOAST))
    fake.answer().tell(" and half")
    expect(chat.last().locator(".body")).to_have_text("Half and half")


def test_who_leaves_while_it_is_saved_loses_nothing(context: BrowserContext, fake: FakeServer) -> None:
    context.add_init_script(
        """const { put } = IDBObjectStore.prototype;
        IDBObjectStore.prototype.put = function (...given) {
          window.isAsked = true;
          if (!window.isBroken) return put.apply(this, given);
          queueMicrotask(() => this.transaction.abort());
          return put.apply(this, given); };
        for (const name of ["onabort", "onerror"]) {
          const { set } = Object.getOwnPropertyDescriptor(IDBTransaction.prototype, name);
          Object.defineProperty(IDBTransaction.prototype, name, {
            set(then) { set.call(this, (event) => window.isBroken || then(event)); } }); }"""
    )
    chat = ChatDriver(context, fake.url)
    chat.type("Hello")
    answer = fake.answer()
    chat.page.evaluate("() => { window.isBroken = true; window.isAsked = false; }")  # as when the page goes before it
    answer.say("Half")
    chat.until("isAsked")
    chat.page.reload()
    chat.wait_until_ready()
    expect(chat.last().locator(".body")).to_have_text("Half")


def test_settings_hold_for_what_is_sent_at_once(chat: ChatDriver, fake: FakeServer) -> None:
    chat.press("Settings")
    chat.page.fill("#seed", "5")
    chat.page.fill("#system", "Rhyme.")
    chat.page.evaluate(
        """() => {  // the dialog tells of its closing a frame later, which may be late
          document.addEventListener("close", (event) => event.stopPropagation(), true);
          document.querySelector("#settings button.primary").click();
          document.getElementById("draft").value = "Hello";
          document.getElementById("send").click(); }"""
    )
    body = fake.answer().body
    assert body["seed"] == 5 and body["messages"][0] == {"role": "system", "content": "Rhyme."}


def test_an_answers_end_leaves_the_list_of_conversations_alone(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Other", "Yes")
    chat.press("New chat")
    answered(chat, fake, "Hello", "Yes")
    answer = started(chat, fake, "More", "Half")
    chat.page.evaluate("() => { window.rows = [...document.querySelectorAll('#chats li')]; }")
    other = chat.page.locator(NAMES, has_text="Other")
    other.focus()
    answer.tell(" and half")
    chat.wait_until_idle()
    expect(other).to_be_focused()
    assert chat.page.evaluate("rows.every((row, i) => row === document.querySelectorAll('#chats li')[i])")


def test_what_a_tab_left_behind_does_not_undo_what_came_later(context: BrowserContext, fake: FakeServer) -> None:
    chat = ChatDriver(context, fake.url)
    started(chat, fake, "Hello", "Half")
    chat.page.reload()
    chat.wait_until_ready()
    expect(chat.last().locator(".body")).to_have_text("Half")
    old = chat.page.evaluate(
        """() => new Promise((done) => { indexedDB.open("nano-inference", 1).onsuccess = (event) => {
            event.target.result.transaction("messages").objectStore("messages").getAll().onsuccess = (all) =>
                done(all.target.result.filter((one) => one.role === "assistant")); }; })"""
    )
    chat.press("Continue")
    fake.answer().tell(" and half")
    chat.wait_until_idle()
    left = json.dumps([{**one, "finish": None} for one in old])
    chat.page.evaluate("(left) => localStorage.setItem('nano-inference.unsaved.x', left)", left)
    chat.page.reload()
    chat.wait_until_ready()
    expect(chat.last().locator(".body")).to_have_text("Half and half")
    assert chat.page.evaluate("Object.keys(localStorage).filter((key) => key.includes('unsaved')).length") == 0


def test_nothing_is_asked_for_before_the_server_is_known(context: BrowserContext, fake: FakeServer) -> None:
    chat = ChatDriver(context, fake.url)
    answered(chat, fake, "Hello", "Yes")
    fake.ready = (503, "loading")
    chat.page.reload()
    expect(chat.page.locator("#banner")).to_contain_text("being loaded")
    chat.page.focus("#draft")
    chat.page.keyboard.press("ArrowUp")
    assert chat.page.get_by_label("Edit your message").count() == 0
    expect(chat.last().get_by_role("button", name="Regenerate")).to_be_disabled()
    fake.ready = (200, "ready")
    chat.wait_until_ready()
    answered(chat, fake, "More", "Fine")


def test_one_conversation_has_one_answer_under_way(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Hello", "One", " two")
    chat.press("Tokens")
    answer = started(chat, fake, "More", "Slow")
    chat.page.locator(".tokens .token").first.click()
    expect(chat.page.get_by_role("button", name='Go on with "A"')).to_be_disabled()
    expect(chat.page.locator("#alternatives")).to_contain_text("when the answer has ended")
    chat.press("Stop")
    assert answer.gone.wait(PATIENCE_S), "Stop reaches the only one there is"
    chat.wait_until_idle()


def test_a_message_that_is_sent_twice_at_once_is_sent_once(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Hello", "Yes")
    chat.press("Edit")
    chat.page.evaluate(
        """() => { const send = [...document.querySelectorAll(".message.user button")]
            .find((one) => one.textContent === "Send"); send.click(); send.click(); }"""
    )
    fake.answer().tell("Once")
    chat.wait_until_idle()
    expect(chat.page.locator(".message.user")).to_contain_text("2/2")


def test_leaving_at_once_leaves_the_answer_where_it_belongs(chat: ChatDriver, fake: FakeServer) -> None:
    chat.page.fill("#draft", "Hello")
    chat.page.evaluate(
        "() => { document.getElementById('send').click(); document.getElementById('new-chat').click(); }"
    )
    fake.answer().tell("There")
    expect(chat.page.locator(NAMES)).to_have_text(["Hello"])
    chat.page.locator(NAMES).click()
    expect(chat.last().locator(".body")).to_have_text("There")
    expect(chat.page.locator(".message.user")).to_contain_text("Hello")


def test_try_again_goes_back_to_where_it_failed(chat: ChatDriver, fake: FakeServer) -> None:
    fake.refusals = [(400, {"message": "not now"})]
    chat.type("Hello")
    expect(chat.page.locator(TOAST)).to_contain_text("not now")
    chat.press("New chat")
    chat.press("Try again", chat.page.locator(TOAST))
    answer = fake.answer()
    assert answer.body["messages"] == [{"role": "user", "content": "Hello"}]
    answer.tell("Now")
    expect(chat.last().locator(".body")).to_have_text("Now")
    expect(chat.page.locator("#title")).to_have_text("Hello")


def test_a_deleted_conversation_does_not_come_back_with_its_answer(chat: ChatDriver, fake: FakeServer) -> None:
    answer = started(chat, fake, "Hello", "Half")
    chat.press("Delete Hello")
    assert answer.gone.wait(PATIENCE_S)
    expect(chat.page.locator(NAMES)).to_have_count(0)
    chat.page.reload()
    chat.wait_until_ready()
    expect(chat.page.locator(NAMES)).to_have_count(0)


def test_a_name_is_not_taken_before_it_is_written(chat: ChatDriver, fake: FakeServer) -> None:
    answer = started(chat, fake, "Hello", "Half")
    chat.press("Rename Hello")
    field = chat.page.get_by_label("Name of the conversation")
    field.fill("Ha")
    answer.end()
    chat.wait_until_idle()
    expect(field).to_be_focused()
    field.fill("Harvest")
    field.press("Enter")
    expect(chat.page.locator(NAMES)).to_have_text(["Harvest"])


def test_settings_that_escape_leaves_are_not_taken(chat: ChatDriver, fake: FakeServer) -> None:
    chat.press("Settings")
    chat.page.fill("#samples", "5000")
    chat.page.fill("#set-temperature", "-3")
    chat.page.keyboard.press("Escape")
    chat.type("Hello")
    answer = fake.answer()
    assert "n" not in answer.body and "temperature" not in answer.body
    answer.tell("Yes")
    chat.wait_until_idle()
    wild = json.dumps({"samples": 1e9, "seed": -5, "sampling": {"temperature": 99, "top_k": "x", "max_tokens": 1.7}})
    chat.page.evaluate("(wild) => localStorage.setItem('nano-inference.settings', wild)", wild)
    fake.info["max_n"] = 2
    chat.page.reload()
    chat.wait_until_ready()
    chat.type("Again")
    body = fake.answer().body
    assert (body["n"], body["seed"], body["temperature"], body["max_tokens"]) == (2, 0, 2, 2) and "top_k" not in body


def test_a_key_that_no_header_can_carry_is_refused_here(context: BrowserContext, fake: FakeServer) -> None:
    fake.key = "secret-key"
    chat = ChatDriver(context, fake.url, ready=False)
    chat.page.fill("#key-field", "schlüssel-ключ")
    chat.press("Use this key")
    expect(chat.page.locator(TOAST)).to_contain_text("only ASCII")
    chat.press("Enter a key")
    chat.page.fill("#key-field", "  secret-key ")
    chat.press("Use this key")
    chat.wait_until_ready()


def test_a_proxy_that_finds_no_server_is_waited_for(context: BrowserContext, fake: FakeServer) -> None:
    fake.ready = (502, "Bad Gateway")
    chat = ChatDriver(context, fake.url, ready=False)
    expect(chat.page.locator("#banner")).to_contain_text("The server does not answer")
    fake.ready = (200, "ready")
    chat.wait_until_ready()


def test_the_server_ended_an_answer(chat: ChatDriver, fake: FakeServer) -> None:
    chat.type("Hello")
    answer = fake.answer()
    answer.say("Half")
    answer.end("abort")
    expect(chat.last()).to_contain_text("The server ended this answer.")
    expect(chat.last().get_by_role("button", name="Continue")).to_be_visible()


def test_a_stopped_answer_says_which_weights_drew_it(chat: ChatDriver, fake: FakeServer) -> None:
    chat.type("Hello")
    answer = fake.answer()
    answer.choice({"content": "a"}, token_ids=[1, 2], mask=[1, 1], token_versions=[3, 3])
    answer.choice({"content": "b"}, token_ids=[3], mask=[1], token_versions=[4])
    expect(chat.last().locator(".body")).to_have_text("ab")
    chat.press("Stop")
    expect(chat.fact("Weights")).to_have_text("3 → 4")


def test_searching_hides_nothing_on_a_desktop(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Hello", "Yes")
    chat.page.keyboard.press("Control+k")
    chat.page.fill("#search", "hello")
    chat.page.locator(NAMES).click()
    expect(chat.page.locator("#veil")).to_be_hidden()


def test_the_focus_stays_where_it_was_of_use(chat: ChatDriver, fake: FakeServer) -> None:
    page = chat.page
    answered(chat, fake, "Hello", "One")
    chat.press("Regenerate")
    fake.answer().tell("Two")
    chat.wait_until_idle()
    back = page.get_by_role("button", name="Previous version")
    back.focus()
    for text in ("One", "Two", "One"):
        page.keyboard.press("Enter")
        expect(chat.last().locator(".body")).to_have_text(text)
        expect(page.get_by_role("button", name="Previous version")).to_be_focused()
    chat.press("Tokens")
    page.locator(".tokens .token").first.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(page.locator(".tokens .token").first).to_be_focused()
    expect(page.locator("#alternatives")).to_be_hidden()
    page.fill("#draft", "More")
    page.click("#send")
    expect(page.locator("#draft")).to_be_focused()
    fake.answer().say("Slow")
    page.click("#stop")
    expect(page.locator("#draft")).to_be_focused()


def test_escape_ends_a_search_and_not_the_answer(chat: ChatDriver, fake: FakeServer) -> None:
    answer = started(chat, fake, "Hello", "Slow")
    chat.page.fill("#search", "nothing")
    chat.page.keyboard.press("Escape")
    assert chat.page.input_value("#search") == "" and not answer.gone.is_set()
    answer.end()
    chat.wait_until_idle()


def test_29_over_plain_http_in_a_local_network(browser: Browser, fake: FakeServer) -> None:
    """Where a page is no secure context, and lacks what only those have."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    arguments = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP lan.test 127.0.0.1"]
    other = browser.browser_type.launch(executable_path=path, args=arguments)
    chat = ChatDriver(other.new_context(), fake.url.replace("127.0.0.1", "lan.test"))
    assert chat.page.evaluate("[isSecureContext, typeof navigator.clipboard, typeof crypto.randomUUID]") == [
        False, "undefined", "undefined",
    ]  # fmt: skip
    answered(chat, fake, "Hello", "Yes")
    chat.press("Copy", chat.last())
    expect(chat.page.locator(".toast").last).to_contain_text("Copied.")
    chat.page.reload()
    chat.wait_until_ready()
    expect(chat.last().locator(".body")).to_have_text("Yes")
    chat.watch.assert_clean()
    other.close()
