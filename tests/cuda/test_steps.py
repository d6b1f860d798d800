"""A window on CPU tensors does only what a CUDA graph may record; updates and memory pressure keep its addresses."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nano_inference import SamplingParams
from nano_inference.executors.cuda.decode import StepKey
from nano_inference.executors.cuda.records import FUSED_ROWS
from nano_inference.executors.cuda.windows import bucket_of
from tests.cuda.engines import open_cuda
from tests.cuda.models import NAMES, config_of, write_model
from tests.cuda.plain import plain_kernels
from tests.cuda.strict import VIEWS, Strictly
from tests.models.families import others_nightly

pytestmark = pytest.mark.slow

PARAMS = (
    SamplingParams(max_tokens=20, seed=1),
    SamplingParams(max_tokens=20, seed=2, temperature=0),
    SamplingParams(max_tokens=20, seed=3, top_k=5, top_p=0.9, logprobs=2),
    SamplingParams(max_tokens=20, seed=4, presence_penalty=0.5, logit_bias={3: 2.0}, raw_logprobs=True),
)
RAW = SamplingParams(seed=5, raw_logprobs=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("steps")
    write_model("llama3-rope-ratio3-tied", directory)
    return directory


def test_windows_only_launch_kernels_on_fixed_memory(tiny: Path) -> None:
    strictly = Strictly(tiny, config_of(tiny, max_batch_size=32))
    with strictly.engine as engine:
        prompt = [7, 8, 9]
        engine.generate([prompt] * 4, list(PARAMS))
        few = [dataclasses.replace(one, max_tokens=3) for one in PARAMS]
        engine.generate([[*range(60)] * 5] * 3, few[0])
        engine.generate([prompt] * 7, few[0])
        engine.generate([prompt] * 17, few[3])
        engine.generate([prompt] * 4, few)
    (stepper,) = strictly.steppers
    keys = set(stepper.seen)
    assert {key.num_rows for key in keys} >= {4, 8, 32} and {key.has_groups for key in keys} == {False, True}
    assert {key.has_cut for key in keys} == {key.has_tops for key in keys} == {False, True}
    products = [name for key, calls in stepper.seen.items() for name, *_ in calls if name in ("mm", "addmm")]
    assert stepper.num_replays > 2 * len(keys) and products


@pytest.mark.parametrize(
    ("name", "num_rows", "of_layer"),
    [
        ("llama3-rope-ratio3-tied", 1, 5),
        ("qwen3-ratio3-tied", FUSED_ROWS, 5),
        ("qwen2-ratio7", 1, 5),
        ("llama3-rope-ratio3-tied", FUSED_ROWS + 1, 10),
    ],
)
def test_a_step_of_few_rows_makes_five_launches_a_layer(
    name: str, num_rows: int, of_layer: int, tmp_path: Path
) -> None:
    """Attention, four products; ten with the norms, rotation, splits, merge and activation of more rows."""
    write_model(name, tmp_path)
    strictly = Strictly(tmp_path, config_of(tmp_path))
    with strictly.engine as engine:
        engine.generate([[7, 8, 9]] * num_rows, PARAMS[0])
        num_layers = len(engine.model.program.caches)
    calls = strictly.steppers[0].seen[StepKey(bucket_of(num_rows, 8), 1, False, False, False)]
    around = len(calls) - of_layer * num_layers
    names = Counter(name for name, *_ in calls)
    print(f"{name}, {num_rows} rows: {len(calls)} launches, {of_layer * 24 + around} with 24 layers: {names}")
    assert around == (9 if of_layer == 5 else 8), "the first norm has no addition"
    assert of_layer * 24 + around <= 150 or num_rows > FUSED_ROWS


@pytest.mark.parametrize("name", others_nightly(NAMES))
def test_deterministic_windows_of_every_family_only_launch_kernels(name: str, tmp_path: Path) -> None:
    """`test_every_family_is_the_c_path` shows the same without `deterministic`."""
    write_model(name, tmp_path)
    strictly = Strictly(tmp_path, config_of(tmp_path, deterministic=True, lookahead=2))
    with strictly.engine as engine:
        engine.generate([[7, 8, 9]] * 4, [dataclasses.replace(one, max_tokens=4) for one in PARAMS])
    (stepper,) = strictly.steppers
    assert (True, True) in {(key.has_cut, key.has_tops) for key in stepper.seen}
    assert stepper.num_replays > len(stepper.seen), "no step was repeated"


class Outside(TorchDispatchMode):
    """Notes the operations of torch outside the steps, by the number of steps before them."""

    def __init__(self, strictly: Strictly) -> None:
        super().__init__()
        self._recorder, self._stepper = strictly.recorder, strictly.steppers[0]
        self.found: defaultdict[int, list[str]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if not self._recorder.is_stepping and name not in VIEWS:
            self.found[self._stepper.num_replays].append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("params", "num_copies"), [(PARAMS[0], 0), (PARAMS[2], 2), pytest.param(RAW, 1, marks=pytest.mark.nightly)]
)
def test_between_steps_torch_only_copies_what_few_requests_want(
    params: SamplingParams, num_copies: int, tiny: Path
) -> None:
    """Ids and numbers of top tokens, and raw log-probabilities: docs/cuda.md lists them."""
    strictly = Strictly(tiny, config_of(tiny))
    with strictly.engine as engine:
        engine.add_request([7, 8, 9], dataclasses.replace(params, max_tokens=80))
        engine.tick()
        engine.tick()
        first = strictly.steppers[0].num_replays
        with Outside(strictly) as outside:
            engine.tick()
        engine.abort_all()
    last = strictly.steppers[0].num_replays
    assert last - first == 16
    assert [outside.found[index] for index in range(first + 1, last)] == [["copy_"] * num_copies] * 15


def test_an_update_keeps_addresses_and_changes_tokens(tiny: Path) -> None:
    strictly = Strictly(tiny, config_of(tiny))
    with strictly.engine as engine, open_cuda(tiny, config_of(tiny)) as other:
        prompts = [[5, 6, 7], [8, 9, 10, 11]]
        before = engine.generate(prompts, PARAMS[0])
        assert engine.parts.executor is not None and other.parts.executor is not None
        at = {name: value.data_ptr() for name, value in engine.parts.executor.weights.values()}
        new = {name: 1.3 * value for name, value in other.parts.executor.weights.values()}
        for _ in range(3):
            engine.update_weights(new, blocking=True)
        other.update_weights(new, blocking=True)
        after = engine.generate(prompts, PARAMS[0])
        right = other.generate(prompts, PARAMS[0])
        assert [one.completion_tokens for one in after] == [one.completion_tokens for one in right]
        assert [one.logprobs for one in after] == [one.logprobs for one in right]
        assert [one.completion_tokens for one in after] != [one.completion_tokens for one in before]
        assert {name: value.data_ptr() for name, value in engine.parts.executor.weights.values()} == at
    assert len(strictly.steppers) == 1


def test_sleep_frees_memory_and_waking_gives_the_same_tokens(tiny: Path) -> None:
    with open_cuda(tiny, config_of(tiny)) as engine:
        before = engine.generate([[1, 2, 3]], list(PARAMS[:1]))
        engine.sleep()
        assert engine.parts.executor is not None and engine.parts.executor.cache.num_bytes == 0
        engine.wake()
        after = engine.generate([[1, 2, 3]], list(PARAMS[:1]))
        assert [one.logprobs for one in after] == [one.logprobs for one in before]


class Cramped:
    """Kernels that find no memory for a pass if `fails`, given the sizes of all passes so far."""

    def __init__(self, fails: Callable[[list[int]], bool]) -> None:
        self.sizes: list[int] = []
        plain = plain_kernels()

        def embed(out_TW: Tensor, *more: Any) -> None:
            self.sizes.append(out_TW.size(0))
            if fails(self.sizes):
                raise torch.OutOfMemoryError("CUDA out of memory")
            plain.operate.embed(out_TW, *more)

        operate = SimpleNamespace(**{**vars(plain.operate), "embed": embed})
        self.kernels = dataclasses.replace(plain, operate=operate)


@pytest.mark.parametrize("most", [2, 4, 9])
def test_a_step_without_memory_is_computed_in_parts(most: int, tiny: Path) -> None:
    cramped = Cramped(lambda sizes: sizes[-1] > most)
    prompts = [[*range(20)], [3, 4, 5], [*range(40, 75)]]
    params = SamplingParams(max_tokens=5, seed=1, prompt_logprobs=1)
    with open_cuda(tiny, config_of(tiny)) as engine:
        right, embedded = engine.generate(prompts, params), engine.embed(prompts)
    with open_cuda(tiny, config_of(tiny), kernels=cramped.kernels) as engine:
        mine, pooled = engine.generate(prompts, params), engine.embed(prompts)
    assert max(cramped.sizes) > most and (most > 2 or 4 in cramped.sizes), "a window was too large, too"
    for one, other in zip(mine, right, strict=True):
        assert one.completion_tokens == other.completion_tokens
        assert one.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-5)
    for vector, expected in zip(pooled, embedded, strict=True):
        assert list(vector) == pytest.approx(list(expected), abs=1e-5)


def bits(sample: Any) -> tuple[Any, ...]:
    return sample.completion_tokens, sample.logprobs, sample.top_logprobs, sample.raw_logprobs


@pytest.mark.parametrize("name", ["qwen3-ratio3-tied", pytest.param("gemma2", marks=pytest.mark.nightly), "G4"])
def test_deterministic_results_do_not_depend_on_the_batch(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path)
    prompts = [[*range(40)], [7, 8], [*range(3, 20)], [3, 2, 1]] * 3
    params = [dataclasses.replace(one, seed=i, max_tokens=8) for i, one in enumerate(PARAMS * 3)]
    with open_cuda(tmp_path, config_of(tmp_path, deterministic=True)) as engine:
        alone = []
        for prompt, one in zip(prompts, params, strict=True):
            alone.append(bits(engine.generate([prompt], one)[0]))
            engine.flush_cache()
        assert [bits(sample) for sample in engine.generate(prompts, params)] == alone
    options = {"max_tokens_per_batch": 24, "max_batch_size": 24, "lookahead": 3, "block_size": 4}
    with open_cuda(tmp_path, config_of(tmp_path, deterministic=True, **options)) as engine:
        assert [bits(sample) for sample in engine.generate(prompts, params)] == alone
