"""nanochat on the command line: `chat --nanochat`, the calculator model, and `models` with nanochat checkpoints."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nano_inference.cli.chat import local
from nano_inference.cli.local import Answer, Session
from nano_inference.cli.sampling import plain_value, sampling_fields
from nano_inference.nanochat.builtin import CALCULATOR
from nano_inference.nanochat.checkpoint import GENERATIONS
from nano_inference.text.generation_config import CHAT_MAX_TOKENS, MODELS_OWN
from nano_inference.types import SamplingParams
from tests.cli.commands import Capture, refused, run
from tests.nanochat.tiny import SPECIAL_IDS, base_meta, state_dict, write_checkpoint, write_tokenizer
from tests.nanochat.tiny import model_config as tiny_config

pytestmark = pytest.mark.slow

TOOL_IDS = [SPECIAL_IDS[name] for name in ("python_start", "python_end", "output_start", "output_end")]
BOS, USER, USER_END, ASSISTANT, END = range(256, 261)


class Turn(NamedTuple):
    """A turn's prompt and answer."""

    prompt: list[int]
    answer: Answer

    @property
    def tokens(self) -> list[int]:
        return list(self.answer.sample.completion_tokens)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[Turn]:
    """Record all following turns of chats."""
    seen: list[Turn] = []
    honest: Callable[..., Answer] = local.stream_answer

    def spy(session: Session, prompt: list[int], *args: Any, **kwargs: Any) -> Answer:
        answer = honest(session, prompt, *args, **kwargs)
        seen.append(Turn(prompt, answer))
        return answer

    monkeypatch.setattr(local, "stream_answer", spy)
    return seen


class Settings(NamedTuple):
    """What a chat says of its model and its sampling."""

    file: str
    facts: str
    fields: dict[str, str]
    """The values of all sampling fields that have a flag, as /set prints them."""
    named: set[str]
    """Those that are not defaults."""


def run_chat(capsys: Capture, monkeypatch: pytest.MonkeyPatch, lines: str, *argv: str) -> tuple[str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return run(capsys, "chat", *argv)


def settings(capsys: Capture, monkeypatch: pytest.MonkeyPatch, *argv: str) -> Settings:
    """Ask a chat for its settings."""
    _, err = run_chat(capsys, monkeypatch, "/model\n/set\n", *argv)
    (file,) = re.findall(r"^file +(\S.*)$", err, re.M)
    lines = re.findall(r"^(\w+) = (.*?)( \(default\))?$", err, re.M)
    assert tuple(name for name, _, _ in lines) == sampling_fields()
    named = {name for name, _, default in lines if not default}
    return Settings(file, err, {name: value for name, value, _ in lines}, named)


def fields_of(params: SamplingParams) -> dict[str, str]:
    """Return what /set prints of sampling parameters."""
    return {name: json.dumps(plain_value(params, name)).replace("null", "none") for name in sampling_fields()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base directory: sft has d2 (G0) and d4 (G4, two steps), base has d4 (G2)."""
    directory = tmp_path_factory.mktemp("base")
    write_tokenizer(directory / "tokenizer")
    sft = directory / "chatsft_checkpoints"
    write_checkpoint(sft / "d2", "G0", step=10)
    write_checkpoint(sft / "d4", "G4", step=20)
    state = state_dict("G4", tiny_config("G4"), seed=9)
    write_checkpoint(sft / "d4", "G4", step=30, state=state)
    write_checkpoint(directory / "base_checkpoints" / "d4", "G2", step=7, meta=base_meta("G2"))
    return directory


@pytest.fixture
def home(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same base directory, set as NANOCHAT_BASE_DIR."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base))
    return base


# ---- chat --nanochat: options


@pytest.mark.parametrize(
    ("argv", "file"),
    [
        ([], "chatsft_checkpoints/d4/model_000030.pt"),
        (["-g", "d2"], "chatsft_checkpoints/d2/model_000010.pt"),
        (["-i", "base"], "base_checkpoints/d4/model_000007.pt"),
        (["--source", "sft", "--model-tag", "d4", "--step", "20"], "chatsft_checkpoints/d4/model_000020.pt"),
    ],
)
def test_nanochat_options_select_checkpoint(
    home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, argv: list[str], file: str
) -> None:
    assert settings(capsys, monkeypatch, "--nanochat", *argv).file == str(home / file)


def test_model_option_names_base_directory(base: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = base / "chatsft_checkpoints/d4/model_000030.pt"
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "/no/such/base")
    for name in (base, base / "chatsft_checkpoints", newest):
        assert settings(capsys, monkeypatch, "--nanochat", "--model", str(name)).file == str(newest)
    monkeypatch.setenv("NANO_INFERENCE_MODEL", str(base))
    assert settings(capsys, monkeypatch, "--nanochat").file == str(newest)
    own = settings(capsys, monkeypatch, "--nanochat", "--model", "calculator")
    assert Path(own.file).parent == CALCULATOR.directory
    monkeypatch.delenv("NANO_INFERENCE_MODEL")
    assert "/no/such/base: no such directory; set NANOCHAT_BASE_DIR or --model" in refused(capsys, "chat", "--nanochat")


def test_nanochat_defaults(home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    own = settings(capsys, monkeypatch, "--nanochat")
    assert own.fields == fields_of(SamplingParams(temperature=0.6, top_k=50, max_tokens=256, seed=42))
    assert own.named >= set(MODELS_OWN), "the model's files are ignored"
    other = settings(capsys, monkeypatch, "--model", "calculator")
    assert other.fields == fields_of(SamplingParams(temperature=0.0, max_tokens=CHAT_MAX_TOKENS))
    assert "top_p" not in other.named


def test_flags_override_nanochat_defaults(home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("-t", "1.5", "-k", "7", "-d", "bfloat16", "--device-type", "cpu")
    first = settings(capsys, monkeypatch, "--nanochat", *flags)
    assert first.fields == fields_of(SamplingParams(temperature=1.5, top_k=7, max_tokens=256, seed=42))
    assert re.search(r"^precision +bfloat16 ", first.facts, re.M) and "device cpu" in first.facts
    second = settings(capsys, monkeypatch, "--nanochat", "--seed", "3", "--max-tokens", "9", "--top-k", "0")
    assert second.fields == fields_of(SamplingParams(temperature=0.6, top_k=0, max_tokens=9, seed=3))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nanochat", "-i", "pretrained"], '"base", "mid", "sft", "rl"'),
        (["--nanochat", "-i", "rl"], "has no checkpoint of the source rl; there is base, sft"),
        (["--nanochat", "-g", "d9"], "has no model tag 'd9'; there is d2, d4"),
        (["--nanochat", "-s", "9"], "has no step 9; there is 20, 30"),
        (["--nanochat", "--device-type", "mps"], "Apple GPUs are not supported"),
        (["-i", "sft"], "require --nanochat"),
        (["--no-nanochat", "-i", "sft"], "require --nanochat"),
    ],
)
def test_invalid_nanochat_options_are_one_line(home: Path, capsys: Capture, argv: list[str], said: str) -> None:
    assert said in refused(capsys, "chat", "-p", "hello", *argv)


def test_missing_checkpoint_is_one_line(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    assert f"{tmp_path}: contains no nanochat checkpoint" in refused(capsys, "chat", "--nanochat", "-p", "hello")
    (tmp_path / "chatsft_checkpoints").mkdir()
    assert "there is no <tag>/model_*.pt in chatsft_checkpoints/" in refused(capsys, "chat", "--nanochat", "-p", "x")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "missing"))
    assert "missing: no such directory" in refused(capsys, "chat", "--nanochat", "-p", "hello")


# ---- chat --nanochat: talking


def test_fixed_seed_repeats_answer(home: Path, capsys: Capture, turns: list[Turn]) -> None:
    first, err = run(capsys, "chat", "--nanochat", "-p", "hello")
    second, _ = run(capsys, "chat", "--nanochat", "-p", "hello")
    run(capsys, "chat", "--nanochat", "-p", "hello", "--seed", "43")
    assert first == second and first.strip() and turns[0].tokens == turns[1].tokens != turns[2].tokens
    assert turns[0].prompt == [BOS, USER, *b"hello", USER_END, ASSISTANT]
    assert f"[nanochat G4 (smear_gate): {home}/chatsft_checkpoints/d4/model_000030.pt]" in err
    limit = 256 - len(turns[0].prompt)
    assert len(turns[0].tokens) == limit or turns[0].tokens[-1] in (END, BOS)


@pytest.mark.parametrize("word", ["quit", "exit", "Quit", " EXIT ", "/exit"])
def test_exit_words_end_the_chat(
    home: Path, capsys: Capture, turns: list[Turn], monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    run_chat(capsys, monkeypatch, f"hello\n{word}\nnever\n", "--nanochat", "--max-tokens", "3")
    assert len(turns) == 1


def test_bare_clear_starts_new_conversation(
    home: Path, capsys: Capture, turns: list[Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_chat(capsys, monkeypatch, "hello\nagain\nclear\nhello\n", "--nanochat", "--max-tokens", "3")
    first, second, third = turns
    assert second.prompt[: len(first.prompt)] == first.prompt and len(second.prompt) > len(first.prompt) + 7
    assert third.prompt == first.prompt and third.tokens == first.tokens


# ---- the calculator model


def test_calculator_call_is_shown_with_result(capsys: Capture, turns: list[Turn]) -> None:
    out, err = run(capsys, "chat", "--model", "calculator", "-p", "What is 12+34?")
    call, _, reply = out.partition("] ")
    assert call == "[12+34 → 46" and "46" in reply and reply.endswith("\n") and "<|" not in out
    assert "[nanochat G4 (" in err and f"{CALCULATOR.directory}" in err
    assert turns[0].answer.text + "\n" == out
    out, _ = run(capsys, "chat", "--model", "Calculator", "-p", "How many r are in strawberry?")
    call, _, reply = out.partition("] ")
    assert call.startswith("['strawberry'.count(") and call.endswith(" → 3") and "3" in reply


def test_follow_up_prompt_has_tokens_of_call(
    capsys: Capture, turns: list[Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = run_chat(capsys, monkeypatch, "What is 12+34?\nplus 5\n", "--model", "calculator")
    first, second = turns
    assert [token for token in first.tokens if token in TOOL_IDS] == TOOL_IDS
    assert second.prompt == [*first.prompt, *first.tokens, USER, *b"plus 5", USER_END, ASSISTANT]
    assert "51" in out.splitlines()[1], "the prompt has the previous result"
    cached = [int(line.partition("(")[2].partition(" ")[0]) for line in err.splitlines() if "prompt tokens" in line]
    assert cached[0] == 0 and cached[1] >= len(first.prompt) + len(first.tokens) - 2, "the whole prefix is cached"


def test_generate_masks_calculator_tokens(capsys: Capture) -> None:
    argv = ("--model", "calculator", "--json", "--n", "3", "--temperature", "0.5", "--seed", "1")
    out, _ = run(capsys, "generate", "What is 12+34?", *argv)
    samples = [json.loads(line) for line in out.splitlines()]
    assert [sample["sample_index"] for sample in samples] == [0, 1, 2]
    for sample in samples:
        tokens = sample["token_ids"]
        begin = tokens.index(TOOL_IDS[2])
        assert tokens[begin : begin + 4] == [TOOL_IDS[2], *b"46", TOOL_IDS[3]]
        assert [place for place, mask in enumerate(sample["mask"]) if not mask] == list(range(begin, begin + 4))
        assert sample["text"].startswith("[12+34 → 46] ") and len(sample["mask"]) == len(tokens)


# ---- models info


def facts_of(capsys: Capture, *argv: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run(capsys, "models", "info", "--json", *argv)[0])
    return facts


@pytest.mark.parametrize("generation", ["G0", "G2", "G4"])
def test_info_lists_constants_with_reasons(generation: str, tmp_path: Path, capsys: Capture) -> None:
    write_checkpoint(tmp_path, generation, meta=base_meta(generation))
    write_tokenizer(tmp_path)
    facts = facts_of(capsys, str(tmp_path))
    rules, constants = GENERATIONS[generation], facts["constants"]
    assert facts["architecture"] == f"nanochat {generation}" and facts["chat_template"] is True
    assert facts["end_tokens"] == {str(END): "<|assistant_end|>", str(BOS): "<|bos|>"}
    values = {name: one["value"] for name, one in constants.items()}
    hard_coded = {name: getattr(rules, name) for name in ("rope_base", "qk_scale", "softcap", "gate_scale")}
    assert values == hard_coded | {
        "generation": generation,
        "sequence_len": 256,
        "window_pattern": "" if generation == "G0" else "SSSL",
        "short_window": 128,
        "norm_eps": pytest.approx(2**-23),
        "rope_dtype": "bfloat16" if generation in ("G0", "G1", "G2", "G2e") else "float32",
        "decode_window": "short",
    }
    assert constants["generation"]["reason"] == rules.signs and constants["softcap"]["reason"] == f"{generation}'s"
    page, _ = run(capsys, "models", "info", str(tmp_path))
    for name, one in constants.items():
        assert one["reason"] and f"\n  {name} = {one['value']} ({one['reason']})\n" in page
    assert ("soft cap 15 is assumed; runs of" in page) == (generation == "G2") == bool(facts["warnings"])
    assert "tiktoken (nanochat)" in page


def test_override_changes_the_value_and_the_reason(base: Path, capsys: Capture) -> None:
    place = str(base / "base_checkpoints")
    before = facts_of(capsys, place)
    after = facts_of(capsys, place, "--override", "softcap=20", "--override", "window_pattern=SL")
    by_hand = {"softcap": 20.0, "window_pattern": "SL"}
    for name, one in before["constants"].items():
        wanted = {"value": by_hand[name], "reason": "set by hand"} if name in by_hand else one
        assert after["constants"][name] == wanted
    assert before["windows"] == {"129": 3, "full": 1} and after["windows"] == {"129": 2, "full": 2}
    assert before["warnings"] and not after["warnings"]
    assert "softcap = 20.0 (set by hand)" in run(capsys, "models", "info", place, "--override", "softcap=20")[0]


# ---- models export


def drawn(capsys: Capture, model: Path) -> list[int]:
    argv = ("--json", "--temperature", "0", "--max-tokens", "16", "--ignore-eos", "--raw")
    tokens: list[int] = json.loads(run(capsys, "generate", "hello", "--model", str(model), *argv)[0])["token_ids"]
    return tokens


@pytest.mark.parametrize(
    ("to", "generation"),
    [("hf", "G0"), ("safetensors", "G2e"), ("nanochat", "G4")],
)
def test_exported_model_equals_source(to: str, generation: str, tmp_path: Path, capsys: Capture) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_checkpoint(source, generation, meta=base_meta(generation))
    write_tokenizer(source)
    assert run(capsys, "models", "export", str(source), str(target), "--to", to)[0] == f"{target}\n"
    before, after = facts_of(capsys, str(source)), facts_of(capsys, str(target))
    same = {"layers", "hidden_size", "heads", "kv_heads", "head_dim", "vocab_size", "context_length", "windows"}
    same |= {"ropes", "tied_embeddings", "file_precision", "chat_template", "end_tokens", "kv_bytes_per_token"}
    assert {name: before[name] for name in same} == {name: after[name] for name in same}
    if to == "hf":
        assert after["architecture"] == "NanoChatForCausalLM" and after["tokenizer"] == "tokenizer.json"
        assert before["parameters"] - after["parameters"] == 2 * (320 - 265) * 64, "the padding of the vocabulary"
    else:
        values = [{name: one["value"] for name, one in facts["constants"].items()} for facts in (before, after)]
        assert values[0] == values[1] and before["parameters"] == after["parameters"]
    if to == "safetensors":
        inferred = [name for name, one in after["constants"].items() if one["reason"] != "config.json"]
        assert inferred == (["short_window"] if generation == "G0" else []), "not in a model without windows"
    assert drawn(capsys, source) == drawn(capsys, target)
    run(capsys, "chat", "--nanochat", "--model", str(target), "-p", "hello", "--max-tokens", "2")


# ---- tokenize


def test_tokenize_with_a_nanochat_tokenizer(base: Path, capsys: Capture) -> None:
    text = "né 😀"
    for model in (base, base / "chatsft_checkpoints/d2/model_000010.pt", base / "base_checkpoints", "calculator"):
        ids = run(capsys, "tokenize", text, "--no-special", "--model", str(model))[0].split()
        assert ids == [str(byte) for byte in text.encode()]
        assert run(capsys, "tokenize", "--decode", *ids, "--model", str(model))[0] == text + "\n"
    shown = json.loads(run(capsys, "tokenize", "hi", "--json", "--model", str(base))[0])
    assert shown == {"token_ids": [BOS, *b"hi"], "pieces": ["<|bos|>", "h", "i"], "count": 3}
    assert run(capsys, "tokenize", "--decode", "261", "49", "262", "--model", str(base))[0] == (
        "<|python_start|>1<|python_end|>\n"
    )
    assert "265 is not in [0, 264]" in refused(capsys, "tokenize", "--decode", "265", "--model", str(base))


def test_truncated_call_is_not_shown_as_failed(capsys: Capture, turns: list[Turn]) -> None:
    argv = ("chat", "--model", "calculator", "-p", "What is 12+34?")
    run(capsys, *argv)
    num_call = turns[0].tokens.index(TOOL_IDS[1]) + 1
    out, err = run(capsys, *argv, "--max-tokens", str(num_call))
    assert turns[1].tokens == turns[0].tokens[:num_call] and "cut off" in err
    assert out.startswith("[12+34") and "no result" not in out, "the call has a result, 46, that does not fit"


def test_stop_string_ignores_decoration_of_calls(capsys: Capture) -> None:
    argv = ("generate", "What is 12+34?", "--model", "calculator", "--json")
    (plain, cut) = (json.loads(run(capsys, *argv, *stop)[0]) for stop in ((), ("--stop", "→")))
    assert cut["token_ids"] == plain["token_ids"] and cut["stop_reason"] is None, "the model never wrote it"
    assert cut["text"] == plain["text"]
