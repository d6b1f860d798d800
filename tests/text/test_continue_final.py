"""Continuing the last message, and the other options of a rendering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nano_inference.nanochat.calculator import python_tool
from nano_inference.nanochat.dialogue import NanochatDialogue
from nano_inference.text.chat import chat_template, encode_chat, render
from nano_inference.text.dialogue import ANSWER, Rendering, TemplateDialogue
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import BadRequest
from tests.nanochat.samples import tokenizer as nanochat_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK = {"role": "user", "content": "hello"}
OPEN = Rendering(add_generation_prompt=False, continue_final=True)
CONTENTS = ("So", "", "So ", " two\n\n", "<|im_end|>", "\ue000", "a\ue000\ue001b", "日本 😀", "{{ x }}", "hello")


@pytest.fixture(scope="module")
def tokenizer(chatml_dir: Path) -> Tokenizer:
    return load_tokenizer(TokenizerSource(str(chatml_dir)))


def dialogue(source: str, tokenizer: Tokenizer) -> TemplateDialogue:
    return TemplateDialogue(chat_template(source, where="here"), tokenizer)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("role", ["assistant", "user", "critic"])
def test_text_ends_after_the_last_message(role: str, content: str) -> None:
    messages = [ASK, {"role": role, "content": content}]
    template = chat_template(CHATML, where="here")
    text = render(template, messages, OPEN)
    assert text == f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>{role}\n{content}"
    closed = render(template, messages, Rendering(add_generation_prompt=False))
    assert closed == text + "<|im_end|>\n"
    assert messages[-1] == {"role": role, "content": content}, "the caller's messages are unchanged"


def test_template_that_writes_a_message_twice() -> None:
    template = chat_template("{{ messages[-1].content }}|{{ messages[-1].content }}.", where="here")
    assert render(template, [ASK], OPEN) == "hello|hello"


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        ("{{ messages[0].role }}", [ASK], "changes the last message's content"),
        (CHATML, [{"role": "assistant", "content": None, "tool_calls": [{}]}], "whose content is a text"),
        (CHATML, [], "messages must be a non-empty list"),
        (CHATML, [{"role": "assistant"}], r"messages\[0\].content must be a string"),
        ("{{ raise_exception('no') }}", [ASK], "refuses these messages: no"),
    ],
)
def test_continue_final_rejects_invalid_messages(source: str, messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        render(chat_template(source, where="here"), messages, OPEN)


def test_continue_final_excludes_generation_prompt(tokenizer: Tokenizer) -> None:
    both = Rendering(add_generation_prompt=True, continue_final=True)
    for one in (dialogue(CHATML, tokenizer), nanochat()):
        for ask in (one.encode, one.text):
            with pytest.raises(BadRequest, match="continue_final_message and add_generation_prompt exclude each other"):
                ask([ASK], both)


@pytest.mark.parametrize("content", CONTENTS)
def test_ids_equal_those_of_the_text(tokenizer: Tokenizer, content: str) -> None:
    """Also if the message contains the text of a special token, which is encoded as text."""
    one = dialogue(CHATML, tokenizer)
    messages = [ASK, {"role": "assistant", "content": content}]
    ids = one.encode(messages, OPEN)
    assert tokenizer.decode(ids, skip_special=False) == one.text(messages, OPEN)
    special = [token for token in ids if token in tokenizer.special_ids]
    assert [tokenizer.token_text(token) for token in special] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    closed = Rendering(add_generation_prompt=False)
    assert one.encode(messages, closed)[-2] in tokenizer.special_ids or content == ""
    assert ids == encode_chat(
        one.template, tokenizer, messages, Rendering(add_generation_prompt=False, continue_final=True)
    )


def test_options_of_a_rendering(tokenizer: Tokenizer) -> None:
    one = dialogue(CHATML + "{{ mood }}{{ tools | length if tools else '' }}", tokenizer)
    usual = "<|im_start|>user\nhello<|im_end|>\n"
    assert one.text([ASK]) == one.text([ASK], ANSWER) == usual + "<|im_start|>assistant\n"
    assert one.text([ASK], Rendering(add_generation_prompt=False)) == usual
    assert one.text([ASK], Rendering(add_generation_prompt=False, extra={"mood": "x"})) == usual + "x"
    assert one.text([ASK], Rendering(add_generation_prompt=False, tools=[{}, {}])) == usual + "2"
    assert one.knows("mood") and not one.knows("weather")
    tools = TemplateDialogue(chat_template(CHATML, where="here", tool_source="{{ weather }}"), tokenizer)
    assert tools.knows("weather")


# ---- nanochat


def nanochat() -> NanochatDialogue:
    tokenizer = nanochat_tokenizer()
    return NanochatDialogue(tokenizer, python_tool(tokenizer))


def test_nanochat_continues_an_answer() -> None:
    messages = [ASK, {"role": "assistant", "content": "So"}]
    one = nanochat()
    start = "<|bos|><|user_start|>hello<|user_end|><|assistant_start|>"
    assert one.text(messages[:1]) == start
    assert one.text(messages, OPEN) == start + "So"
    assert one.text(messages, Rendering(add_generation_prompt=False)) == start + "So<|assistant_end|>"
    assert one.encode(messages, OPEN) == one.encode(messages, Rendering(add_generation_prompt=False))[:-1]


def test_nanochat_continues_only_assistant_messages() -> None:
    with pytest.raises(BadRequest, match="requires a last message of the assistant"):
        nanochat().encode([ASK], OPEN)


def test_nanochat_rejects_variables_and_tools() -> None:
    for rendering in (Rendering(extra={"a": 1}), Rendering(tools=[{}])):
        with pytest.raises(BadRequest, match="no tools and no chat template variables"):
            nanochat().encode([ASK], rendering)
    assert not nanochat().knows("reasoning_effort")
