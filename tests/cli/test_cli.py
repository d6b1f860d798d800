"""Commands run in this process: output and exit codes."""

from __future__ import annotations

import io
import json
import shutil
import signal
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.cli import generate, main
from nano_inference.cli.app import report
from nano_inference.cli.chat.local import fit_to_context
from nano_inference.cli.local import open_session, stream_answer
from nano_inference.cli.options import COMMON
from nano_inference.cli.place import parse_lines
from nano_inference.cli.terminal import Interrupts
from nano_inference.loading.catalog import WHEELS
from nano_inference.types import EngineDead
from tests.cli.commands import Capture, run
from tests.models.families import make_model

pytestmark = pytest.mark.slow

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos"]


def samples_of(capsys: Capture, *argv: str) -> list[dict[str, Any]]:
    """Run `generate --json` and return its objects."""
    out, _ = run(capsys, "generate", "--json", *argv)
    return [json.loads(line) for line in out.splitlines()]


def core(tiny: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))


# ---- options


def test_every_field_is_a_flag_with_its_help(capsys: Capture) -> None:
    page, _ = run(capsys, "generate", "--help")
    words = " ".join(page.replace("│", " ").split())
    renamed = {"model_path", "overrides"}
    flagless = {"logit_bias", "allowed_token_ids", "logprob_token_ids"}
    for cls, left_out in ((EngineConfig, renamed), (SamplingParams, flagless)):
        for field in fields(cls):
            if field.name not in left_out:
                name = field.name.replace("_", "-")
                assert f"--{name} " in words
    assert "--model -m STR" in words and "--override STR..." in words
    assert "tokens in a KV block [default: 16]" in words
    assert "Excludes tokens less probable than min_p" in words
    assert "logit-bias" not in words and "allowed-token" not in words


def test_default_model_without_model_option(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for at a package index that has no packages."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    _, err = run(capsys, "generate", "x", "--block-size", "8", "--cache", str(tmp_path / "cache"), code=2)
    assert f"{WHEELS[0].requirement}: pip cannot download it" in err


# ---- generate


def test_streamed_text_equals_batch_text(tiny: Path, capsys: Capture) -> None:
    (sample,) = samples_of(capsys, "hello", "-m", str(tiny), *GREEDY)
    out, err = run(capsys, "generate", "hello", "-m", str(tiny), *GREEDY)
    specials = set(range(3))
    data = core(tiny).decode([t for t in sample["token_ids"] if t not in specials], skip_special_tokens=False)
    assert out == sample["text"] + "\n" and out.strip() and sample["text"] == data
    assert "12 generated" in err and "first token after" in err
    out_quiet, err_quiet = run(capsys, "generate", "hello", "-m", str(tiny), *GREEDY, "--quiet")
    assert out_quiet == out and err_quiet == ""


def test_generate_json_for_every_kind_of_prompt(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "prompts.txt"
    messages = [{"role": "user", "content": "hello"}]
    lines = ["hello", json.dumps({"messages": messages}), json.dumps({"token_ids": [5, 6, 7]}), '{"prompt": "hello"}']
    file.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    samples = samples_of(capsys, "-m", str(tiny), "--file", str(file), "--n", "2", "--max-tokens", "4", "--seed", "1")
    assert [(s["prompt_index"], s["sample_index"]) for s in samples] == [(i, j) for i in range(4) for j in range(2)]
    prompts = [s["prompt_token_ids"] for s in samples[::2]]
    assert prompts[2] == [5, 6, 7] and prompts[0] == prompts[1] == prompts[3] and len(prompts[0]) > 5
    for sample in samples:
        sizes = {len(sample[name]) for name in ("token_ids", "logprobs", "mask", "token_versions")}
        assert len(sizes) == 1 and sizes <= {1, 2, 3, 4}
        assert sample["finish_reason"] in ("stop", "length") and "top_logprobs" not in sample
    assert samples[0]["token_ids"] != samples[1]["token_ids"], "two samples of one prompt draw differently"
    assert samples[1]["num_cached_tokens"] == len(prompts[0]) - 1, "the second sample uses the first one's prompt cache"


def test_raw_system_and_logprobs_options(tiny: Path, capsys: Capture) -> None:
    tokenizer = core(tiny)
    options = ("-m", str(tiny), "--max-tokens", "2", "--ignore-eos")
    (raw,) = samples_of(capsys, "hello", "--raw", "--logprobs", "2", *options)
    assert tokenizer.decode(raw["prompt_token_ids"], skip_special_tokens=False) == "hello"
    assert [len(top) for top in raw["top_logprobs"]] == [2, 2]
    (chat,) = samples_of(capsys, "hello", "--system", "be brief", *options)
    assert tokenizer.decode(chat["prompt_token_ids"], skip_special_tokens=False) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_stop_string_is_not_in_the_text(tiny: Path, capsys: Capture) -> None:
    options = ("-m", str(tiny), *GREEDY)
    (whole,) = samples_of(capsys, "hello", *options)
    stop = whole["text"][3:5]
    before = whole["text"].partition(stop)[0]
    (cut,) = samples_of(capsys, "hello", *options, "--stop", stop, "--stop", "\x00never")
    assert cut["text"] == before and cut["stop_reason"] == stop and cut["finish_reason"] == "stop"
    assert run(capsys, "generate", "hello", *options, "--stop", stop)[0] == before + "\n"


def test_file_dash_reads_one_prompt_per_line(tiny: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    samples = samples_of(capsys, "--file", "-", "-m", str(tiny), "--raw", "--max-tokens", "1")
    assert [core(tiny).decode(sample["prompt_token_ids"]) for sample in samples] == ["two", "lines"]


def test_stdin_is_one_prompt(tiny: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in ((), ("-",)):
        monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines"))
        (sample,) = samples_of(capsys, *argv, "-m", str(tiny), "--raw", "--max-tokens", "1")
        assert core(tiny).decode(sample["prompt_token_ids"]) == "two\nlines"


# ---- errors


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generate", "x", "--temperature", "-3"], "temperature must be in [0, 100], got -3.0"),
        (["generate", "x", "--no-such-option"], "--no-such-option"),
        (["generate", "x", "--n", "0"], "--n must be >= 1, got 0"),
        (["generate", "x", "--file", "y"], "not both"),
        (["generate", "--file", "/no/such/file"], "/no/such/file: No such file"),
        (["generate", "x", "--max-model-len", "4", "--quiet"], "4"),
        (["generate", "x", "--raw", "--system", "y"], "--raw disables"),
        (["bench", "--workload", "sleep"], "decode1, prefill, rollout"),
        (["tokenize", "--decode", "99999"], "99999 is not in [0, "),
        (["nonsense"], "nonsense"),
        (["models", "pull", "."], "local path"),
        (["models", "pull", "smollm2-135m-instuct"], "not the name of a model; did you mean smollm2-135m-instruct?"),
        (["models", "pull", "gpt2"], "known: smollm2-135m-instruct, calculator; of the hub: org/name"),
        (["chat", "--temperature", "warm"], '--temperature: unable to convert "warm" into float'),
        (["chat", "--plain=maybe"], '--plain: unable to convert "maybe" into bool'),
    ],
)
def test_bad_usage_prints_one_line_and_exits_2(
    tiny: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, argv: list[str], said: str
) -> None:
    monkeypatch.setenv("NANO_INFERENCE_MODEL", str(tiny))
    out, err = run(capsys, *argv, code=2)
    assert out == "" and err.startswith("nano-inference: ") and err.count("\n") == 1 and said in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a", "messages": []}', "exactly one"),
        ('{"text": "a"}', "exactly one"),
        ('{"prompt": 1}', "prompt must be a string"),
        ('{"messages": "a"}', "messages must be a list"),
        ('{"token_ids": [-1]}', "token_ids"),
        ("{not json", "must be JSON"),
    ],
)
def test_invalid_prompt_line_is_named(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^f:3: .*{said}|^f:3: {said}"):
        parse_lines(f"fine\n\n{line}\n", "f")


class FailingEngine:
    """An engine whose steps fail."""

    def __init__(self, inner: InferenceEngine) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def tick(self) -> None:
        raise ValueError("broken inside")

    def generate(self, *_: object, **__: object) -> None:
        self.tick()


@pytest.mark.parametrize("n", [1, 2])
def test_engine_failure_exits_1(tiny: Path, capsys: Capture, n: int) -> None:
    options = generate.Options(num_samples=n, raw=False, system=None, as_json=False)
    with open_session(EngineConfig(model_path=str(tiny), num_threads=1), COMMON) as session:
        broken = replace(session, engine=FailingEngine(session.engine))  # type: ignore[arg-type]
        with pytest.raises(EngineDead) as caught:
            generate.answer_all(broken, [[1]], options, SamplingParams(), COMMON)
    assert report(caught.value) == 1
    err = capsys.readouterr().err
    assert "the engine failed: ValueError: broken inside" in err and "Traceback" not in err


def test_traceback_variable_raises_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANO_INFERENCE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="temperature"):
        main(["generate", "x", "--temperature", "-3"])


def test_interrupt_exits_130(tiny: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pressing(io.StringIO):
        def write(self, text: str) -> int:
            signal.raise_signal(signal.SIGINT)
            return len(text)

    monkeypatch.setattr("sys.stdout", Pressing())
    assert run(capsys, "generate", "x", "-m", str(tiny), "--quiet", code=130) == ("", "")


# ---- tokenize


def test_tokenize_round_trip(tiny: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "naïve café 😀"
    ids = core(tiny).encode(text).ids
    assert run(capsys, "tokenize", text, "-m", str(tiny))[0] == " ".join(map(str, ids)) + "\n"
    shown = json.loads(run(capsys, "tokenize", "hello world", "--json", "-m", str(tiny))[0])
    assert "".join(shown["pieces"]) == "hello world" and shown["count"] == len(shown["token_ids"])
    assert run(capsys, "tokenize", "--decode", *map(str, ids), "-m", str(tiny))[0] == text + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert run(capsys, "tokenize", "-m", str(tiny))[0].split() == [str(token) for token in ids]


# ---- models, bench


def test_models_info(tiny: Path, capsys: Capture) -> None:
    facts = json.loads(run(capsys, "models", "info", str(tiny), "--json")[0])
    assert facts["architecture"] == "LlamaForCausalLM" and facts["layers"] == 2 and facts["kv_heads"] == 1
    assert facts["kv_bytes_per_token"] == 2 * 2 * 1 * 16 * 4 and facts["float32_bytes"] == 4 * facts["parameters"]
    assert facts["file_bytes"] > facts["float32_bytes"], "the file also has a header"
    assert facts["end_tokens"] == {"2": "<|im_end|>"} and facts["chat_template"] is True
    page = run(capsys, "models", "info", str(tiny))[0]
    assert "full in 2 layers" in page and "2 <|im_end|>" in page and "tokenizer.json" in page


def test_models_list_and_rm(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = WHEELS[0]
    place = ("--cache", str(tmp_path))
    monkeypatch.setenv("NANO_INFERENCE_CACHE", "/no/such/cache")  # the flag wins
    names = [entry["name"] for entry in json.loads(run(capsys, "models", "list", "--json", *place)[0])]
    assert wheel.name not in names
    with (tmp_path / wheel.file_name).open("wb") as file:
        file.truncate(wheel.file_bytes)
    (entry,) = [e for e in json.loads(run(capsys, "models", "list", "--json", *place)[0]) if e["name"] == wheel.name]
    assert entry == {"name": wheel.name, "path": str(tmp_path / wheel.file_name), "bytes": 98362432, "source": "wheel"}
    monkeypatch.setenv("NANO_INFERENCE_CACHE", str(tmp_path))
    assert "98.4 MB" in run(capsys, "models", "list")[0]
    assert "98.4 MB freed" in run(capsys, "models", "rm", wheel.name, *place)[1]
    assert not (tmp_path / wheel.file_name).exists()
    assert "is not in" in run(capsys, "models", "rm", wheel.name, *place, code=2)[1]


def test_bench_prints_a_table_and_json(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    """Of a tiny model whose vocabulary has the workloads' ids."""
    make_model("llama-ratio1-untied", tmp_path, {"vocab_size": 40_000})
    for file in tiny.glob("*token*"):
        shutil.copy(file, tmp_path)
    out, _ = run(capsys, "bench", "--workload", "decode1", "--repeat", "2", "-m", str(tmp_path))
    (result,) = json.loads(out.splitlines()[-1])["workloads"]
    assert len(result["values"]) == 2 and (result["name"], result["unit"]) == ("decode1", "decode tok/s")
    assert "One prompt of 32 tokens, 128 generated" in " ".join(out.split())


# ---- the model's own sampling


@pytest.fixture(scope="module")
def opinionated(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with top_k 1 in its generation_config.json."""
    directory = shutil.copytree(tiny, tmp_path_factory.mktemp("opinionated") / "model")
    (directory / "generation_config.json").write_text('{"top_k": 1, "temperature": 1.5, "do_sample": true}')
    return directory


def test_generate_uses_chat_defaults_but_not_for_json(tiny: Path, opinionated: Path, capsys: Capture) -> None:
    argv = ("hello", "--seed", "5", "--max-tokens", "40", "--ignore-eos", "-m", str(tiny))
    text, err = run(capsys, "generate", *argv)
    assert "[chat defaults: temperature 0.7, top_p 0.95, min_p 0.05 (default for chats); options change them]" in err
    chosen = ("--temperature", "0.7", "--top-p", "0.95", "--min-p", "0.05")
    assert text == run(capsys, "generate", *argv, *chosen)[0]
    neutral = ("--temperature", "1", "--top-p", "1", "--min-p", "0")
    assert text != run(capsys, "generate", *argv, *neutral)[0]
    assert samples_of(capsys, *argv) == samples_of(capsys, *argv, *neutral)
    _, err = run(capsys, "generate", "--json", "hello", "--max-tokens", "12", "-m", str(opinionated))
    assert "[temperature 1.5, top_k 1: the model's defaults (generation_config.json)]" in err


def test_chat_prints_and_uses_chat_defaults(
    tiny: Path, opinionated: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, err = run_chat(capsys, monkeypatch, "/set\n", "-m", str(tiny))
    drawn = "temperature 0.7, top_p 0.95, min_p 0.05 (default for chats)"
    assert f"[chat defaults: {drawn}, at most 1024 tokens; /set changes them]" in err
    for line in ("temperature = 0.7", "top_p = 0.95", "min_p = 0.05", "max_tokens = 1024"):
        assert f"{line} (default)" in err
    _, err = run_chat(capsys, monkeypatch, "/set\n", "-m", str(tiny), "--temperature", "1", "--max-tokens", "256")
    assert "[chat defaults: top_p 0.95, min_p 0.05 (default for chats); /set changes them]" in err
    assert "temperature = 1.0\n" in err and "max_tokens = 256\n" in err
    _, err = run_chat(capsys, monkeypatch, "/set\n", "-m", str(opinionated))
    assert (
        "[chat defaults: temperature 1.5, top_k 1 (the model's generation_config.json), at most 1024 tokens; /set"
        in err
    )
    assert "min_p = 0.0 (default)" in err
    _, err = run_chat(capsys, monkeypatch, "/set\n", "-m", str(opinionated), "-t", "1.2", "-k", "3")
    assert "top_p = 1.0 (default)" in err, "the source does not depend on the user's options"
    _, err = run_chat(capsys, monkeypatch, "/set\n", "-m", str(tiny), "-t", "0")
    assert "[chat defaults: at most 1024 tokens; /set changes them]" in err


def test_invalid_model_sampling_is_one_line(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    directory = shutil.copytree(tiny, tmp_path / "model")
    (directory / "generation_config.json").write_text('{"top_p": 3}')
    for command in (("generate", "x"), ("chat", "-p", "x")):
        _, err = run(capsys, *command, "-m", str(directory), code=2)
        assert err.startswith(f"nano-inference: {directory}: generation_config.json: top_p") and err.count("\n") == 1
        run(capsys, *command, "-m", str(directory), "--top-p", "0.9", "--max-tokens", "2")


# ---- chat


def run_chat(capsys: Capture, monkeypatch: pytest.MonkeyPatch, lines: str, *argv: str) -> tuple[str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return run(capsys, "chat", *argv)


def test_chat_reuses_prefix_and_runs_commands(tiny: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("-m", str(tiny), *GREEDY)
    out, err = run_chat(capsys, monkeypatch, "hello\n\nagain\n/clear\nhello\n/what\n/help\n/exit\nnever\n", *options)
    answers = out.split("\n")
    statistics = [line for line in err.splitlines() if "prompt tokens" in line]
    assert len(statistics) == 3 and "(0 cached)" in statistics[0]
    cached = [int(line.partition("(")[2].partition(" ")[0]) for line in statistics]
    size = [int(line.removeprefix("[").partition(" ")[0]) for line in statistics]
    assert cached[1] >= size[0] - 1 and size[1] > size[0], "the second turn starts with the first"
    assert size[2] == size[0] and cached[2] == size[0] - 1, "after /clear the prompt is that of the first turn"
    assert "/what: no such command" in err and "/system TEXT" in err and answers[0]
    assert "cut off" in err


def test_ctrl_c_at_the_chat_prompt_quits(tiny: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pressing(io.StringIO):
        def readline(self, size: int | None = -1) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Pressing())
    run(capsys, "chat", "-m", str(tiny), code=130)


def test_fit_keeps_the_system_message_and_the_last_turn(tiny: Path) -> None:
    config = EngineConfig(model_path=str(tiny), max_model_len=64, num_threads=1)
    turns = tuple({"role": role, "content": "hello world"} for role in ("user", "assistant") * 4)[:-1]
    with open_session(config, COMMON) as session:
        prompt, kept = fit_to_context(session, "brief", turns, SamplingParams(max_tokens=8))
        assert len(prompt) <= 64 - 8 and 0 < len(kept) < len(turns) and kept == turns[-len(kept) :]
        assert kept[0]["role"] == "user" and "brief" in session.tokenizer.decode(prompt)
        for size in range(2, 12, 3):
            kept = fit_to_context(session, "b" * size, turns, SamplingParams(max_tokens=8))[1]
            assert kept[0]["role"] == "user", "turns are dropped in pairs"
        assert fit_to_context(session, None, ({"role": "user", "content": "x" * 999},), SamplingParams())[1]


def test_interrupted_answer_keeps_its_text(tiny: Path) -> None:
    with open_session(EngineConfig(model_path=str(tiny), num_threads=1), COMMON) as session, Interrupts() as interrupts:
        written: list[str] = []

        def write(text: str) -> None:
            written.append(text)
            interrupts.pressed = len("".join(written)) > 5

        params = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
        answer = stream_answer(session, [5, 6, 7], params, interrupts, write, quiet=True)
        assert answer.sample.finish_reason == "abort" and 0 < len(answer.sample.completion_tokens) < 100
        assert answer.text == "".join(written) and not session.engine.has_pending()


def test_interrupt_during_prefill(tiny: Path) -> None:
    config = EngineConfig(model_path=str(tiny), num_threads=1, max_tokens_per_batch=16)
    with open_session(config, COMMON) as session, Interrupts() as interrupts:
        interrupts.pressed = True
        answer = stream_answer(session, [5] * 200, SamplingParams(), interrupts, lambda text: None, quiet=True)
        assert answer.text == "" and answer.sample.finish_reason == "abort" and not answer.sample.completion_tokens
        assert not session.engine.has_pending() and "0 generated" in answer.stats.summary()


# ---- the default model


@pytest.mark.model
def test_default_model_answers(default_model_path: Path, capsys: Capture) -> None:
    argv = ("What is the capital of France?", "--temperature", "0", "-m", str(default_model_path))
    assert "Paris" in run(capsys, "generate", *argv)[0]
    (sample,) = samples_of(capsys, *argv)
    assert "Paris" in sample["text"] and sample["finish_reason"] == "stop" and sample["stop_reason"] is None
    assert set(sample) == {
        "prompt_index", "sample_index", "text", "prompt_token_ids", "token_ids", "logprobs", "mask", "token_versions",
        "finish_reason", "stop_reason", "num_cached_tokens",
    }  # fmt: skip
