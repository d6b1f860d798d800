"""Rendering of nanochat conversations: layout, errors, the chat template, and round trips of answers."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.nanochat.dialogue import (
    CHAT_TEMPLATE,
    OutOfTurn,
    answer_message,
    render_conversation,
    render_for_completion,
)
from nano_inference.text.chat import ChatTemplate, chat_template, encode_chat
from nano_inference.text.fast import fast_tokenizer
from nano_inference.text.kinds import Rendering
from nano_inference.types import BadRequest
from tests.nanochat.samples import SPECIAL, tokenizer
from tests.text.tokenizer_samples import byte_level

ID = {text.strip("<|>"): tokenizer().encode(text, add_special=False)[0] for text in SPECIAL}


def plain(text: str) -> list[int]:
    return tokenizer().encode(text, add_special=False, parse_special=False)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def template() -> ChatTemplate:
    return chat_template(CHAT_TEMPLATE, where="nanochat", named=tokenizer().named)


PARTS = [
    {"type": "text", "text": "It is "},
    {"type": "python", "text": "6*7"},
    {"type": "python_output", "text": "42"},
    {"type": "text", "text": "."},
]


def test_layout_and_mask() -> None:
    ids, mask = render_conversation(tokenizer(), {"messages": [user("hello"), assistant(PARTS)]})
    pieces = [
        *[([ID["bos"]], 0), ([ID["user_start"]], 0), (plain("hello"), 0), ([ID["user_end"]], 0)],
        *[([ID["assistant_start"]], 0), (plain("It is "), 1)],
        *[([ID["python_start"]], 1), (plain("6*7"), 1), ([ID["python_end"]], 1)],
        *[([ID["output_start"]], 0), (plain("42"), 0), ([ID["output_end"]], 0)],
        *[(plain("."), 1), ([ID["assistant_end"]], 1)],
    ]
    assert ids == [token for tokens, _ in pieces for token in tokens]
    assert mask == [bit for tokens, bit in pieces for _ in tokens]


def test_system_message_is_merged_into_the_first_turn() -> None:
    conversation = {"messages": [system("be kind"), user("hello"), assistant(copy.deepcopy(PARTS))]}
    before = copy.deepcopy(conversation)
    merged = [user("be kind\n\nhello"), assistant(PARTS)]
    assert render_conversation(tokenizer(), conversation) == render_conversation(tokenizer(), merged)
    assert render_for_completion(tokenizer(), conversation) == render_for_completion(tokenizer(), merged)
    assert conversation == before


def test_renderings_are_truncated_to_max_tokens() -> None:
    turns = [user("hello " * 3000), assistant("x")]
    ids, mask = render_conversation(tokenizer(), turns)
    whole, _ = render_conversation(tokenizer(), turns, max_tokens=None)
    assert len(ids) == len(mask) == 2048 and ids == whole[:2048] and len(whole) > 3000
    assert render_conversation(tokenizer(), turns, 5) == (whole[:5], [0] * 5)
    assert render_for_completion(tokenizer(), turns) == [*whole[:2048], ID["assistant_start"]]
    assert len(render_for_completion(tokenizer(), turns, max_tokens=None)) == len(whole) - 2


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], r"messages\[0\] is missing"),
        ([system("x")], r"messages\[1\] is missing"),
        ([assistant("x")], r"messages\[0\].role must be user, got 'assistant'"),
        ([user("x"), user("y")], r"messages\[1\].role must be assistant"),
        ([system("s"), assistant("y")], r"messages\[1\].role must be user"),
        ([system("s"), user("x"), user("y")], r"messages\[2\].role must be assistant"),
        ([user("x"), system("y")], r"messages\[1\].role must be assistant"),
        (
            [user("x"), {"role": "tool", "content": "y"}],
            r"messages\[1\].role must be assistant, got 'tool'",
        ),
        ([user([{"type": "text", "text": "x"}])], r"messages\[0\].content must be a string, not list"),
        ([user(None)], r"messages\[0\].content must be a string, not NoneType"),
    ],
)
def test_messages_out_of_turn_are_refused(turns: list[Any], message: str) -> None:
    with pytest.raises(OutOfTurn, match=message):
        render_conversation(tokenizer(), turns)


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ("text", "a conversation must be a list"),
        ({"turns": []}, "a conversation must be a list .* not NoneType"),
        (["x"], r"messages\[0\] must be an object with a role"),
        ([user("x"), {"content": "y"}], r"messages\[1\] must be an object with a role"),
        ([system(None), user("x")], r"messages\[0\].content must be a string, not NoneType"),
        ([user("x"), assistant(5)], r"messages\[1\].content must be a string or a list of parts, not int"),
        ([user("x"), assistant(None)], r"messages\[1\].content must be a string or a list of parts, not NoneType"),
        ([user("x"), assistant(["y"])], r"messages\[1\].content\[0\] must be an object with a type and a text"),
        ([user("x"), assistant([{"type": "text"}])], r"messages\[1\].content\[0\] must be an object"),
        (
            [user("x"), assistant([{"type": "image", "text": ""}])],
            r"content\[0\].type must be text, python or .* 'image'",
        ),
        ([user("x\ud800")], "surrogate"),
    ],
)
def test_malformed_conversations_are_refused(turns: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as error:
        render_conversation(tokenizer(), turns)
    assert not isinstance(error.value, OutOfTurn)


@pytest.mark.parametrize("turns", [[], [user("x")], [user("x"), assistant("y"), user("z")]])
def test_completion_needs_a_last_assistant_message(turns: list[Any]) -> None:
    with pytest.raises(OutOfTurn, match=r"must be assistant: that message is replaced by the completion"):
        render_for_completion(tokenizer(), turns)


def test_missing_special_token_is_named() -> None:
    other = fast_tokenizer(byte_level(), where="x", spelling="byte_level", drops_space=False, named={}, eos_ids=())
    with pytest.raises(BadRequest, match=r"no special token <\|user_start\|>"):
        render_conversation(other, [user("x")])


TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, "<|", "|>", "<", "|", "user_end|>", "<|bos", " ", "\n", "hello", "{{ bos_token }}"]),
        st.text(max_size=6),
    ),
    max_size=5,
).map("".join)


def alternating(content: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Return a strategy for conversations that end with a user message, some with a system message."""
    turns = st.lists(st.tuples(TEXTS, content), max_size=3)
    return st.tuples(st.none() | TEXTS, turns, TEXTS).map(
        lambda drawn: [
            *([] if drawn[0] is None else [system(drawn[0])]),
            *(turn for asked, said in drawn[1] for turn in (user(asked), assistant(said))),
            user(drawn[2]),
        ]
    )


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(alternating(TEXTS))
def test_template_renders_the_same_tokens(turns: list[dict[str, Any]]) -> None:
    expected = render_for_completion(tokenizer(), [*turns, assistant("")], max_tokens=None)
    assert encode_chat(template(), tokenizer(), turns) == expected
    without, _ = render_conversation(tokenizer(), turns, max_tokens=None)
    assert encode_chat(template(), tokenizer(), turns, Rendering(add_generation_prompt=False)) == without


@settings(max_examples=70, deadline=None)
@given(alternating(TEXTS))
def test_text_cannot_forge_special_tokens(turns: list[dict[str, Any]]) -> None:
    ids = render_for_completion(tokenizer(), [*turns, assistant("")], max_tokens=None)
    number = len([turn for turn in turns if turn["role"] != "system"])
    assert [token for token in ids if token in tokenizer().special_ids] == [
        ID["bos"],
        *(ID[f"{('user', 'assistant')[at % 2]}_{end}"] for at in range(number) for end in ("start", "end")),
        ID["assistant_start"],
    ]


WORDS = st.text("abc 123+*'é日<|>\n", max_size=8)
ANSWERS = st.one_of(
    TEXTS,
    st.lists(
        st.one_of(
            WORDS.filter(bool).map(lambda text: [{"type": "text", "text": text}]),
            WORDS.map(lambda text: [{"type": "python", "text": text}]),
            st.tuples(WORDS, WORDS).map(
                lambda pair: [{"type": "python", "text": pair[0]}, {"type": "python_output", "text": pair[1]}]
            ),
        ),
        min_size=1,
        max_size=4,
    ).map(lambda groups: [part for group in groups for part in group]),
)


def is_canonical(parts: Any) -> bool:
    """Return True for a text, and for parts with a call and without adjacent texts (which a round trip joins)."""
    if isinstance(parts, str):
        return True
    kinds = [part["type"] for part in parts]
    return "python" in kinds and ("text", "text") not in pairwise(kinds)


@settings(max_examples=100, deadline=None)
@given(ANSWERS.filter(is_canonical))
def test_answer_round_trip(content: Any) -> None:
    ids, _ = render_conversation(tokenizer(), [user("x"), assistant(content)], max_tokens=None)
    tokens = ids[ids.index(ID["assistant_start"]) + 1 :]
    assert tokens[-1] == ID["assistant_end"]
    for written in (tokens, tokens[:-1], [*tokens[:-1], ID["bos"], 5], [*tokens, 5, 6]):
        message = answer_message(tokenizer(), written)
        assert message == assistant(content)
    assert render_conversation(tokenizer(), [user("x"), message], max_tokens=None)[0] == ids


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("", ""),
        ("hello", "hello"),
        ("cut <|python_start|>1+", [{"type": "text", "text": "cut "}, {"type": "python", "text": "1+"}]),
        ("<|python_start|><|python_end|>", [{"type": "python", "text": ""}]),
        ("stray<|python_end|> end<|output_end|>", "stray end"),
        ("a<|user_start|>b<|assistant_start|>", "ab"),
        ("a<|assistant_end|>b", "a"),
        ("a<|bos|>b", "a"),
        (
            "<|python_start|>1<|python_start|>2<|python_end|>",
            [{"type": "python", "text": "1"}, {"type": "python", "text": "2"}],
        ),
        ("<|output_start|>4<|python_end|>2", [{"type": "python_output", "text": "42"}]),
    ],
)
def test_messages_of_malformed_answers(text: str, content: Any) -> None:
    message = answer_message(tokenizer(), tokenizer().encode(text, add_special=False))
    assert message == assistant(content)
    render_conversation(tokenizer(), [user("x"), message])
