"""The page with hostile or failing surroundings: odd answers and files, missing storage, several tabs, crashes."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Browser, BrowserContext, expect
from playwright.sync_api import Error as PlaywrightError

from tests.web.chat_driver import ChatDriver, answered, started
from tests.web.chromium import chromium_path
from tests.web.fake import TIMEOUT_S, FakeServer

TOAST, NAMES = ".toast.bad", ".chat-name"
FAILED = "Failed to load resource"


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


def test_deleted_conversation_is_not_saved_again_by_its_answer(chat: ChatDriver, fake: FakeServer) -> None:
    answer = started(chat, fake, "Hello", "Half")
    chat.press("Delete Hello")
    assert answer.gone.wait(TIMEOUT_S)
    expect(chat.page.locator(NAMES)).to_have_count(0)
    chat.page.reload()
    chat.wait_until_ready()
    expect(chat.page.locator(NAMES)).to_have_count(0)


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
