"""`python -m nano_inference.nanochat`: comparison, output and errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nano_inference.loading.catalog import find_builtin
from nano_inference.nanochat import GPT
from nano_inference.nanochat.__main__ import main
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


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_matches(generation: str, tmp_path: Path, capsys: Capture) -> None:
    weights = write_checkpoint(tmp_path, generation, meta=base_meta(generation))
    write_tokenizer(tmp_path)
    # Windows of 129 matter from there on.
    out, _ = run(capsys, str(weights), "--max-tokens", "40", "--device", "cpu", "--prompt", "water " * 20)
    check_page(out, generation, 40)
    assert ("warning: soft cap 15 is assumed" in out) == (generation == "G2")


def test_mismatch_is_printed_and_returns_1(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT, "generate", lambda *_, **__: [264, *[0] * 23])
    out, _ = run(capsys, *SHORT, code=1)
    assert re.search(r"^Mismatch at token 0: 264 != \d+\nMatch: False, ", out, re.M)


@pytest.mark.slow
def test_base_directory_source_tag_and_step(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    write_tokenizer(tmp_path / "tokenizer")
    for step in (3, 5):
        write_checkpoint(tmp_path / "chatsft_checkpoints" / "d4", "G4", step=step)
    assert "model_000005.pt" in run(capsys, "-i", "sft", *SHORT)[0]
    assert "model_000003.pt" in run(capsys, "-i", "sft", "-g", "d4", "-s", "3", *SHORT)[0]
    assert "has no model tag 'd9'; there is d4" in run(capsys, "-i", "sft", "-g", "d9", code=2)[1]
    assert "[1, 253]" in run(capsys, "-i", "sft", "--prompt", "hi", "--max-tokens", "254", code=2)[1]
    out, _ = run(capsys, "-i", "sft", "--prompt", "hi", "--max-tokens", "253", "--device", "cpu")
    check_page(out, "G4", 253)
    (tmp_path / "tokenizer" / "tokenizer.pkl").unlink()
    assert "tokenizer" in run(capsys, "-i", "sft", code=2)[1]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/no/such/place"], "/no/such/place: contains no nanochat checkpoint"),
        (["--max-tokens", "0"], "--max-tokens must be in [1, "),
        (["--prompt", "x" * 511], "--prompt has 512 tokens; it must be shorter than the model's length of 512"),
        (["--device", "tpu"], "device must be auto, cpu, cuda, cuda:N or mps"),
        ([str(find_builtin("calculator").directory), "--step", "999999999"], "has no step 999999999"),
    ],
)
def test_errors_are_one_line_and_code_2(capsys: Capture, argv: list[str], said: str) -> None:
    _, err = run(capsys, *argv, code=2)
    assert err.startswith("nano_inference.nanochat: ") and err.count("\n") == 1 and said in err


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


def test_chat_renders_the_prompt_as_a_question(capsys: Capture) -> None:
    out, _ = run(capsys, "--chat", "--prompt", "What is 12+34?", *SHORT)
    check_page(out, "G4", 24)
    assert "'<|python_start|>12+34<|python_end|>" in out, "no tool runs here"
