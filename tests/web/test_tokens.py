"""Tests with a real engine: tokens, alternatives, seeds, samples side by side, the calculator, weight versions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Locator, expect

from nano_inference.loading.catalog import find_builtin
from nano_inference.server.config import ServerConfig
from tests.server.tiny import Running, opened, running
from tests.web.chat_driver import ChatDriver, shown_text

QUESTION = "Tell me"


@pytest.fixture
def real(context: BrowserContext, server: Running) -> ChatDriver:
    """The page of a tiny random model, which generates the same twenty tokens each time."""
    chat = ChatDriver(context, server.url)
    settings = {"temperature": "1", "max_tokens": "20"}
    chat.press("Settings")
    chat.page.fill("#seed", "4")
    for name, value in settings.items():
        chat.page.fill(f"#set-{name}", value)
    chat.press("Done")
    return chat


def ask(chat: ChatDriver, question: str = QUESTION) -> None:
    chat.type(question)
    expect(chat.last().locator(".actions")).to_contain_text("Regenerate")
    chat.wait_until_idle()


def stored_messages(chat: ChatDriver) -> list[dict[str, Any]]:
    """Return the messages in the page's database, oldest first."""
    found: list[dict[str, Any]] = chat.page.evaluate(
        """() => new Promise((done) => { indexedDB.open("nano-inference", 1).onsuccess = (event) => {
            event.target.result.transaction("messages").objectStore("messages").getAll().onsuccess = (all) =>
                done(all.target.result.sort((a, b) => a.created - b.created)); }; })"""
    )
    return found


def answers(chat: ChatDriver) -> list[dict[str, Any]]:
    return [one for one in stored_messages(chat) if one["role"] == "assistant"]


def ids(answer: dict[str, Any]) -> list[int]:
    return [token[0] for token in answer["tokens"]]


def tokens_of(chat: ChatDriver) -> Locator:
    chat.press("Tokens", chat.last())
    return chat.page.locator(".tokens .token")


def chat_defaults(server: Running) -> dict[str, Any]:
    """Return the sampling fields that the page sends: the server's defaults and the fixture's settings."""
    return {**server.client.get("/info").json()["chat_defaults"], "temperature": 1, "max_tokens": 20}


def test_every_token_shows_its_probability_and_alternatives(real: ChatDriver, server: Running) -> None:
    ask(real)
    (answer,) = answers(real)
    tokens = tokens_of(real)
    expect(tokens).to_have_count(len(answer["tokens"]))
    seed = answer["seed"]
    body = {"messages": [{"role": "user", "content": QUESTION}], "seed": seed, **chat_defaults(server)}
    answered = server.post("/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 5}).json()["choices"][0]
    for index, entry in enumerate(answered["logprobs"]["content"]):
        assert answer["tokens"][index][2] == pytest.approx(entry["logprob"], abs=1e-4)
        chance = math.exp(entry["logprob"])
        step = sum(chance < limit for limit in (0.9, 0.7, 0.5, 0.3, 0.1))
        expect(tokens.nth(index)).to_have_class(re.compile(rf"\bp{step}\b"))
    tokens.nth(3).hover()
    panel = real.page.locator("#alternatives")
    top = answered["logprobs"]["content"][3]["top_logprobs"]
    expect(panel.locator("li")).to_have_count(len(top))
    for index, one in enumerate(top):
        expect(panel.locator("li").nth(index)).to_contain_text(f"{100 * math.exp(one['logprob']):.1f} %")
        shown = panel.locator("li span").nth(2 * index + 1).inner_text()
        assert float(shown) == pytest.approx(one["logprob"], abs=6e-4)
    real.watch.assert_clean()


def test_end_token_as_alternative_ends_the_answer(context: BrowserContext, server: Running) -> None:
    """Choosing the end token ends the answer at its position, without sampling."""
    chat = ChatDriver(context, server.url)
    chat.set(seed="4")
    ask(chat)
    end = server.client.get("/info").json()["end_token_ids"][0]
    chat.page.evaluate("() => 0")
    chat.page.reload()
    chat.wait_until_ready()
    (answer,) = answers(chat)
    answer["tokens"][2][4] = [[end, "<|im_end|>", -1.5]]
    chat.page.evaluate(
        """(one) => new Promise((done) => { indexedDB.open("nano-inference", 1).onsuccess = (event) => {
            const work = event.target.result.transaction("messages", "readwrite");
            work.objectStore("messages").put(one); work.oncomplete = done; }; })""",
        answer,
    )
    chat.page.reload()
    chat.wait_until_ready()
    tokens_of(chat).nth(2).click()
    chat.page.locator("#alternatives li button:enabled").click()
    expect(chat.last()).to_contain_text("2/2")
    chat.wait_until_idle()
    _, ended = answers(chat)
    assert ids(ended) == [*ids(answer)[:2], end] and ended["finish"] == "stop"
    assert answer["text"].startswith(ended["text"].rstrip("\ufffd"))


def test_continued_answer_equals_an_uninterrupted_one(real: ChatDriver) -> None:
    real.set(seed="11")
    real.press("Settings")
    real.page.fill("#set-max_tokens", "8")
    real.press("Done")
    ask(real)
    expect(real.last()).to_contain_text("The answer reached its token limit.")
    real.press("Continue")
    expect(real.last()).to_contain_text("16 tokens")
    real.wait_until_idle()
    real.press("Settings")
    real.page.fill("#set-max_tokens", "16")
    real.press("Done")
    real.press("Regenerate")
    expect(real.last()).to_contain_text("2/2")
    real.wait_until_idle()
    pieced, whole = answers(real)
    assert ids(pieced) == ids(whole) and pieced["text"].rstrip("\ufffd") == whole["text"].rstrip("\ufffd")


def test_samples_are_shown_side_by_side_and_one_is_chosen(real: ChatDriver) -> None:
    real.set(samples="3", seed="5")
    real.type(QUESTION)
    columns = real.page.locator(".column")
    expect(columns).to_have_count(3)
    for index in range(3):
        expect(real.fact("Sample", columns.nth(index))).to_have_text(f"{index + 1} of 3")
        expect(columns.nth(index)).to_contain_text("Regenerate")
    real.wait_until_idle()
    assert len({tuple(ids(one)) for one in answers(real)}) == 3
    second = shown_text(columns.nth(1).locator(".body"))
    real.press("Use this one", columns.nth(1))
    expect(columns).to_have_count(0)
    expect(real.last().locator(".body")).to_have_text(second, use_inner_text=True)
    expect(real.last()).to_contain_text("2/3")
    real.press("Compare")
    expect(columns).to_have_count(3)
    real.page.reload()
    real.wait_until_ready()
    expect(columns).to_have_count(3)
    real.watch.assert_clean()


@pytest.fixture(scope="module")
def calculator() -> Iterator[Running]:
    builtin = find_builtin("calculator")
    assert builtin is not None
    with running(builtin.directory, ServerConfig(port=0, log_requests=False), make=opened) as one:
        yield one


def test_calculator_computes_a_changed_expression_again(context: BrowserContext, calculator: Running) -> None:
    chat = ChatDriver(context, calculator.url)
    chat.press("Settings")
    chat.page.fill("#set-temperature", "0")
    chat.press("Done")
    ask(chat, "What is 12 + 34?")
    expect(chat.last().locator("details.call summary")).to_contain_text("12+34 → 46")
    expect(chat.last().locator(".markdown").last).to_contain_text("46")
    (answer,) = answers(chat)
    forced = [token for token in answer["tokens"] if token[3]]
    assert forced and all(token[2] == 0 for token in forced)
    tokens = tokens_of(chat)
    expect(chat.page.locator(".tokens .token.forced")).to_have_count(len(forced))
    digit = next(i for i, token in enumerate(answer["tokens"]) if token[1].endswith("4") and not token[3])
    tokens.nth(digit).click()
    others = [one[1] for one in answer["tokens"][digit][4] if one[1].isdigit() and one[0] != answer["tokens"][digit][0]]
    chat.page.locator("#alternatives li button:enabled", has_text=others[0]).first.click()
    expect(chat.last()).to_contain_text("2/2")
    chat.wait_until_idle()
    changed = answers(chat)[1]
    python, output = changed["parts"][0], changed["parts"][1]
    assert python["type"] == "python" and python["text"] != "12+34"
    assert output == {"type": "python_output", "text": str(eval(python["text"]))}
    assert any(token[3] for token in changed["tokens"]), "the new result is forced"
    chat.watch.assert_clean()
