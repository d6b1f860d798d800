"""The slash commands, with a fake backend: output, state and errors."""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from nano_inference import BadRequest, SamplingParams
from nano_inference.cli.chat import loop
from nano_inference.cli.chat.conversation import Piece, Question, Reply, ServerError, ShownToken, Write
from nano_inference.cli.chat.editor import CommandCompleter, HistoryFile, Input, continuation, parse_input
from nano_inference.cli.options import ChatOptions, Common
from nano_inference.cli.sampling import AnswerStats, Sampling, sampling_fields
from nano_inference.cli.terminal import Interrupts
from nano_inference.text.chat import Message

TOKENS = (
    ShownToken("Hi", -0.1, top=(("Hi", -0.1), ("Yo\x1b", -2.5))),
    ShownToken("4", 0.0, is_forced=True),
    ShownToken("", -1.2),
    ShownToken("\n", None),
)


@dataclass
class Parrot:
    """Answers with the question and the number of answers so far."""

    questions: list[Question] = field(default_factory=list)
    facts: Mapping[str, str] = field(default_factory=lambda: {"model": "parrot", "context": "9 tokens", "backend": "b"})

    def count(self, turns: tuple[Message, ...], system: str | None) -> int | None:
        return 5 * len(turns)

    def answer(self, question: Question, interrupts: Interrupts, write: Write) -> Reply:
        self.questions.append(question)
        if question.turns[-1]["content"] == "refuse":
            raise BadRequest("", "refused")
        if question.turns[-1]["content"] == "fail":
            raise ServerError("failed")
        text = f"{question.turns[-1]['content']} {len(self.questions)}"
        write([Piece(text)])
        return Reply(
            message={"role": "assistant", "content": text},
            kept=question.turns,
            finish_reason="stop",
            stats=AnswerStats(1, 0, 2, 0.5, 1.0, question.sampling.params.seed, "step-7"),
            tokens=TOKENS if question.has_tokens else (),
        )


Result = tuple[str, str, Parrot]
Say = Callable[..., Result]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Return a function that sends lines through a pipe and returns stdout, stderr and the backend."""

    def send(*lines: str, params: SamplingParams | None = None, code: int = 0) -> Result:
        parrot = Parrot()
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        sampling = Sampling(params or SamplingParams(top_k=7, seed=3), frozenset({"top_k", "seed"}))
        assert loop.run(ChatOptions(), parrot, sampling, Common()) == code
        return *capsys.readouterr(), parrot

    return send


def test_stdout_has_answers_only(say: Say) -> None:
    out, err, _ = say("hello", "", "/show", "/help", "/set", "/tokens on", "again", "/tokens 1")
    assert out == "hello 1\nagain 2\n"
    assert (
        "[1 prompt tokens (0 cached), 2 generated, first token after 0.50 s, 2.0 tokens/s, seed 3, weights step-7]"
        in err
    )


def test_help_names_every_command(say: Say) -> None:
    _, err, _ = say("/help")
    for name in ("help", "system", "set", "show", "save", "load", "clear", "tokens", "seed", "regen", "exit", "bye"):
        assert f"/{name}" in err
    assert '"""' in err and max(map(len, err.splitlines())) <= 80 and say("/?")[1] == err


@pytest.mark.parametrize("word", ["/exit", "/bye", "/quit"])
def test_exit_words_end_the_chat(say: Say, word: str) -> None:
    assert say("a", word, "never")[0] == "a 1\n"


def test_set_changes_next_answer_and_default_restores(say: Say) -> None:
    lines = (
        "/set temperature 0.25",
        "/set stop END",
        "/set stop-token-ids 4, 5",
        "/set max_tokens none",
        "/set top_k 9",
    )
    _, err, parrot = say(*lines, "a", "/set top_k default", "/set temperature default", "b", "/set min_p")
    first, second = (one.sampling for one in parrot.questions)
    assert (first.params.temperature, first.params.stop, first.params.top_k) == (0.25, ("END",), 9)
    assert first.params.stop_token_ids == frozenset({4, 5}) and first.params.max_tokens is None
    assert first.named == {"temperature", "stop", "stop_token_ids", "max_tokens", "top_k", "seed"}
    assert (second.params.temperature, second.params.top_k, "temperature" in second.named) == (1.0, 7, False)
    assert "top_k = 7\n" in err and "temperature = 1.0 (default)\n" in err and "min_p = 0.0 (default)\n" in err


def test_set_lists_every_field_and_accepts_its_value(say: Say) -> None:
    _, err, _ = say("/set")
    rows = dict(line.removesuffix(" (default)").split(" = ") for line in err.splitlines())
    assert list(rows) == list(sampling_fields()) and len(rows) >= 19
    _, err, _ = say(*(f"/set {name} {value}" for name, value in rows.items()))
    assert "nano-inference:" not in err and len(err.splitlines()) == len(rows)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temperature -1", "temperature must be in [0, 100], got -1"),
        ("/set temperature hot", "temperature must be a number, got 'hot'"),
        ("/set temperature " + "9" * 5000, "temperature must be a number, got '999"),
        ("/set temperature " + "[" * 100_000, "temperature must be a number, got '[[["),
        ("/set top_k 1.5", "top_k must be an integer, got 1.5"),
        ("/set ignore_eos 1", "ignore_eos must be true or false, got 1"),
        ("/set stop_token_ids x", "stop_token_ids must be a collection of token ids, got str"),
        ("/set nothing 1", "/set: no field 'nothing'; known: temperature, "),
        ("/seed x", "/seed must be followed by a whole number, got 'x'"),
        ("/regen", "/regen: there is no answer yet"),
        ("/tokens last", "the last answer has no probabilities; type /tokens on, then /regen"),
        ("/save", "/save needs a file name"),
        ("/save /no/such/place", "/no/such/place: No such file or directory"),
        ("/load /no/such/file", "/no/such/file: cannot be read: No such file or directory"),
        ("/load ~no-such-user/x", "/load: ~no-such-user/x: Could not determine home directory"),
        ("/load a\0b", "/load: a path cannot contain a zero byte"),
        ("/wh\x1bat", "/wh␛at: no such command; /help lists them"),
        ("/modle", "/modle: no such command; did you mean /model?"),
        ("/set temprature 1", "/set: no field 'temprature'; did you mean temperature?; known: temperature, "),
    ],
)
def test_invalid_commands_are_one_line_without_effect(say: Say, line: str, said: str) -> None:
    out, err, parrot = say(line, "a")
    first = err.splitlines()[0]
    assert out == "a 1\n" and first.startswith("nano-inference: ") and said in first and len(err.splitlines()) == 2
    assert len(first) < 700 and parrot.questions[0].sampling.params == SamplingParams(top_k=7, seed=3)


def test_show_lists_facts(say: Say) -> None:
    _, err, _ = say("/system be\x1b brief", "a", "/show")
    assert err.splitlines()[1:] == [
        *("model: parrot", "context: 9 tokens", "backend: b", "conversation: 2 messages, 10 tokens"),
        "system: be␛ brief",
        "sampling: temperature = 1.0 (default), max_tokens = 256 (default), top_k = 7, top_p = 1.0 (default), "
        "min_p = 0.0 (default), repetition_penalty = 1.0 (default), seed = 3 (/set lists all)",
    ]  # fmt: skip


def test_system_and_clear_start_new_conversation(say: Say) -> None:
    _, _, parrot = say("a", "/system s", "b", "c", "/clear", "d", "/system", "e")
    assert [(one.system, len(one.turns)) for one in parrot.questions] == [
        (None, 1),
        ("s", 1),
        ("s", 3),
        ("s", 1),
        (None, 1),
    ]


def test_regen_repeats_last_question(say: Say) -> None:
    out, err, parrot = say("a", "b", "/regen", "/seed 11", "/regen", "/regen 12", "c", "/seed off", "/regen")
    turns = [[message["content"] for message in one.turns] for one in parrot.questions]
    assert turns[1] == turns[2] == turns[3] == turns[4] == ["a", "a 1", "b"]
    assert turns[5] == turns[6] == ["a", "a 1", "b", "b 5", "c"]
    seeds = [one.sampling.params.seed for one in parrot.questions]
    assert seeds == [3, 3, 3, 11, 12, 11, None] and "seed = none (default)" in err
    assert out.splitlines() == ["a 1", "b 2", "b 3", "b 4", "b 5", "c 6", "c 7"]


def test_tokens_without_colour_are_numbers(say: Say) -> None:
    _, err, parrot = say("/tokens", "a", "/tokens last", "/tokens 1", "/tokens 2", "/tokens 9", "/tokens off", "b")
    assert [one.has_tokens for one in parrot.questions] == [True, False]
    line = "tokens: 'Hi' 90% '4' forced '' 30% '⏎' ?"
    assert err.count(line) == 2 and "token 2 of 4: '4' forced" in err
    assert "token 1 of 4: 'Hi' 90%, logprob -0.1000\n  1.   -0.1000  90.48%  'Hi' <- drawn\n" in err
    assert "\n  2.   -2.5000   8.21%  'Yo␛'\n" in err
    assert "/tokens must be on, off, last or a number in [1, 4], got 9" in err


def test_rejected_message_is_not_added(say: Say) -> None:
    out, err, parrot = say("a", "refuse", "b")
    assert out == "a 1\nb 3\n" and "nano-inference: refused" in err and len(parrot.questions[2].turns) == 3
    say("a", "fail", "b")
    assert "nano-inference: failed" in say("a", "fail", code=1)[1]


# ---- files


def test_save_and_load(say: Say, tmp_path: Path) -> None:
    file = tmp_path / "talk é.json"
    _, err, _ = say("/system s", "a", "/set temperature 0.5", f"/save {file}", "b", f"/save {file}", f"/save! {file}")
    assert f"{file}: 2 messages saved" in err and f"{file}: already exists; /save! overwrites it" in err
    assert f"{file}: 4 messages saved" in err and stat.S_IMODE(file.stat().st_mode) == 0o600
    data = json.loads(file.read_text())
    assert data["model"] == "parrot" and data["sampling"] == {"seed": 3, "temperature": 0.5, "top_k": 7}
    _, err, parrot = say("x", f"/load {file}", "c", "/regen")
    assert f"{file}: 4 messages loaded" in err and parrot.questions[1].system == "s"
    assert [message["content"] for message in parrot.questions[1].turns] == ["a", "a 1", "b", "b 2", "c"]
    assert parrot.questions[1].sampling.params == SamplingParams(top_k=7, seed=3, temperature=0.5)
    assert parrot.questions[1].sampling.named == {"seed", "temperature", "top_k"}


TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "python", "text": "1"}]}]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "must hold a JSON object, got list"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role must be 'user'"),
        ({"messages": TURN[:1]}, "messages must end with an answer, got 1"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content must be a string"),
        ({"messages": TURN, "system": 3}, "system must be a string, got 3"),
        ({"messages": TURN, "format": "other"}, "format must be 'nano-inference chat 1', got 'other'"),
        ({"messages": TURN, "extra": 1}, "has no field 'extra'"),
        ({"messages": TURN, "sampling": {"heat": 1}}, "sampling has no field 'heat'"),
        ({"messages": TURN, "sampling": {"temperature": -1}}, "temperature must be in [0, 100], got -1"),
        (b"\xff{", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_invalid_files_are_one_line(say: Say, tmp_path: Path, data: object, said: str) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    out, err, _ = say("a", f"/load {file}", "b")
    line = next(line for line in err.splitlines() if line.startswith("nano-inference: "))
    assert f"{file}: " in line and said in line and out == "a 1\nb 2\n"


# ---- history and completion


def test_history_is_bounded_private_and_ignores_errors(tmp_path: Path) -> None:
    file = tmp_path / "a" / "history"
    history = HistoryFile(file)
    assert list(history.load_history_strings()) == []
    for i in range(1010):
        history.store_string(f"line {i}\nmore é\ud800")
    history.store_string("x" * 100_001)
    entries = list(HistoryFile(file).load_history_strings())
    assert entries[0] == "line 1009\nmore é?" and len(entries) == 1000
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_bytes(b"bad\n\n+good\xff\n")
    assert list(history.load_history_strings()) == ["good\ufffd"]
    HistoryFile(file / "below" / "a file").store_string("x")
    HistoryFile(os.devnull).store_string("x")
    assert list(HistoryFile(tmp_path).load_history_strings()) == []


def test_parse_input() -> None:
    """Quotes make a text that begins with a slash a message; the history stores it with its quotes."""
    assert parse_input("/set") == Input("/set") and parse_input(' """/set\n""" more') == Input("/set", is_message=True)
    assert parse_input("/a\nb").is_message and not parse_input("/a\n").is_message
    assert parse_input("caf\udce9") == Input("caf\ufffd")
    assert (continuation("a"), continuation("a\\"), continuation('"""a'), continuation('"""a"""')) == (
        None,
        "a\n",
        '"""a\n',
        None,
    )


def candidates(text: str) -> list[str]:
    """Return the completions of a line's last word."""
    completer = CommandCompleter(loop.COMMANDS)
    return [one.text for one in completer.get_completions(Document(text), CompleteEvent())]


def test_completion_candidates(tmp_path: Path) -> None:
    (tmp_path / "one.json").touch()
    (tmp_path / "onedir").mkdir()
    assert candidates("/s") == ["/system ", "/set ", "/show ", "/save ", "/save! ", "/seed "]
    assert candidates("s") == candidates("hello /s") == candidates("/set top_k t") == []
    assert candidates("/set top") == ["top_k ", "top_p "]
    assert candidates(f"/load {tmp_path}/one") == [f"{tmp_path}/one.json", f"{tmp_path}/onedir/"]
    assert candidates("/save /no/such/place/") == []
