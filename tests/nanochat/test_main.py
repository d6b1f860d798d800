"""`python -m nano_inference.nanochat`: comparison, output and errors."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from nano_inference.loading.catalog import find_builtin
from nano_inference.nanochat.__main__ import Answer, main, report
from nano_inference.nanochat.builtin import CALCULATOR
from nano_inference.nanochat.tokenizer import get_tokenizer
from tests.nanochat.tiny import (
    GENERATIONS,
    SPECIAL_IDS,
    base_meta,
    model_config,
    state_dict,
    write_checkpoint,
    write_tokenizer,
)

Capture = pytest.CaptureFixture[str]
SHORT = ["--max-tokens", "24", "--device", "cpu"]


def run(capsys: Capture, *argv: str, code: int = 0) -> tuple[str, str]:
    found = main(argv)
    out, err = capsys.readouterr()
    assert found == code, out + err
    return out, err


def check_page(out: str, generation: str, num_tokens: int) -> None:
    assert re.search(rf"^nanochat {generation} \(.+\): .+model_\d+\.pt$", out, re.M), out
    texts = [re.search(rf"^{name} +\d+\.\d{{3}} s   (.+)$", out, re.M) for name in ("naive", "cached")]
    assert texts[0] is not None and texts[1] is not None and texts[0][1] == texts[1][1]
    assert re.search(rf"^Match: True, \d+\.\dx as fast, {num_tokens} tokens$", out, re.M), out


def test_packaged_model_is_default(capsys: Capture) -> None:
    out, err = run(capsys, *SHORT)
    check_page(out, "G4", 24)
    assert "nanochat/data/calculator/model_" in out and err == ""


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_matches(generation: str, tmp_path: Path, capsys: Capture) -> None:
    weights = write_checkpoint(tmp_path, generation, meta=base_meta(generation))
    write_tokenizer(tmp_path)
    out, _ = run(capsys, str(tmp_path), *SHORT)
    check_page(out, generation, 24)
    # Windows of 129 matter from there on; the file itself is named this time.
    out, _ = run(capsys, str(weights), "--max-tokens", "40", "--device", "cpu", "--prompt", "water " * 20)
    check_page(out, generation, 40)
    assert ("warning: soft cap 15 is assumed" in out) == (generation == "G2")


def test_mismatch_is_printed_and_returns_1(capsys: Capture) -> None:
    tokenizer = get_tokenizer(CALCULATOR.directory)
    ids = tokenizer.encode("abcdef")
    other = [*ids[:3], ids[3] + 1, *ids[4:]]
    assert report(Answer(ids, 3.0), Answer(other, 1.5), tokenizer) == 1
    assert capsys.readouterr().out.splitlines() == [
        "naive      3.000 s   'abcdef'",
        "cached     1.500 s   'abceef'",
        f"Mismatch at token 3: {ids[3]} != {ids[3] + 1}",
        "Match: False, 2.0x as fast, 6 tokens",
    ]


def test_base_directory_source_tag_and_step(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    write_tokenizer(tmp_path / "tokenizer")
    for step in (3, 5):
        write_checkpoint(tmp_path / "chatsft_checkpoints" / "d4", "G4", step=step)
    write_checkpoint(tmp_path / "base_checkpoints" / "d2", "G0", step=9)
    assert "model_000005.pt" in run(capsys, "-i", "sft", *SHORT)[0]
    assert "model_000003.pt" in run(capsys, "-i", "sft", "-g", "d4", "-s", "3", *SHORT)[0]
    assert "nanochat G0 (" in run(capsys, "--source", "base", *SHORT)[0]
    assert "has no model tag 'd9'; there is d4" in run(capsys, "-i", "sft", "-g", "d9", code=2)[1]
    with pytest.raises(SystemExit):
        main(["-i", "pretrained"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/no/such/place"], "/no/such/place: contains no nanochat checkpoint"),
        (["--max-tokens", "0"], "--max-tokens must be in [1, "),
        (["--max-tokens", "100000"], "--max-tokens must be in [1, "),
        (["--device", "tpu"], "device must be auto, cpu, cuda, cuda:N or mps"),
        ([str(find_builtin("calculator").directory), "--step", "999999999"], "has no step 999999999"),
    ],
)
def test_errors_are_one_line_and_code_2(capsys: Capture, argv: list[str], said: str) -> None:
    _, err = run(capsys, *argv, code=2)
    assert err.startswith("nano_inference.nanochat: ") and err.count("\n") == 1 and said in err


def test_the_longest_answer_that_fits(tmp_path: Path, capsys: Capture) -> None:
    write_checkpoint(tmp_path, "G4")
    write_tokenizer(tmp_path)
    room = 256 - len("<" + "hi")
    assert f"[1, {room}]" in run(capsys, str(tmp_path), "--prompt", "hi", "--max-tokens", str(room + 1), code=2)[1]
    out, _ = run(capsys, str(tmp_path), "--prompt", "hi", "--max-tokens", str(room), "--device", "cpu")
    check_page(out, "G4", room)


def test_end_tokens_do_not_end_answers(tmp_path: Path, capsys: Capture) -> None:
    state = state_dict("G4", model_config("G4"))
    state["transformer.wte.weight"][:, 0] += 12.0  # a direction that every token has, through which the head finds it
    state["lm_head.weight"][:, 0] = 0.0
    state["lm_head.weight"][SPECIAL_IDS["assistant_end"], 0] = 3.0
    write_checkpoint(tmp_path, "G4", state=state)
    write_tokenizer(tmp_path)
    out, _ = run(capsys, str(tmp_path), *SHORT)
    check_page(out, "G4", 24)
    assert "<|assistant_end|><|assistant_end|>" in out


def test_a_checkpoint_without_its_tokenizer_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    write_checkpoint(tmp_path, "G4")
    _, err = run(capsys, str(tmp_path), code=2)
    assert err.count("\n") == 1 and "tokenizer" in err


def test_runs_as_module(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "argv", ["nanochat", "/no/such/place"])
    monkeypatch.delitem(sys.modules, "nano_inference.nanochat.__main__")
    with pytest.raises(SystemExit) as end:
        runpy.run_module("nano_inference.nanochat", run_name="__main__")
    assert end.value.code == 2 and "/no/such/place" in capsys.readouterr().err


def test_error_names_prompt_that_is_too_long(tmp_path: Path, capsys: Capture) -> None:
    write_checkpoint(tmp_path, "G4")
    write_tokenizer(tmp_path)
    for size in (300, 255):
        _, err = run(capsys, str(tmp_path), "--prompt", "x" * size, code=2)
        wanted = f"--prompt has {size + 1} tokens; it must be shorter than the model's length of 256"
        assert err == f"nano_inference.nanochat: {wanted}\n"


def test_chat_renders_the_prompt_as_a_question(capsys: Capture) -> None:
    out, _ = run(capsys, "--chat", "--prompt", "What is 12+34?", *SHORT)
    check_page(out, "G4", 24)
    assert "'<|python_start|>12+34<|python_end|>" in out, "no tool runs here"
