"""One engine among the ranks of a trainer that `torchrun` starts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from tests.forking import Forks
from tests.models.families import make_model
from tests.parallel.test_engine import TOLERANCE, assert_same, config_of
from tests.parallel.test_processes import SOON_S
from tests.parallel.trainer import CONFIG, adapter_of
from tests.weights.test_group import free_port

pytestmark = pytest.mark.slow

SEEDED = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("spmd") / "tiny"
    make_model("llama-ratio1-untied", directory)
    make_model("gemma2", directory.with_name("other"))
    shutil.copytree(directory, directory.with_name("changed"))
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"] *= 1.3
    save_file(weights, directory.with_name("changed") / "model.safetensors", {"format": "pt"})
    return directory


def arguments(path: Path, out: Path) -> tuple[str, str]:
    """Return the trainer's arguments: the engine's configuration and the directory for what each rank sees."""
    return json.dumps(config_of(path, tensor_parallel=2).to_dict()), str(out)


def seen_by_ranks(out: Path, size: int, errors: str) -> list[dict[str, Any]]:
    """Return what each rank of the trainer saw, which lost one at its end."""
    found = [json.loads(file.read_text()) for rank in range(size) if (file := out / f"{rank}.json").exists()]
    assert len(found) == size and sum("loss" in one for one in found) == size - 1, errors[-3000:]
    return found


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    # DTensor's operations import torch._dynamo, which takes as long as to import torch.
    modules = ["tests.parallel.trainer", "torch._dynamo", "torch.distributed.run"]
    with Forks(modules, environment={"OMP_NUM_THREADS": "1"}) as one:
        yield one


@pytest.fixture(scope="module")
def two(tiny: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks of `torchrun` saw of refused engines, one that trains, and its loss of rank 0."""
    out = tmp_path_factory.mktemp("two")
    script = [str(ROOT / "tests" / "parallel" / "trainer.py"), *arguments(tiny, out)]
    code = "from torch.distributed.run import main; main()"  # what `torchrun` runs
    done = forks.run(code, "--standalone", "--nproc-per-node=2", *script)
    return seen_by_ranks(out, 2, done.stderr)


@pytest.fixture(scope="module")
def four(tiny: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four ranks, forked with the variables of `torchrun`, saw of two engines, and of one that lost rank 2."""
    out = tmp_path_factory.mktemp("four")
    code = "import sys; from tests.parallel.trainer import fork_ranks; fork_ranks(4, int(sys.argv[3]))"
    done = forks.run(code, *arguments(tiny, out), free_port())
    return seen_by_ranks(out, 4, done.stderr)


def samples(found: list[dict[str, Any]]) -> list[TrainingSample]:
    return [TrainingSample.from_dict(one) for one in found]


def test_all_ranks_of_a_trainer_see_the_same_engine(tiny: Path, two: list[dict[str, Any]]) -> None:
    """The trainer has a default process group of its own; the engine leaves it."""
    first, second = (one["train"] for one in two)
    assert [first["rank"], second["rank"]] == [0, 1]
    first, second = ({**one, "rank": None} for one in (first, second))
    assert first == second
    with InferenceEngine(config_of(tiny)) as whole:
        assert_same(samples(first["seeded"]), whole.generate([[1, 2, 3], [4] * 20], SEEDED, 2))
        assert first["scores"] == pytest.approx(whole.score([1, 2, 3, 4]), abs=TOLERANCE)
        assert first["embedding"] == pytest.approx(whole.embed([1, 2, 3, 4]), abs=TOLERANCE)
        whole.update_weights(
            {name: value * 1.25 for name, value in load_file(tiny / "model.safetensors").items()}, blocking=True
        )
        assert first["checksum"] == whole.weights_checksum()
        assert_same(samples(first["updated"]), whole.generate([[1, 2, 3]], SEEDED))
        whole.load_adapter("policy", adapter_of(load_file(tiny / "model.safetensors")), config=CONFIG, version="step-1")
        assert_same(samples(first["adapted"]), whole.generate([[1, 2, 3]], SEEDED, adapter="policy"))
    assert samples(first["adapted"])[0].adapter_versions == ("step-1",) * 8 and first["unloaded"]
    assert first["adapted"][0]["completion_tokens"] != first["updated"][0]["completion_tokens"]
    assert first["unknown adapter"].startswith("BadRequest: adapter: 'policy' is not loaded")
    assert first["awake"] == first["updated"] or [one["completion_tokens"] for one in first["awake"]] == [
        one["completion_tokens"] for one in first["updated"]
    ]
    assert first["unseeded"][0] != first["unseeded"][1]
    assert first["refused"].startswith("BadRequest: ")
    assert "lm_head.weight: holds NaN or infinity" in first["broken"]
    assert first["unknown"].startswith("WeightError: ") and "the model has no such tensor" in first["unknown"]
    assert first["mixed"].startswith("WeightError: checksum: the update has ")
    assert first["is_unchanged"] and first["version"] == 1


def test_pairs_of_ranks_form_engines_with_prompts_of_their_own(tiny: Path, four: list[dict[str, Any]]) -> None:
    """The update comes from tensors that all four ranks share, divided by columns or as addends."""
    found = [one["pairs"] for one in four]
    assert found[0] == found[1] and found[2] == found[3]
    with InferenceEngine(config_of(tiny)) as whole:
        prompts = [[[1 + pair, 2, 3], [4] * (20 + pair)] for pair in range(2)]
        for pair in range(2):
            assert_same(samples(found[2 * pair]["before"]), whole.generate(prompts[pair], SEEDED, 2))
        weights = {name: value * 1.25 for name, value in load_file(tiny / "model.safetensors").items()}
        whole.update_weights(weights, blocking=True)
        for pair in range(2):
            assert found[2 * pair]["checksum"] == whole.weights_checksum()
            assert_same(samples(found[2 * pair]["after"]), whole.generate(prompts[pair], SEEDED, 2))


@pytest.mark.parametrize("other", ["other", "changed"])
def test_ranks_with_different_checkpoints_are_refused_on_both(other: str, two: list[dict[str, Any]]) -> None:
    """`changed` has one other tensor of the same shape. A default group stays if the trainer has created it."""
    first, second = (one[other] for one in two)
    assert first["failed"] == "ValueError: tensor_parallel: rank 1 has another checkpoint than rank 0"
    assert second["failed"] == "ValueError: tensor_parallel: rank 0 has another checkpoint than rank 1"
    assert first["has_group"] == second["has_group"] == (other == "changed")


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_is_killed_in_a_call_ends_the_engine_on_all_others(
    size: int, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """Of two ranks the first is killed, of four the third."""
    worlds: list[dict[str, Any]] = request.getfixturevalue("two" if size == 2 else "four")
    found = [one["loss"] for one in worlds if "loss" in one]
    record_property("seconds", [one["seconds"] for one in found])
    assert len(found) == size - 1 and "loss" not in worlds[0 if size == 2 else 2]
    for one in found:
        assert re.match(rf"EngineDead: rank \d of {size} lost another rank", one["lost"])
        assert one["later"].startswith("EngineDead: ")
        assert one["seconds"] < SOON_S
