"""Chats with an engine in the same process: in a terminal and through pipes."""

from __future__ import annotations

import io
import json
import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("pty", reason="needs a Unix terminal")

from nano_inference.cli import main
from nano_inference.cli.chat.local import shown_tokens, with_alternatives
from nano_inference.cli.local import encode, open_session
from nano_inference.cli.options import COMMON
from nano_inference.config import EngineConfig
from nano_inference.types import SamplingParams

pytestmark = pytest.mark.slow

VARIED = ("-t", "2", "--top-p", "1", "--min-p", "0")  # an answer that repeats itself would end
ENDLESS = ("--max-model-len", "32768", "--max-tokens", "30000", "--ignore-eos", *VARIED)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Pressing(io.StringIO):
    """An output whose first text comes with Ctrl-C, pressed some times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def write(self, text: str) -> int:
        while self.times:
            self.times -= 1
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_second_ctrl_c_in_an_answer_quits(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("sys.stdout", Pressing(times=1))
    assert main(["chat", "-m", str(tiny), "-p", "hello", *ENDLESS]) == 0
    assert "[stopped]" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdout", Pressing(times=2))
    assert main(["chat", "-m", str(tiny), "-p", "hello", *ENDLESS]) == 130
    assert signal.getsignal(signal.SIGINT) is before


def test_seed_repeats_answer_and_regen_changes_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The seed printed with an answer repeats that answer."""

    def run_chat(*lines: str) -> tuple[list[str], list[str]]:
        """Return the last answer after each line, and the printed seeds."""
        files = [tmp_path / f"{i}.json" for i in range(len(lines))]
        commands = [f"{line}\n/save! {file}\n" for line, file in zip(lines, files, strict=True)]
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(commands)))
        # Hot and long: answers of two random seeds are never equal.
        assert main(["chat", "-m", str(tiny), "-t", "1.5", "--max-tokens", "40", "--ignore-eos"]) == 0
        answers = [json.loads(file.read_text())["messages"][-1]["content"] for file in files]
        return answers, re.findall(r"seed (\d+)\]", capsys.readouterr().err)

    answers, seeds = run_chat("hello", "/regen")
    assert answers[0] != answers[1] and seeds[0] != seeds[1] and all(len(seed) <= 6 for seed in seeds)
    again, same = run_chat("hello", f"/regen {seeds[0]}", f"/seed {seeds[1]}", "/regen", "/regen")
    assert again[1:] == [answers[0], answers[0], answers[1], answers[1]]
    assert same[1:] == [seeds[0], seeds[1], seeds[1]]


def test_shown_tokens_have_raw_logprobs(tiny: Path) -> None:
    """Probabilities do not depend on the temperature, and requesting them changes no token."""
    with open_session(EngineConfig(model_path=str(tiny), num_threads=1), COMMON) as session:
        prompt = encode(session, "hello")
        params = SamplingParams(temperature=3.0, max_tokens=20, ignore_eos=True, seed=1, raw_logprobs=True)
        (plain,) = session.engine.generate([prompt], params)
        (sample,) = session.engine.generate([prompt], with_alternatives(params))
        tokens = shown_tokens(session, sample)
        assert sample.completion_tokens == plain.completion_tokens and len(tokens) == 20
        assert [token.logprob for token in tokens] == list(plain.raw_logprobs or ()) != list(plain.logprobs)
        for token in tokens:
            assert len(token.top) == 5 and token.logprob is not None and token.logprob <= token.top[0][1] < 0
        special = session.tokenizer.special_ids
        named = [token.text for token, i in zip(tokens, sample.completion_tokens, strict=True) if i in special]
        assert all(re.fullmatch(r"<\|.*\|>", name) for name in named)
        text = "".join(token.text for token in tokens if token.text not in named)
        whole = session.tokenizer.decode([i for i in sample.completion_tokens if i not in special])
        assert whole.startswith(text)


# ---- pipes


def test_piped_questions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 12+34?\n\n/seed 3\nplus 5\n"))
    assert main(["chat", "--model", "calculator"]) == 0
    out, err = capsys.readouterr()
    assert out == "[12+34 → 46] The answer is 46.\n[46+5 → 51] The answer is 51.\n"
    assert "seed = 3" in err and "tokens/s" in err and "\x1b" not in out + err
    assert "> " not in err, "a prompt in a pipe"


def test_answer_that_repeats_itself_ends_by_name(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only in chats: `generate` and the engine run to the limit that was asked for."""
    loop = ("-m", str(tiny), "-t", "0", "--frequency-penalty=-2", "--ignore-eos", "--max-tokens", "300")
    assert main(["chat", *loop, "-p", "hello"]) == 0
    err = capsys.readouterr().err
    assert "[stopped: the answer repeats itself]" in err and "300 generated" not in err
    assert main(["generate", *loop, "hello"]) == 0
    assert "300 generated" in capsys.readouterr().err
