"""lm-eval's local-completions on the server against its Transformers backend, on tasks defined here."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.process import NEEDED, Served, program, succeed
from tests.clients.recipes import printed_command

pytest.importorskip("lm_eval", reason=f"lm-eval: {NEEDED}")

NUM_CHOICES, NUM_TEXTS = 30, 12
WORDS = ("river", "stone", "music", "winter", "garden", "engine", "paper", "silver", "ocean", "π", "雪")
TASKS = ("tiny_choice", "tiny_generate", "tiny_rolling")
TOLERANCE = 1e-5
"""Relative difference of log-likelihoods: sums of up to 400 float32 numbers in another order."""
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
    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    return {
        "tiny_choice": [
            {
                "question": f"Question {number}: what comes after {words(3)}?\nAnswer:",
                "choices": [words(1 + number % 3) for _ in range(4)],
                "answer": rng.randrange(4),
            }
            for number in range(NUM_CHOICES)
        ],
        "tiny_generate": [{"question": f"Continue, {n}: {words(5)}", "answer": "x"} for n in range(NUM_TEXTS)],
        "tiny_rolling": [{"text": words(5 + 4 * number)} for number in range(NUM_TEXTS)],
    }


def write_tasks(directory: Path) -> Path:
    """Write the task files and their items; JSON is valid YAML."""
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
    """lm-eval's output: the results of each task and the answers to its items."""

    results: dict[str, Any]
    answers: dict[str, list[Any]]


def evaluate(tasks: Path, model: str, model_args: str, home: Path, *options: str) -> Evaluated:
    """Run the lm-eval program and return its output."""
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
    """Results of the Transformers backend."""
    home = tmp_path_factory.mktemp("hf")
    return evaluate(tasks, "hf", f"pretrained={tiny_directory},dtype=float32", home, "--device", "cpu")


@pytest.fixture(scope="module")
def served(
    tasks: Path, tiny_directory: Path, tiny_server: Served, tmp_path_factory: pytest.TempPathFactory
) -> Evaluated:
    """Results of the server: prompts as token ids, eight per request, four concurrent requests."""
    place = f"base_url={tiny_server.url}/v1/completions,model=tiny,num_concurrent=4,max_retries=1,max_length=512"
    text = f"tokenizer_backend=huggingface,tokenizer={tiny_directory},tokenized_requests=True"
    home = tmp_path_factory.mktemp("served")
    return evaluate(tasks, "local-completions", f"{place},{text}", home, "--batch_size", "8")


@pytest.fixture(scope="module")
def printed(tasks: Path, tiny_server: Served, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """Results of the server by the command of docs/clients.md, with the tasks of this file."""
    arguments = printed_command("lm-eval", tiny_server.url, "tiny").arguments
    assert arguments[:4] == ["run", "--model", "local-completions", "--tasks"] and arguments[5] == "--model_args"
    return evaluate(tasks, "local-completions", arguments[6], tmp_path_factory.mktemp("printed"))


def scores(answers: list[Any]) -> list[float]:
    """Return a task's log-likelihoods; an answer to a choice is [log-likelihood, is greedy]."""
    flat = [one for item in answers for one in item]
    return [float(one[0]) if isinstance(one, list) else float(one) for one in flat]


@pytest.mark.parametrize("task", ["tiny_choice", "tiny_rolling"])
def test_log_likelihoods_equal_transformers(expected: Evaluated, served: Evaluated, task: str) -> None:
    reference, got = scores(expected.answers[task]), scores(served.answers[task])
    assert len(got) == len(reference) == {"tiny_choice": 4 * NUM_CHOICES, "tiny_rolling": NUM_TEXTS}[task]
    assert len(set(reference)) > len(reference) // 2, "the items differ"
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, reference, strict=True))
    print(f"{task}: largest relative difference {worst:.2e} of {len(got)}")
    assert worst < TOLERANCE


def test_accuracies_and_greedy_flags_equal_transformers(expected: Evaluated, served: Evaluated) -> None:
    for metric in ("acc,none", "acc_norm,none"):
        assert served.results["tiny_choice"][metric] == expected.results["tiny_choice"][metric]
    assert 0 < expected.results["tiny_choice"]["acc,none"] < 1, "the task is neither trivial nor impossible"
    ours_greedy, greedy = (
        [str(one[1]) for item in e.answers["tiny_choice"] for one in item] for e in (served, expected)
    )
    assert ours_greedy == greedy


def test_printed_command_gives_the_results_of_transformers(expected: Evaluated, printed: Evaluated) -> None:
    for task in ("tiny_choice", "tiny_rolling"):
        pairs = zip(scores(printed.answers[task]), scores(expected.answers[task]), strict=True)
        assert all(abs(got - reference) / abs(reference) < TOLERANCE for got, reference in pairs)
    assert printed.answers["tiny_generate"] == expected.answers["tiny_generate"]
