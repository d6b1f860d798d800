"""The page with hostile or failing surroundings: odd answers and files, missing storage, several tabs, crashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, expect
from playwright.sync_api import Error as PlaywrightError

from tests.web.chat_driver import ChatDriver, answered, started
from tests.web.chromium import chromium_path
from tests.web.fake import TIMEOUT_S, FakeServer

TOAST, NAMES = ".toast.bad", ".chat-name"
FAILED = "Failed to load resource"


@pytest.mark.parametrize("text", [">" * 4000, "1. " * 3000, "[" * 20000])
def test_unparsable_markdown_is_shown_unchanged(chat: ChatDriver, fake: FakeServer, text: str) -> None:
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
    entry = {"conversation": {"title": "File", "system": ""}, "messages": [{**GOOD, **fields}]}
    path = directory / "chats.json"
    path.write_text(json.dumps({"format": "nano-inference-chats", "version": 1, "chats": [entry]}))
    chat.page.set_input_files("#file", path)


@pytest.mark.parametrize(
    "fields",
    [{"versions": [None]}, {"tokens": [[1, "a", "x", 0, []]]}, {"tokens": [[1, "a", 0, 0, [None]]]}, {"parts": [{}]}],
)
def test_import_refuses_malformed_messages(chat: ChatDriver, tmp_path: Path, fields: dict[str, Any]) -> None:
    import_message(chat, tmp_path, **fields)
    expect(chat.page.locator(TOAST)).to_contain_text("is not a conversation with messages")
    chat.page.reload()
    chat.wait_until_ready()
    assert chat.page.locator(NAMES).count() == 0


def test_import_sanitizes_other_fields(chat: ChatDriver, tmp_path: Path) -> None:
    odd = {"stats": {"speed": "x", "first": {}}, "finish": {"a": 1}, "seed": "<b>", "sample": "y", "error": {}}
    import_message(chat, tmp_path, **odd, extra="z")
    expect(chat.last().locator(".body")).to_have_text("Text")
    expect(chat.last()).to_contain_text("This answer was interrupted.")
    chat.press("Tokens")
    chat.page.locator(".tokens .token").first.click()
    expect(chat.page.locator("#alternatives li")).to_have_count(2)
    chat.watch.assert_clean()


def test_full_disk_is_reported_once_and_the_chat_continues(context: BrowserContext, fake: FakeServer) -> None:
    full = "IDBObjectStore.prototype.put = () => { throw new DOMException('no room', 'QuotaExceededError'); }"
    context.add_init_script(full)
    chat = ChatDriver(context, fake.url)
    answered(chat, fake, "Hello", "First")
    chat.press("Regenerate")
    fake.answer().complete("Second")
    chat.wait_until_idle()
    expect(chat.last().locator(".body")).to_have_text("Second")
    expect(chat.page.locator(TOAST)).to_have_count(1)
    expect(chat.page.locator(TOAST)).to_contain_text("cannot store the conversation (QuotaExceededError)")
    chat.watch.assert_clean()


def test_browser_without_any_storage(context: BrowserContext, fake: FakeServer) -> None:
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


def test_tabs_show_the_same_state(context: BrowserContext, fake: FakeServer) -> None:
    one = ChatDriver(context, fake.url)
    answered(one, fake, "Hello", "Yes")
    two = ChatDriver(context, fake.url)
    expect(two.last().locator(".body")).to_have_text("Yes")
    answer = started(one, fake, "More", "Half")
    expect(two.answers()).to_have_count(2)
    expect(two.page.locator("#stop")).to_be_visible()
    assert two.page.get_by_text("interrupted").count() == 0
    two.press("Stop")
    assert answer.gone.wait(TIMEOUT_S), "the request is aborted from the other tab"
    for chat in (one, two):
        expect(chat.last()).to_contain_text("Stopped.")
        expect(chat.last().locator(".body")).to_have_text("Half")
    two.press("Delete Hello")
    expect(one.page.locator(NAMES)).to_have_count(0)
    expect(one.answers()).to_have_count(0)
    one.watch.assert_clean()
    two.watch.assert_clean()


def test_crashed_tab_releases_its_conversation(context: BrowserContext, fake: FakeServer) -> None:
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
    assert answer.gone.wait(TIMEOUT_S)
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


def test_no_request_starts_before_the_last_answer_is_saved(context: BrowserContext, fake: FakeServer) -> None:
    """A request that starts earlier would never release its lock."""
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


def test_try_again_works_as_soon_as_it_is_shown(context: BrowserContext, fake: FakeServer) -> None:
    """A failed answer counts as running until it is saved, so the button must not appear earlier."""
    context.add_init_script(_SLOW_SAVES)
    chat = ChatDriver(context, fake.url)
    answer = started(chat, fake, "Hello", "Half")
    chat.page.evaluate("window.isSlow = true")
    answer.event({"error": {"message": "out of memory"}})
    answer.raw(b"")
    expect(chat.last()).to_have_attribute("aria-busy", "false")
    chat.until("held.length > 0")
    assert chat.page.locator(TOAST).count() == 0
    chat.page.evaluate("() => { window.isSlow = false; for (const one of held) one(); }")
    chat.press("Try again", chat.page.locator(TOAST))
    fake.answer().complete(" and half")
    expect(chat.last().locator(".body")).to_have_text("Half and half")


def test_reload_during_a_save_loses_nothing(context: BrowserContext, fake: FakeServer) -> None:
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
    # The save fails, as if the page were closed before it.
    chat.page.evaluate("() => { window.isBroken = true; window.isAsked = false; }")
    answer.say("Half")
    chat.until("isAsked")
    chat.page.reload()
    chat.wait_until_ready()
    expect(chat.last().locator(".body")).to_have_text("Half")


def test_settings_apply_to_a_message_sent_immediately(chat: ChatDriver, fake: FakeServer) -> None:
    chat.press("Settings")
    chat.page.fill("#seed", "5")
    chat.page.fill("#system", "Rhyme.")
    chat.page.evaluate(
        """() => {  // the dialog's close event may come late
          document.addEventListener("close", (event) => event.stopPropagation(), true);
          document.querySelector("#settings button.primary").click();
          document.getElementById("draft").value = "Hello";
          document.getElementById("send").click(); }"""
    )
    body = fake.answer().body
    assert body["seed"] == 5 and body["messages"][0] == {"role": "system", "content": "Rhyme."}


def test_end_of_an_answer_keeps_the_rows_of_the_list(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Other", "Yes")
    chat.press("New chat")
    answered(chat, fake, "Hello", "Yes")
    answer = started(chat, fake, "More", "Half")
    chat.page.evaluate("() => { window.rows = [...document.querySelectorAll('#chats li')]; }")
    other = chat.page.locator(NAMES, has_text="Other")
    other.focus()
    answer.complete(" and half")
    chat.wait_until_idle()
    expect(other).to_be_focused()
    assert chat.page.evaluate("rows.every((row, i) => row === document.querySelectorAll('#chats li')[i])")


def test_recovered_message_does_not_replace_a_newer_one(context: BrowserContext, fake: FakeServer) -> None:
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
    fake.answer().complete(" and half")
    chat.wait_until_idle()
    left = json.dumps({"messages": [{**one, "finish": None} for one in old]})
    chat.page.evaluate("(left) => localStorage.setItem('nano-inference.unsaved.x', left)", left)
    chat.page.reload()
    chat.wait_until_ready()
    expect(chat.last().locator(".body")).to_have_text("Half and half")
    assert chat.page.evaluate("Object.keys(localStorage).filter((key) => key.includes('unsaved')).length") == 0


def test_edit_and_regenerate_are_disabled_until_the_server_is_ready(context: BrowserContext, fake: FakeServer) -> None:
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


def test_conversation_has_one_running_answer(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Hello", "One", " two")
    chat.press("Tokens")
    answer = started(chat, fake, "More", "Slow")
    chat.page.locator(".tokens .token").first.click()
    expect(chat.page.get_by_role("button", name='Continue with "A"')).to_be_disabled()
    expect(chat.page.locator("#alternatives")).to_contain_text("when the answer has ended")
    chat.press("Stop")
    assert answer.gone.wait(TIMEOUT_S), "Stop aborts the only request"
    chat.wait_until_idle()


def test_double_click_on_send_sends_once(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Hello", "Yes")
    chat.press("Edit")
    chat.page.evaluate(
        """() => { const send = [...document.querySelectorAll(".message.user button")]
            .find((one) => one.textContent === "Send"); send.click(); send.click(); }"""
    )
    fake.answer().complete("Once")
    chat.wait_until_idle()
    expect(chat.page.locator(".message.user")).to_contain_text("2/2")


def test_answer_stays_in_its_conversation_after_opening_a_new_one(chat: ChatDriver, fake: FakeServer) -> None:
    chat.page.fill("#draft", "Hello")
    chat.page.evaluate(
        "() => { document.getElementById('send').click(); document.getElementById('new-chat').click(); }"
    )
    fake.answer().complete("There")
    expect(chat.page.locator(NAMES)).to_have_text(["Hello"])
    chat.page.locator(NAMES).click()
    expect(chat.last().locator(".body")).to_have_text("There")
    expect(chat.page.locator(".message.user")).to_contain_text("Hello")


def test_try_again_opens_the_conversation_of_the_failure(chat: ChatDriver, fake: FakeServer) -> None:
    fake.refusals = [(400, {"message": "not now"})]
    chat.type("Hello")
    expect(chat.page.locator(TOAST)).to_contain_text("not now")
    chat.press("New chat")
    chat.press("Try again", chat.page.locator(TOAST))
    answer = fake.answer()
    assert answer.body["messages"] == [{"role": "user", "content": "Hello"}]
    answer.complete("Now")
    expect(chat.last().locator(".body")).to_have_text("Now")
    expect(chat.page.locator("#title")).to_have_text("Hello")


def test_deleted_conversation_is_not_saved_again_by_its_answer(chat: ChatDriver, fake: FakeServer) -> None:
    answer = started(chat, fake, "Hello", "Half")
    chat.press("Delete Hello")
    assert answer.gone.wait(TIMEOUT_S)
    expect(chat.page.locator(NAMES)).to_have_count(0)
    chat.page.reload()
    chat.wait_until_ready()
    expect(chat.page.locator(NAMES)).to_have_count(0)


def test_end_of_an_answer_does_not_interrupt_renaming(chat: ChatDriver, fake: FakeServer) -> None:
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


def test_escape_discards_settings_and_stored_ones_are_clamped(chat: ChatDriver, fake: FakeServer) -> None:
    chat.press("Settings")
    chat.page.fill("#samples", "5000")
    chat.page.fill("#set-temperature", "-3")
    chat.page.keyboard.press("Escape")
    expect(chat.page.locator("#toasts")).to_contain_text("The changed settings were discarded.")
    chat.type("Hello")
    answer = fake.answer()
    assert "n" not in answer.body and "temperature" not in answer.body
    answer.complete("Yes")
    chat.wait_until_idle()
    wild = json.dumps({"samples": 1e9, "seed": -5, "sampling": {"temperature": 99, "top_k": "x", "max_tokens": 1.7}})
    chat.page.evaluate("(wild) => localStorage.setItem('nano-inference.settings', wild)", wild)
    fake.info["max_n"] = 2
    chat.page.reload()
    chat.wait_until_ready()
    chat.type("Again")
    body = fake.answer().body
    assert (body["n"], body["seed"], body["temperature"], body["max_tokens"]) == (2, 0, 2, 2) and "top_k" not in body


def test_key_with_invalid_characters_is_refused(context: BrowserContext, fake: FakeServer) -> None:
    fake.key = "secret-key"
    chat = ChatDriver(context, fake.url, ready=False)
    chat.page.fill("#key-field", "schlüssel-ключ")
    chat.press("Use this key")
    expect(chat.page.locator(TOAST)).to_contain_text("only ASCII")
    chat.press("Enter a key")
    chat.page.fill("#key-field", "  secret-key ")
    chat.press("Use this key")
    chat.wait_until_ready()


def test_page_waits_for_the_server_behind_a_proxy(context: BrowserContext, fake: FakeServer) -> None:
    fake.ready = (502, "Bad Gateway")
    chat = ChatDriver(context, fake.url, ready=False)
    expect(chat.page.locator("#banner")).to_contain_text("The server does not answer")
    fake.ready = (200, "ready")
    chat.wait_until_ready()


def test_answer_aborted_by_the_server(chat: ChatDriver, fake: FakeServer) -> None:
    chat.type("Hello")
    answer = fake.answer()
    answer.say("Half")
    answer.end("abort")
    expect(chat.last()).to_contain_text("The server aborted this answer.")
    expect(chat.last().get_by_role("button", name="Continue")).to_be_visible()


def test_stopped_answer_shows_the_weight_versions(chat: ChatDriver, fake: FakeServer) -> None:
    chat.type("Hello")
    answer = fake.answer()
    answer.choice({"content": "a"}, token_ids=[1, 2], mask=[1, 1], token_versions=[3, 3])
    answer.choice({"content": "b"}, token_ids=[3], mask=[1], token_versions=[4])
    expect(chat.last().locator(".body")).to_have_text("ab")
    chat.press("Stop")
    expect(chat.fact("Weights")).to_have_text("3 → 4")


def test_search_on_a_desktop_does_not_cover_the_page(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Hello", "Yes")
    chat.page.keyboard.press("Control+k")
    chat.page.fill("#search", "hello")
    chat.page.locator(NAMES).click()
    expect(chat.page.locator("#veil")).to_be_hidden()


def test_focus_is_kept_on_equivalent_elements(chat: ChatDriver, fake: FakeServer) -> None:
    page = chat.page
    answered(chat, fake, "Hello", "One")
    chat.press("Regenerate")
    fake.answer().complete("Two")
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


def test_escape_in_the_search_does_not_stop_the_answer(chat: ChatDriver, fake: FakeServer) -> None:
    answer = started(chat, fake, "Hello", "Slow")
    chat.page.fill("#search", "nothing")
    chat.page.keyboard.press("Escape")
    assert chat.page.input_value("#search") == "" and not answer.gone.is_set()
    answer.end()
    chat.wait_until_idle()


def test_chat_over_plain_http_in_a_local_network(browser: Browser, fake: FakeServer) -> None:
    """The page is not a secure context there and lacks some browser functions."""
    arguments = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP lan.test 127.0.0.1"]
    other = browser.browser_type.launch(executable_path=chromium_path(), args=arguments)
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
