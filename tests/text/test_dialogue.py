"""Dialogues: selection, messages to ids and back, and the displayed text of an answer's tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nano_inference.nanochat.calculator import PythonTool, python_tool
from nano_inference.nanochat.dialogue import NanochatDialogue, render_for_completion
from nano_inference.text import stream
from nano_inference.text.chat import Message
from nano_inference.text.dialogue import TemplateDialogue, load_dialogue, require, shown, spelled
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import BadRequest
from tests.nanochat.samples import SPECIAL, encoding, tokenizer, write_pickle
from tests.text.tokenizer_samples import byte_level, save

TOKENIZER = tokenizer()
ID = {name.strip("<|>"): TOKENIZER.encode(name)[-1] for name in SPECIAL}
TOOL = python_tool(TOKENIZER)
assert TOOL is not None
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
QUESTION: Message = {"role": "user", "content": "What is 12+34?"}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special=False, parse_special=False)


def call(expression: str, result: str | None) -> list[int]:
    """Return the tokens of a call and of its forced result."""
    output = [] if result is None else [ID["output_start"], *ids(result), ID["output_end"]]
    return [ID["python_start"], *ids(expression), ID["python_end"], *output]


def text_of(tokens: list[int], tool: PythonTool | None = TOOL) -> str:
    return spelled(shown(TOKENIZER, tool, tokens).decode())


# ---- displayed text


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (ids("hello"), "hello"),
        (call("12+34", "46"), "[12+34 → 46] "),
        ([*ids("so "), *call("12+34", "46"), *ids("It is 46.")], "so [12+34 → 46] It is 46."),
        ([*call("1/0", None), *ids("none")], "[1/0 → no result] none"),
        (call("1/0", None), "[1/0 → no result] "),
        (call("1", "1") + call("2", None) + call("3", "3"), "[1 → 1] [2 → no result] [3 → 3] "),
        ([ID["bos"], ID["user_start"], *ids("a"), ID["assistant_end"], ID["user_end"], *ids("b")], "ab"),
        ([ID["assistant_start"], TOKENIZER.vocab_size, *ids("c"), TOKENIZER.vocab_size + 50], "c"),
        (call("'é'.count('é')", "日本"), "['é'.count('é') → 日本] "),
        ([], ""),
    ],
)
def test_displayed_text_of_tokens(tokens: list[int], text: str) -> None:
    assert text_of(tokens) == text


def test_tool_tokens_are_hidden_without_a_tool() -> None:
    assert text_of([*ids("a"), *call("1+1", "2"), *ids("b")], None) == "a1+12b"


def test_split_character_is_displayed_when_complete() -> None:
    tokens = [*ids("née 😀 "), *call("12+34", "46"), *ids("日本ж")]
    split = [token for token in tokens if token not in TOKENIZER.special_ids and TOKENIZER.token_bytes(token)[0] > 0x7F]
    assert len(split) > 5, "the emoji is four tokens"
    first = tokens.index(ID["python_end"])
    last = tokens.index(ID["output_end"])
    state, pieces, at = stream.start(), [], 0
    while at < len(tokens):  # one token at a time; a forced result is in one run with the end of the call
        end = last + 1 if at == first else at + 1
        state, piece = stream.push(state, shown(TOKENIZER, TOOL, tokens[at:end]))
        pieces.append(piece)
        at = end
    assert spelled("".join(pieces) + stream.finish(state)[1]) == "née 😀 [12+34 → 46] 日本ж"
    assert "\ufffd" not in "".join(pieces) and "😀" in pieces


# ---- messages to ids and back


@pytest.fixture
def dialogue() -> NanochatDialogue:
    return NanochatDialogue(TOKENIZER, TOOL)


def test_encode_equals_the_rendering_of_nanochat(dialogue: NanochatDialogue) -> None:
    parts = [{"type": "python", "text": "12+34"}, {"type": "python_output", "text": "46"}]
    said: Message = {"role": "assistant", "content": [*parts, {"type": "text", "text": "46."}]}
    system: Message = {"role": "system", "content": "Be brief."}
    for messages in ([QUESTION], [system, QUESTION], [QUESTION, said, QUESTION], [system, QUESTION, said, QUESTION]):
        conversation = {"messages": [*messages, {"role": "assistant", "content": "to be written"}]}
        assert dialogue.encode(messages) == render_for_completion(TOKENIZER, conversation)
    assert dialogue.encode([QUESTION]) == [
        *(ID["bos"], ID["user_start"], *ids("What is 12+34?"), ID["user_end"], ID["assistant_start"])
    ]


def test_answer_is_text_or_parts(dialogue: NanochatDialogue) -> None:
    end = ID["assistant_end"]
    assert dialogue.answer([*ids("hello"), end], "shown") == {"role": "assistant", "content": "hello"}
    called = dialogue.answer([*ids("so "), *call("12+34", "46"), *ids("46."), end], "shown")
    assert called["content"] == [
        {"type": "text", "text": "so "},
        {"type": "python", "text": "12+34"},
        {"type": "python_output", "text": "46"},
        {"type": "text", "text": "46."},
    ]
    cut = dialogue.answer(call("12+34", "46")[:-1], "shown")
    assert cut["content"] == [{"type": "python", "text": "12+34"}, {"type": "python_output", "text": "46"}]
    assert dialogue.answer([*call("1/0", None), end], "")["content"] == [{"type": "python", "text": "1/0"}]


def test_next_prompt_starts_with_the_tokens_of_the_last_turn(dialogue: NanochatDialogue) -> None:
    rng = random.Random(5)
    pieces = [ids("hello "), ids("é日本"), call("12+34", "46"), call("1/0", None), ids("<|bos|>"), call("", None)]
    messages: list[Message] = [QUESTION]
    for _ in range(40):
        prompt = dialogue.encode(messages)
        tokens = [token for piece in rng.choices(pieces, k=rng.randrange(1, 6)) for token in piece]
        tokens = ids(TOKENIZER.decode(tokens)) if rng.random() < 0.3 else tokens
        answer = dialogue.answer([*tokens, ID["assistant_end"]], "not this")
        again = dialogue.encode([*messages, answer, QUESTION])
        kept = TOKENIZER.decode([*prompt, *tokens, ID["assistant_end"]], skip_special=False)
        assert TOKENIZER.decode(again, skip_special=False).startswith(kept)
        called = [token for token in tokens if token in TOKENIZER.special_ids]
        length = len(prompt) - 1
        specials = [token for token in again[length:] if token in TOKENIZER.special_ids]
        assert specials[1 : 1 + len(called)] == called, "special tokens, not their text"
        messages = [QUESTION] if len(messages) > 6 else [*messages, answer, QUESTION]


# ---- selection


def test_nanochat_tokenizer_has_a_nanochat_dialogue(tmp_path: Path) -> None:
    write_pickle(tmp_path, encoding())
    source = TokenizerSource(str(tmp_path))
    found = load_dialogue(source, load_tokenizer(source))
    assert isinstance(found, NanochatDialogue) and found.tool is not None and require(found) is found
    assert found.tool.python_start == ID["python_start"]


def test_template_has_a_template_dialogue(tmp_path: Path) -> None:
    source = TokenizerSource(str(save(byte_level(), tmp_path, eos_token="<|im_end|>", chat_template=TEMPLATE)))
    loaded = load_tokenizer(source)
    found = load_dialogue(source, loaded)
    assert isinstance(found, TemplateDialogue) and found.tool is None
    text = loaded.decode(found.encode([{"role": "user", "content": "hi"}]), skip_special=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"
    assert found.answer([1, 2, 3], "as shown") == {"role": "assistant", "content": "as shown"}


def test_no_dialogue_without_template_and_special_tokens(tmp_path: Path) -> None:
    source = TokenizerSource(str(save(byte_level(), tmp_path, eos_token="<|im_end|>")))
    found = load_dialogue(source, load_tokenizer(source))
    assert found is None
    with pytest.raises(BadRequest, match="no chat template"):
        require(found)


def test_truncated_call_is_displayed_without_result() -> None:
    tokens = [ID["python_start"], *b"1+2", ID["python_end"]]
    assert spelled(shown(TOKENIZER, TOOL, tokens, is_cut=True).decode()) == "[1+2 …]"
    assert spelled(shown(TOKENIZER, TOOL, tokens).decode()) == "[1+2 → no result] "
