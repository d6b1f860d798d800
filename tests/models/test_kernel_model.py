"""`CpuExecutor` compared with `TorchExecutor`: hidden states, final norm and logits of mixed steps."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nano_inference.build import pick_kernels
from nano_inference.config import EngineConfig
from nano_inference.executors.batch import Rows, in_step_order
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.opening import load_kernel_model, load_model
from nano_inference.executors.protocol import CacheSize
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.loading.checkpoint import Checkpoint, open_checkpoint
from tests.models.families import FAMILIES, make_model, others_nightly
from tests.nanochat.tiny import GENERATIONS, base_meta, write_checkpoint
from tests.rows import make_row

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MAX_LEN = 256
BLOCK_SIZE = 16
LENGTHS = ((40, 150, 1, 23, 0), (1, 1, 1, 7, 33), (1, 60, 20, 1, 1))
"""Tokens of each of five sequences in three steps: chunks only, and chunks with decode rows."""
MARGIN = 4
"""Largest error of the kernels relative to torch's: they add the same numbers in another order."""


class StepOutputs(NamedTuple):
    """Outputs of a step in float64."""

    hidden_TE: Tensor
    final_TE: Tensor
    logits_TV: Tensor


@pytest.fixture(scope="module")
def library() -> Library:
    found = pick_kernels(EngineConfig(model_path="x", device="cpu"), CPU)
    assert found is not None, "these tests need a C compiler"
    return found


@pytest.fixture(scope="module", params=others_nightly([*FAMILIES, *GENERATIONS]))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_tiny(request.param, tmp_path_factory.mktemp("tiny"))


def open_tiny(name: str, directory: Path) -> Checkpoint:
    if name in FAMILIES:
        make_model(name, directory)
    else:
        write_checkpoint(directory, name, meta=base_meta(name))
    return open_checkpoint(directory)


def steps(vocab_size: int) -> list[Rows]:
    """Return steps of five sequences with non-contiguous blocks."""
    generator = torch.Generator().manual_seed(3)
    num_blocks = MAX_LEN // BLOCK_SIZE
    texts = torch.randint(vocab_size, (len(LENGTHS[0]), MAX_LEN), generator=generator).tolist()
    tables = torch.randperm(len(texts) * num_blocks, generator=generator).view(len(texts), -1).tolist()
    starts, made = [0] * len(texts), []
    for lengths in LENGTHS:
        rows = []
        for i, length in enumerate(lengths):
            start, end = starts[i], starts[i] + length
            starts[i] = end
            if length:
                previous, blocks = texts[i][start - 1] if start else -1, tuple(tables[i])
                rows.append(make_row(i, tuple(texts[i][start:end]), prev_token=previous, start=start, blocks=blocks))
        made.append(in_step_order(tuple(rows)))
    return made


CACHE = CacheSize(num_blocks=len(LENGTHS[0]) * MAX_LEN // BLOCK_SIZE, block_size=BLOCK_SIZE)


def size_of(step: Rows) -> int:
    return sum(len(row.tokens) for row in step)


def computed(model: CpuExecutor | TorchExecutor, inputs: list[Rows]) -> list[StepOutputs]:
    model.cache.allocate(CACHE)
    found = []
    with torch.inference_mode():
        for step in inputs:
            hidden_TE = model.hidden(step, range(size_of(step)))
            parts = [hidden_TE.double().clone()]
            parts.append(model.final(hidden_TE).double().clone())
            parts.append(model.logits(hidden_TE).double().clone())
            found.append(StepOutputs(*parts))
    return found


def test_mixed_step_matches_torch(checkpoint: Checkpoint, library: Library) -> None:
    """The bound is torch's error relative to float64, plus two ulps of the largest value."""
    inputs = steps(checkpoint.config.vocab_size)
    assert {len(row.tokens) > 1 for row in inputs[1]} == {True, False}
    exact = computed(load_model(checkpoint, CPU, torch.float64, MAX_LEN), inputs)
    plain = computed(load_model(checkpoint, CPU, torch.float32, MAX_LEN), inputs)
    ours = computed(load_kernel_model(checkpoint, library, "own", MAX_LEN), inputs)
    for number, (right, theirs, mine) in enumerate(zip(exact, plain, ours, strict=True)):
        for name, r, t, m in zip(StepOutputs._fields, right, theirs, mine, strict=True):
            assert m.shape == r.shape
            bound = MARGIN * float((t - r).abs().max()) + 2.0**-22 * float(r.abs().max())
            assert bound < 1e-3 * float(r.abs().max()), "a bound that holds nothing"
            assert float((m - r).abs().max()) <= bound, (number, name)


def test_kept_rows_have_the_same_bits_as_among_all_rows(checkpoint: Checkpoint, library: Library) -> None:
    """Keys and values of dropped rows are stored, too; logits can be computed in the same call."""
    inputs = steps(checkpoint.config.vocab_size)
    whole = computed(load_kernel_model(checkpoint, library, "own", MAX_LEN), inputs)
    model = load_kernel_model(checkpoint, library, "own", MAX_LEN)  # a second one, with small buffers
    model.cache.allocate(CACHE)
    single = (inputs[0][0]._replace(tokens=(5,), prev_token=-1, start=0, blocks=(0,)),)
    alone_KV = model.step_logits(single, [0]).clone()
    for step, right in zip(inputs, whole, strict=True):
        size, last = size_of(step), [end - 1 for end in accumulate(len(row.tokens) for row in step)]
        for kept in ([], last, last[1:2], list(range(1, size, 3)), list(range(size))):
            hidden_KE = model.hidden(step, kept)
            assert torch.equal(hidden_KE.double(), right.hidden_TE[kept])
            assert torch.equal(model.step_logits(step, kept).double(), right.logits_TV[kept])
            with torch.inference_mode():
                logits_KV = model.logits(right.hidden_TE[kept].float().flip(0))
            assert torch.equal(logits_KV.double().flip(0), right.logits_TV[kept])
    assert torch.equal(model.step_logits(single, [0]), alone_KV)


def test_step_does_not_depend_on_old_buffer_contents(library: Library, tmp_path: Path) -> None:
    """Every buffer is written before it is read: a short step after a long one equals that of a new model."""
    checkpoint = open_tiny("G4", tmp_path)
    inputs = steps(checkpoint.config.vocab_size)
    used = load_kernel_model(checkpoint, library, "own", MAX_LEN)
    first = computed(used, inputs)
    for again in (computed(used, inputs), computed(load_kernel_model(checkpoint, library, "own", MAX_LEN), inputs)):
        for one, other in zip(first, again, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_weights_can_be_discarded_and_replaced(library: Library, tmp_path: Path) -> None:
    checkpoint = open_tiny("qwen3-ratio3-tied", tmp_path)
    inputs = steps(checkpoint.config.vocab_size)[:1]
    model = load_kernel_model(checkpoint, library, "own", MAX_LEN)
    weights, first = model.model, computed(model, inputs)
    model.weights.discard()
    assert model.weights.num_bytes == 0
    with pytest.raises(AssertionError):
        computed(model, inputs)
    model.weights.commit(weights)
    assert torch.equal(computed(model, inputs)[0].logits_TV, first[0].logits_TV)
