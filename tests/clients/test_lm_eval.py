"""lm-eval's local-completions on our server against its own Transformers backend, on tasks that are written here."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.process import NEEDED, Served, program, succeed

pytest.importorskip("lm_eval", reason=f"lm-eval: {NEEDED}")

NUM_CHOICES, NUM_TEXTS = 30, 12
WORDS = ("river", "stone", "music", "winter", "garden", "engine", "paper", "silver", "ocean", "π", "雪")
TASKS = ("tiny_choice", "tiny_generate", "tiny_rolling")
TOLERANCE = 1e-5
"""Relative, of a log-likelihood: sums of up to 400 float32 numbers, in another order."""
METRICS = {"tiny_choice": ("acc", "acc_norm"), "tiny_generate": ("exact_match",), "tiny_rolling": ("bits_per_byte",)}
FIELDS: dict[str, dict[str, Any]] = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
    },
    "tiny_generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 24, "do_sample": False},
    },
    "tiny_rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
}


def documents() -> dict[str, list[dict[str, Any]]]:
    """Return the items of every task."""
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    return {
        "tiny_choice": [
            {
                "question": f"Question {number}: what comes after {words(3)}?\nAnswer:",
                "choices": [words(1 + number % 3) for _ in range(4)],
                "answer": draw.randrange(4),
            }
            for number in range(NUM_CHOICES)
        ],
        "tiny_generate": [{"question": f"Go on, {n}: {words(5)}", "answer": "x"} for n in range(NUM_TEXTS)],
        "tiny_rolling": [{"text": words(5 + 4 * number)} for number in range(NUM_TEXTS)],
    }


def write_tasks(directory: Path) -> Path:
    """Write the tasks and their items; a YAML file may as well be JSON."""
    for task, items in documents().items():
        data = directory / f"{task}.jsonl"
        data.write_text("".join(json.dumps(item) + "\n" for item in items))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        metrics = [{"metric": metric} for metric in METRICS[task]]
        fields = {"task": task, **source, **FIELDS[task], "metric_list": metrics}
        (directory / f"{task}.yaml").write_text(json.dumps(fields))
    return directory


@dataclass(frozen=True)
class Evaluated:
    """What lm-eval wrote: the results of each task, and the answers to each of its items."""

    results: dict[str, Any]
    answers: dict[str, list[Any]]


def evaluate(tasks: Path, model: str, model_args: str, home: Path, *options: str) -> Evaluated:
    """Run lm-eval as people do and read what it wrote."""
    command = [program("lm-eval"), "run", "--model", model, "--model_args", model_args, "--tasks", ",".join(TASKS)]
    succeed([*command, "--include_path", str(tasks), "--output_path", str(home), "--log_samples", *options], home)
    (results,) = home.glob("*/results_*.json")
    answers: dict[str, list[Any]] = {}
    for task in TASKS:
        (samples,) = home.glob(f"*/samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        answers[task] = [line["filtered_resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
    return Evaluated(json.loads(results.read_text())["results"], answers)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of tasks."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def expected(tasks: Path, tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """What Transformers answers."""
    home = tmp_path_factory.mktemp("hf")
    return evaluate(tasks, "hf", f"pretrained={tiny_directory},dtype=float32", home, "--device", "cpu")


@pytest.fixture(scope="module")
def ours(tasks: Path, tiny_directory: Path, tiny_server: Served, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """What our server answers: prompts as token ids, eight in a request, four requests at once."""
    place = f"base_url={tiny_server.url}/v1/completions,model=tiny,num_concurrent=4,max_retries=1,max_length=512"
    text = f"tokenizer_backend=huggingface,tokenizer={tiny_directory},tokenized_requests=True"
    home = tmp_path_factory.mktemp("served")
    return evaluate(tasks, "local-completions", f"{place},{text}", home, "--batch_size", "8")


def scores(answers: list[Any]) -> list[float]:
    """Return the log-likelihoods in a task's answers: of a choice with whether it is greedy, of a text alone."""
    flat = [one for item in answers for one in item]
    return [float(one[0]) if isinstance(one, list) else float(one) for one in flat]


@pytest.mark.parametrize("task", ["tiny_choice", "tiny_rolling"])
def test_log_likelihoods_are_those_of_transformers(expected: Evaluated, ours: Evaluated, task: str) -> None:
    theirs, got = scores(expected.answers[task]), scores(ours.answers[task])
    assert len(got) == len(theirs) == {"tiny_choice": 4 * NUM_CHOICES, "tiny_rolling": NUM_TEXTS}[task]
    assert len(set(theirs)) > len(theirs) // 2, "items that differ"
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, theirs, strict=True))
    print(f"{task}: largest relative difference {worst:.2e} of {len(got)}")
    assert worst < TOLERANCE


def test_accuracies_and_greediness_are_those_of_transformers(expected: Evaluated, ours: Evaluated) -> None:
    for metric in ("acc,none", "acc_norm,none"):
        assert ours.results["tiny_choice"][metric] == expected.results["tiny_choice"][metric]
    assert 0 < expected.results["tiny_choice"]["acc,none"] < 1, "a task that tells models apart"
    ours_greedy, greedy = ([str(one[1]) for item in e.answers["tiny_choice"] for one in item] for e in (ours, expected))
    assert ours_greedy == greedy


def test_generations_are_those_of_transformers(expected: Evaluated, ours: Evaluated) -> None:
    assert ours.answers["tiny_generate"] == expected.answers["tiny_generate"]
    assert len({str(answer) for answer in ours.answers["tiny_generate"]}) > NUM_TEXTS // 2


def test_several_prompts_came_in_one_request(ours: Evaluated, tiny_server: Served) -> None:
    records = [one for one in tiny_server.answers() if one["path"] == "/v1/completions"]
    num_items = sum(len(item) for answers in ours.answers.values() for item in answers)
    assert 0 < len(records) < num_items / 2 and all(one["status"] == 200 for one in records)


# ---- its tokenizer over HTTP ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def remote(tiny_server: Served) -> Any:
    """The tokenizer that lm-eval makes of a server that has one; it is what `tokenizer_backend=auto` takes."""
    utils = pytest.importorskip("lm_eval.utils")
    url = f"{tiny_server.url}/v1/completions"
    assert utils.check_remote_tokenizer_support(url)
    return utils.RemoteTokenizer(url, max_retries=1)


def test_the_remote_tokenizer_is_the_local_one(remote: Any, tiny_directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    local = transformers.AutoTokenizer.from_pretrained(tiny_directory)
    for text in ("hello", " π 雪 <|im_end|> end"):
        assert remote.encode(text) == local(text, add_special_tokens=False).input_ids
    assert (remote.eos_token_id, remote.bos_token_id) == (local.eos_token_id, local.bos_token_id)
    talk = [{"role": "user", "content": "hello"}]
    assert remote.apply_chat_template(talk) == local.apply_chat_template(
        talk, tokenize=False, add_generation_prompt=True
    )


def test_the_remote_tokenizer_decodes(remote: Any) -> None:
    assert remote.decode(remote.encode("hello π")) == "hello π"
