"""A window on CPU tensors does only what a CUDA graph may record; updates and memory pressure keep its addresses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nano_inference import SamplingParams, WeightError
from nano_inference.executors.cuda.decode import EagerStepper, StepKey
from nano_inference.executors.cuda.launchers import Kernels, plain_kernels
from tests.cuda.engines import open_cuda
from tests.cuda.test_executor import config_of, write_model
from tests.models.families import make_model
from tests.test_batch_invariance import ThreadsKept

_VIEWS = ("view", "narrow", "slice", "transpose", "t", "as_strided", "alias", "detach", "select")
_PRODUCTS = ("mm", "addmm")
PARAMS = (
    SamplingParams(max_tokens=20, seed=1),
    SamplingParams(max_tokens=20, seed=2, temperature=0),
    SamplingParams(max_tokens=20, seed=3, top_k=5, top_p=0.9, logprobs=2),
    SamplingParams(max_tokens=20, seed=4, presence_penalty=0.5, logit_bias={3: 2.0}, raw_logprobs=True),
)


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    with ThreadsKept():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("steps")
    make_model("llama3-rope-ratio3-tied", directory)
    return directory


class Recorder:
    """Wraps kernels: notes each launch with the addresses of its tensors and its numbers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.is_inside = False
        plain = plain_kernels()
        groups = {
            field.name: self._wrapped(getattr(plain, field.name))
            for field in dataclasses.fields(plain)
            if field.name != "has_fixed_heads"
        }
        self.kernels = Kernels(**groups, has_fixed_heads=False)

    def _wrapped(self, group: Any) -> Any:
        names = [name for name in dir(group) if callable(getattr(group, name)) and not name.startswith("_")]
        return SimpleNamespace(**{name: self._noting(name, getattr(group, name)) for name in names})

    def _noting(self, name: str, launch: Callable[..., None]) -> Callable[..., None]:
        def run(*given: Any, **named: Any) -> None:
            self.calls.append((name, tuple(_trace((given, sorted(named.items()))))))
            self.is_inside = True
            try:
                launch(*given, **named)
            finally:
                self.is_inside = False

        return run


def _trace(value: Any) -> Iterator[Any]:
    """Yield the address, shape and strides of each tensor in nested records, and every other value."""
    if isinstance(value, Tensor):
        yield (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _trace(one)
    elif dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            yield from _trace(getattr(value, one.name))
    else:
        yield value


class LaunchesOnly(TorchDispatchMode):
    """Raises for every torch operation outside the kernels, except views and products into given memory."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, _, overload = func.__name__.partition(".")
        is_product = name in _PRODUCTS and overload == "out"
        if not self._recorder.is_inside:
            assert name in _VIEWS or is_product, f"a window calls {func}"
            if is_product:
                self._recorder.calls.append((name, tuple(_trace((args, sorted(kwargs.items()))))))
        return func(*args, **(kwargs or {}))


class Strict(EagerStepper):
    """Runs steps under `LaunchesOnly`; every step with the same key must be the same launches on the same memory."""

    def __init__(self, step: Callable[[StepKey], None], recorder: Recorder) -> None:
        super().__init__(step)
        self._recorder = recorder
        self.seen: dict[StepKey, list[Any]] = {}
        self.num_replays = self.num_forgotten = 0

    def replay(self, key: StepKey) -> None:
        self._recorder.calls = []
        with LaunchesOnly(self._recorder):
            super().replay(key)
        self.num_replays += 1
        assert self._recorder.calls == self.seen.setdefault(key, self._recorder.calls)

    def forget(self) -> None:
        self.num_forgotten += 1
        self.seen.clear()


class Strictly:
    """An engine whose windows are checked."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.recorder, self.steppers = Recorder(), []
        self.engine = open_cuda(path, config_of(path, **options), kernels=self.recorder.kernels, stepper=self._new)

    def _new(self, step: Callable[[StepKey], None], device: torch.device) -> Strict:
        self.steppers.append(Strict(step, self.recorder))
        return self.steppers[-1]


def test_windows_only_launch_kernels_on_fixed_memory(tiny: Path) -> None:
    strictly = Strictly(tiny)
    with strictly.engine as engine:
        prompt = [7, 8, 9]
        engine.generate([prompt] * 4, list(PARAMS))
        engine.generate([[*range(60)] * 5] * 3, PARAMS[0])
        engine.generate([prompt] * 7, PARAMS[0])
    (stepper,) = strictly.steppers
    keys = set(stepper.seen)
    assert {key.num_rows for key in keys} >= {4, 8} and {key.has_groups for key in keys} == {False, True}
    assert {key.has_cut for key in keys} == {key.has_tops for key in keys} == {False, True}
    assert stepper.num_replays > 50


def test_an_update_keeps_addresses_and_changes_tokens(tiny: Path) -> None:
    strictly = Strictly(tiny)
    with strictly.engine as engine, open_cuda(tiny, config_of(tiny)) as other:
        prompts = [[5, 6, 7], [8, 9, 10, 11]]
        before = engine.generate(prompts, PARAMS[0])
        assert engine.parts.executor is not None and other.parts.executor is not None
        at = {name: value.data_ptr() for name, value in engine.parts.executor.weight_values()}
        new = {name: 1.3 * value for name, value in other.parts.executor.weight_values()}
        for _ in range(3):
            engine.control.update_weights(new, blocking=True)
        other.control.update_weights(new, blocking=True)
        after = engine.generate(prompts, PARAMS[0])
        right = other.generate(prompts, PARAMS[0])
        assert [one.completion_tokens for one in after] == [one.completion_tokens for one in right]
        assert [one.logprobs for one in after] == [one.logprobs for one in right]
        assert [one.completion_tokens for one in after] != [one.completion_tokens for one in before]
        assert {name: value.data_ptr() for name, value in engine.parts.executor.weight_values()} == at
    assert len(strictly.steppers) == 1 and strictly.steppers[0].num_forgotten == 0


def test_a_bad_update_leaves_the_weights(tiny: Path) -> None:
    with open_cuda(tiny, config_of(tiny)) as engine:
        before = engine.generate([[1, 2, 3]], PARAMS[0])
        assert engine.parts.executor is not None
        new = {name: value.clone() for name, value in engine.parts.executor.weight_values()}
        new[next(reversed(new))][0] = torch.nan
        engine.flush_cache()
        with pytest.raises(WeightError):
            engine.control.update_weights(new, blocking=True)
        assert [one.logprobs for one in engine.generate([[1, 2, 3]], PARAMS[0])] == [one.logprobs for one in before]


def test_sleep_frees_memory_and_waking_gives_the_same_tokens(tiny: Path) -> None:
    with open_cuda(tiny, config_of(tiny)) as engine:
        before = engine.generate([[1, 2, 3]], list(PARAMS[:1]))
        engine.control.sleep()
        assert engine.parts.executor is not None and engine.parts.executor.cache_bytes == 0
        engine.control.wake()
        after = engine.generate([[1, 2, 3]], list(PARAMS[:1]))
        assert [one.logprobs for one in after] == [one.logprobs for one in before]


class Cramped:
    """Kernels for which passes of more than `most` tokens find no memory."""

    def __init__(self, most: int) -> None:
        self.sizes: list[int] = []
        plain = plain_kernels()

        def embed(out_TW: Tensor, *more: Any) -> None:
            self.sizes.append(out_TW.size(0))
            if out_TW.size(0) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            plain.operate.embed(out_TW, *more)

        operate = SimpleNamespace(**{**vars(plain.operate), "embed": embed})
        self.kernels = dataclasses.replace(plain, operate=operate)


@pytest.mark.parametrize("most", [2, 4, 9])
def test_a_step_without_memory_is_computed_in_parts(most: int, tiny: Path) -> None:
    cramped = Cramped(most)
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


@pytest.mark.parametrize("name", ["gemma2", "G4"])
def test_deterministic_results_do_not_depend_on_the_batch(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path)
    prompts = [[*range(40)], [7, 8], [*range(3, 20)], [3, 2, 1]] * 5
    params = [dataclasses.replace(one, seed=i) for i, one in enumerate(PARAMS * 5)]
    with open_cuda(tmp_path, config_of(tmp_path, deterministic=True)) as engine:
        alone = []
        for prompt, one in zip(prompts, params, strict=True):
            alone.append(bits(engine.generate([prompt], one)[0]))
            engine.flush_cache()
        assert [bits(sample) for sample in engine.generate(prompts, params)] == alone
    options = {"max_tokens_per_batch": 24, "max_batch_size": 24, "lookahead": 3, "block_size": 4}
    with open_cuda(tmp_path, config_of(tmp_path, deterministic=True, **options)) as engine:
        assert [bits(sample) for sample in engine.generate(prompts, params)] == alone
