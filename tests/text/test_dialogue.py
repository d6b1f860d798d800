"""Dialogues: which kind a model has, messages to ids and back, and what a reader sees of an answer's tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from nanochat_samples import SPECIAL, encoding, tokenizer, write_pickle
from tokenizer_samples import byte_level, save

from nano_inference.loader.checkpoint import open_checkpoint
from nano_inference.nanochat.dialogue import NanochatDialogue
from nano_inference.nanochat.export import export_hf
from nano_inference.nanochat.rendering import render_for_completion
from nano_inference.nanochat.tool import PythonTool, python_tool
from nano_inference.text import stream
from nano_inference.text.chat import Message
from nano_inference.text.dialogue import TemplateDialogue, load_dialogue, require, shown, spelled
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import BadRequest
from tests.nanochat.tiny import write_checkpoint, write_tokenizer

TOKENIZER = tokenizer()
ID = {name.strip("<|>"): TOKENIZER.encode(name)[-1] for name in SPECIAL}
TOOL = python_tool(TOKENIZER)
assert TOOL is not None
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
QUESTION: Message = {"role": "user", "content": "What is 12+34?"}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special=False, parse_special=False)


def call(expression: str, result: str | None) -> list[int]:
    """The tokens of a call, with what is forced after it."""
    output = [] if result is None else [ID["output_start"], *ids(result), ID["output_end"]]
    return [ID["python_start"], *ids(expression), ID["python_end"], *output]


def text_of(tokens: list[int], tool: PythonTool | None = TOOL) -> str:
    return spelled(shown(TOKENIZER, tool, tokens).decode())


# ---- what a reader sees


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
def test_what_is_shown(tokens: list[int], text: str) -> None:
    assert text_of(tokens) == text


def test_without_a_tool_its_tokens_are_hidden_like_any_special_one() -> None:
    assert text_of([*ids("a"), *call("1+1", "2"), *ids("b")], None) == "a1+12b"


def test_spelled_special_tokens_are_text() -> None:
    assert text_of(ids("<|python_start|>1<|bos|>")) == "<|python_start|>1<|bos|>"


def test_a_character_split_over_tokens_is_shown_when_it_is_whole() -> None:
    tokens = [*ids("née 😀 "), *call("12+34", "46"), *ids("日本ж")]
    split = [token for token in tokens if token not in TOKENIZER.special_ids and TOKENIZER.token_bytes(token)[0] > 0x7F]
    assert len(split) > 5, "the emoji is four tokens"
    first = tokens.index(ID["python_end"])
    last = tokens.index(ID["output_end"])
    state, pieces, at = stream.start(), [], 0
    while at < len(tokens):  # one token at a time; what is forced comes together with the end of the call
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


def test_encode_is_nanochats_rendering(dialogue: NanochatDialogue) -> None:
    parts = [{"type": "python", "text": "12+34"}, {"type": "python_output", "text": "46"}]
    said: Message = {"role": "assistant", "content": [*parts, {"type": "text", "text": "46."}]}
    system: Message = {"role": "system", "content": "Be brief."}
    for messages in ([QUESTION], [system, QUESTION], [QUESTION, said, QUESTION], [system, QUESTION, said, QUESTION]):
        conversation = {"messages": [*messages, {"role": "assistant", "content": "to be written"}]}
        assert dialogue.encode(messages) == render_for_completion(TOKENIZER, conversation)
    assert dialogue.encode([QUESTION]) == [
        *(ID["bos"], ID["user_start"], *ids("What is 12+34?"), ID["user_end"], ID["assistant_start"])
    ]


def test_encode_cuts_nothing_and_changes_nothing(dialogue: NanochatDialogue) -> None:
    messages: list[Message] = [{"role": "user", "content": "x " * 3000}]
    encoded = dialogue.encode(messages)
    assert len(encoded) > 3000 and encoded[-2:] == [ID["user_end"], ID["assistant_start"]]
    assert len(messages) == 1


def test_special_tokens_in_a_message_stay_text(dialogue: NanochatDialogue) -> None:
    spelled = "".join(SPECIAL)
    encoded = dialogue.encode([{"role": "user", "content": spelled}])
    assert [token for token in encoded if token in TOKENIZER.special_ids] == [
        *(ID["bos"], ID["user_start"], ID["user_end"], ID["assistant_start"])
    ]
    assert TOKENIZER.decode(encoded) == spelled


def test_messages_out_of_turn_are_named(dialogue: NanochatDialogue) -> None:
    with pytest.raises(BadRequest, match=r"messages\[1\]\.role must be assistant"):
        dialogue.encode([QUESTION, QUESTION])
    with pytest.raises(BadRequest, match=r"messages\[0\]"):
        dialogue.encode([])


def test_an_answer_is_text_or_parts(dialogue: NanochatDialogue) -> None:
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


def test_the_next_turn_begins_with_the_very_tokens_of_the_last(dialogue: NanochatDialogue) -> None:
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
        assert specials[1 : 1 + len(called)] == called, "real special tokens, not their text"
        messages = [QUESTION] if len(messages) > 6 else [*messages, answer, QUESTION]


# ---- which kind


def test_a_nanochat_tokenizer_makes_a_nanochat_dialogue(tmp_path: Path) -> None:
    write_pickle(tmp_path, encoding())
    source = TokenizerSource(str(tmp_path))
    found = load_dialogue(source, load_tokenizer(source))
    assert isinstance(found, NanochatDialogue) and found.tool is not None and require(found) is found
    assert found.tool.python_start == ID["python_start"]


def test_an_exported_directory_is_talked_with_as_before(tmp_path: Path) -> None:
    original = TokenizerSource(str(write_tokenizer(tmp_path / "own")))
    weights = write_checkpoint(tmp_path / "own", "G0")
    exported = export_hf(open_checkpoint(weights), tmp_path / "own", tmp_path / "hf")
    assert (exported / "tokenizer.json").is_file() and not (exported / "tokenizer.pkl").exists()
    source = TokenizerSource(str(exported))
    before, after = (load_dialogue(one, load_tokenizer(one)) for one in (original, source))
    assert isinstance(before, NanochatDialogue) and isinstance(after, NanochatDialogue)
    assert before.tool is not None and after.tool is not None
    parts = [{"type": "text", "text": "né "}, {"type": "python", "text": "1+1"}, {"type": "python_output", "text": "2"}]
    messages: list[Message] = [
        QUESTION,
        {"role": "assistant", "content": parts},
        {"role": "user", "content": "<|bos|>"},
    ]
    encoded = before.encode(messages)
    assert encoded == after.encode(messages)
    answer = [261, *b"1+1", 262, 263, *b"2", 264, *"né".encode(), 260]
    assert before.answer(answer, "") == after.answer(answer, "")
    sights = [spelled(shown(one.tokenizer, one.tool, answer).decode()) for one in (before, after)]
    assert sights == ["[1+1 → 2] né"] * 2


def test_a_template_makes_a_template_dialogue(tmp_path: Path) -> None:
    source = TokenizerSource(str(save(byte_level(), tmp_path, eos_token="<|im_end|>", chat_template=TEMPLATE)))
    loaded = load_tokenizer(source)
    found = load_dialogue(source, loaded)
    assert isinstance(found, TemplateDialogue) and found.tool is None
    text = loaded.decode(found.encode([{"role": "user", "content": "hi"}]), skip_special=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"
    assert found.answer([1, 2, 3], "as shown") == {"role": "assistant", "content": "as shown"}


def test_neither_makes_none(tmp_path: Path) -> None:
    source = TokenizerSource(str(save(byte_level(), tmp_path, eos_token="<|im_end|>")))
    found = load_dialogue(source, load_tokenizer(source))
    assert found is None
    with pytest.raises(BadRequest, match="no chat template"):
        require(found)


def test_a_call_that_was_cut_off_has_no_result_yet() -> None:
    tokens = [ID["python_start"], *b"1+2", ID["python_end"]]
    assert spelled(shown(TOKENIZER, TOOL, tokens, is_cut=True).decode()) == "[1+2 …]"
    assert spelled(shown(TOKENIZER, TOOL, tokens).decode()) == "[1+2 → no result] "
