"""An answer on the page: streaming, stopping, versions, continuing, copying, Markdown, settings, figures."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.web.chat_driver import ChatDriver, answered, shown_text, started
from tests.web.fake import TIMEOUT_S, FakeServer


def test_answer_text_is_streamed(chat: ChatDriver, fake: FakeServer) -> None:
    answer = started(chat, fake, "Hello", "One", " two")
    assert chat.page.locator("#stop").is_visible()
    answer.say(" three")
    expect(chat.last().locator(".body")).to_have_text("One two three")
    answer.end()
    chat.wait_until_idle()
    assert answer.body["messages"] == [{"role": "user", "content": "Hello"}]
    assert answer.body["stream"] and answer.body["logprobs"] and answer.body["return_token_ids"]
    assert answer.body["reasoning_format"] == "none", "the page shows the marks as thoughts"
    chat.watch.assert_clean()


def test_stop_and_escape_abort_the_request_and_keep_the_text(chat: ChatDriver, fake: FakeServer) -> None:
    for stop in (lambda: chat.press("Stop"), lambda: chat.page.keyboard.press("Escape")):
        answer = started(chat, fake, "Hello", "Half")
        stop()
        assert answer.gone.wait(TIMEOUT_S), "the request was not aborted"
        chat.wait_until_idle()
        expect(chat.last()).to_contain_text("Stopped.")
        expect(chat.last().locator(".body")).to_have_text("Half")
    chat.watch.assert_clean()


def test_regenerate_adds_a_version(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Hello", "First")
    chat.press("Regenerate")
    again = fake.answer()
    assert again.body["messages"] == [{"role": "user", "content": "Hello"}]
    again.complete("Second")
    chat.wait_until_idle()
    expect(chat.answers()).to_have_count(1)
    expect(chat.last()).to_contain_text("2/2")
    chat.press("Previous version")
    expect(chat.last().locator(".body")).to_have_text("First")
    expect(chat.last()).to_contain_text("1/2")
    chat.press("Previous version")
    expect(chat.last().locator(".body")).to_have_text("Second")


def test_edit_adds_a_version_with_separate_answers(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Good morning", "To you too")
    chat.press("Edit")
    chat.page.get_by_label("Edit your message").fill("Good evening")
    chat.press("Send", chat.page.locator(".message.user"))
    edited = fake.answer()
    assert [one["content"] for one in edited.body["messages"]] == ["Good evening"]
    edited.complete("Likewise")
    chat.wait_until_idle()
    expect(chat.page.locator(".message.user")).to_contain_text("Good evening")
    chat.press("Previous version", chat.page.locator(".message.user"))
    expect(chat.page.locator(".message.user")).to_contain_text("Good morning")
    expect(chat.last().locator(".body")).to_have_text("To you too")


def test_continue_sends_the_exact_tokens(chat: ChatDriver, fake: FakeServer) -> None:
    answer = started(chat, fake, "Hello", "Half", " an")
    chat.press("Stop")
    chat.wait_until_idle()
    chat.press("Continue")
    rest = fake.answer()
    assert rest.body["answer_token_ids"] == [7, 7] and rest.body["seed"] == answer.body["seed"]
    assert [one["role"] for one in rest.body["messages"]] == ["user"]
    rest.complete(" answer")
    chat.wait_until_idle()
    expect(chat.last().locator(".body")).to_have_text("Half an answer")
    expect(chat.answers()).to_have_count(1)
    expect(chat.last()).to_contain_text("3 tokens")


@pytest.mark.parametrize(
    ("headers", "text"),
    [({}, "The answer reached its token limit."), ({"x-max-tokens": "2"}, "The model's context is full.")],
)
def test_truncated_answer_names_the_limit(
    chat: ChatDriver, fake: FakeServer, headers: dict[str, str], text: str
) -> None:
    fake.answer_headers = headers
    answer = started(chat, fake, "Hello", "Half", " an")
    answer.end("length")
    expect(chat.last().locator(".ending")).to_have_text(text)
    chat.wait_until_idle()
    chat.page.reload()
    chat.wait_until_ready()
    expect(chat.last().locator(".ending")).to_have_text(text)
    fake.answer_headers = {"x-max-tokens": "5"}
    chat.press("Regenerate")
    fake.answer().complete("Whole")
    chat.wait_until_idle()
    expect(chat.last().locator(".ending")).to_have_count(0)


MARKDOWN = """\
# Title

Some *stress*, **weight**, ~~no~~, `code` and a [link](https://example.org/a?b=c).

- one
- two
  - inner

1. first
2. second

- [x] done

> quoted

| a | b |
|---|---|
| 1 | 2 |

---
![picture](https://example.org/p.png)
"""


def test_markdown(chat: ChatDriver, fake: FakeServer) -> None:
    answered(chat, fake, "Hello", *MARKDOWN.splitlines(keepends=True))
    body = chat.last().locator(".body")
    for selector, text in {
        "h2": "Title", "em": "stress", "strong": "weight", "del": "no", "p code": "code", "ul ul li": "inner",
        "ol li >> nth=1": "second", "blockquote": "quoted", "table td >> nth=1": "2",
    }.items():  # fmt: skip
        expect(body.locator(selector)).to_have_text(text)
    expect(body).to_contain_text("☑ done")
    links = body.locator("a")
    for index, address in enumerate(("https://example.org/a?b=c", "https://example.org/p.png")):
        expect(links.nth(index)).to_have_attribute("href", address)
        expect(links.nth(index)).to_have_attribute("rel", "noopener noreferrer")
        expect(links.nth(index)).to_have_attribute("target", "_blank")
    assert body.locator("img").count() == 0, "an image would send a request to another server"
    chat.watch.assert_clean()


def test_streamed_markdown_equals_markdown_at_once(chat: ChatDriver, fake: FakeServer) -> None:
    chat.type("Hello")
    answer = fake.answer()
    text = MARKDOWN + "\n```js\nlet a = 1;\nlet b = 2;\n```\n\nEnd."
    answer.say(*(text[at : at + 7] for at in range(0, len(text), 7)))
    body = chat.last().locator(".body")
    expect(body).to_contain_text("End.")
    live = shown_text(body.locator(".markdown"))
    answer.end()
    chat.wait_until_idle()
    assert [line for line in live.split() if line != "Copy"] == [
        line for line in shown_text(body).split() if line != "Copy"
    ]


def test_tool_call_shows_expression_and_result(chat: ChatDriver, fake: FakeServer) -> None:
    fake.info["calculator"] = True
    chat.page.reload()
    chat.wait_until_ready()
    chat.type("12 + 34?")
    answer = fake.answer()
    assert answer.body["calculator"] is True
    answer.choice({"content": "[12+34", "parts": [{"type": "python", "text": "12+34"}]}, token_ids=[1, 2], mask=[1, 1])
    call = chat.last().locator("details.call")
    expect(call.locator("summary")).to_contain_text("12+34 → …")
    parts = [{"type": "python_output", "text": "46"}, {"type": "text", "text": "It is 46."}]
    answer.choice({"content": " → 46] It is 46.", "parts": parts}, token_ids=[3, 4, 5], mask=[0, 0, 1])
    expect(call.locator("summary")).to_contain_text("12+34 → 46")
    answer.end()
    chat.wait_until_idle()
    assert not call.locator("p").is_visible()
    call.locator("summary").click()
    expect(call.locator("p")).to_contain_text("forced by the calculator")
    chat.press("Tokens")
    expect(chat.page.locator(".tokens .token.forced")).to_have_count(2)
    chat.type("And then?")
    message = fake.answer().body["messages"][1]
    assert message["parts"] == [{"type": "python", "text": "12+34"}, *parts]


def test_settings_are_sent_and_can_be_reset(chat: ChatDriver, fake: FakeServer) -> None:
    chat.press("Settings")
    assert chat.page.get_attribute("#set-temperature", "placeholder") == "0.7"
    for name, value in {"temperature": "0.2", "top_k": "5", "max_tokens": "50", "presence_penalty": "-1"}.items():
        chat.page.fill(f"#set-{name}", value)
    chat.page.fill("#system", "Be brief.")
    chat.press("Done")
    chat.type("Hello")
    answer = fake.answer()
    assert {name: answer.body[name] for name in ("temperature", "top_k", "max_tokens", "presence_penalty")} == {
        "temperature": 0.2, "top_k": 5, "max_tokens": 50, "presence_penalty": -1,
    }  # fmt: skip
    assert answer.body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "top_p" not in answer.body
    answer.complete("Yes")
    chat.wait_until_idle()
    chat.press("Settings")
    chat.press("Reset to the server's defaults")
    assert chat.page.input_value("#set-temperature") == ""
    chat.press("Done")
    chat.type("Again")
    body = fake.answer().body
    assert "temperature" not in body and "top_k" not in body


def test_thoughts_are_collapsed(chat: ChatDriver, fake: FakeServer) -> None:
    chat.type("Hello")
    answer = fake.answer()
    answer.say("<think>Let me", " see")
    expect(chat.last().locator("details.thought summary")).to_have_text("Thinking…")
    answer.say("</think>", "Well.")
    answer.end()
    chat.wait_until_idle()
    expect(chat.last().locator("details.thought summary")).to_have_text("Thoughts")
    expect(chat.last().locator(".markdown")).to_have_text("Well.")


def test_answer_that_repeats_itself_ends_by_name(chat: ChatDriver, fake: FakeServer) -> None:
    """The page closes the request; Continue takes the answer up again."""
    chat.type("Hello")
    answer = fake.answer()
    answer.say(*["la"] * 127)
    expect(chat.last()).to_contain_text("127 tokens")
    assert not answer.gone.is_set()
    answer.say("la")
    expect(chat.last()).to_contain_text("Stopped: the answer repeats itself.")
    chat.wait_until_idle()
    assert answer.gone.wait(TIMEOUT_S), "the request was not closed"
    chat.press("Continue")
    rest = fake.answer()
    assert rest.body["answer_token_ids"] == [7] * 128
    rest.complete("!")
    chat.wait_until_idle()
    expect(chat.last()).not_to_contain_text("repeats itself")
    chat.watch.assert_clean()
