"""Random LoRA adapters of tiny models, created with PEFT, the reference for results."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from nano_inference.core.step import Row, RowState
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.protocol import CacheSize
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.loading.adapters import read_adapter
from tests.models.families import VOCAB_SIZE
from tests.rows import make_row

BLOCK_SIZE, MAX_LEN = 16, 256


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def adapted(model: transformers.PreTrainedModel, seed: int = 0, **config: Any) -> peft.PeftModel:
    """Return a model with a random adapter."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT uses a deprecated name of Transformers
        made = peft.get_peft_model(model, peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made.eval()


def save(model: peft.PeftModel, directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT looks for the base model's files
        model.save_pretrained(directory, save_embedding_layers=False)
    return directory


def add(executor: CpuExecutor | TorchExecutor, number: int, directory: Path) -> None:
    adapter = read_adapter(directory, executor.program, executor.config.names, max_rank=256)
    executor.commit_adapter(number, executor.stage_adapter(adapter))


def rows_of(texts: Mapping[int, Sequence[int]], lengths: Sequence[int], numbers: Mapping[int, int]) -> list[Row]:
    """Return one row for each of some chunks of texts, by sequence; `numbers` are those of their adapters."""
    made = []
    size = MAX_LEN // BLOCK_SIZE
    for index, ids in texts.items():
        for start, end in zip(starts := [0, *accumulate(lengths)], [*starts[1:], len(ids)], strict=False):
            if start < min(end, len(ids)):
                made.append(
                    make_row(
                        index,
                        tuple(ids[start:end]),
                        prev_token=ids[start - 1] if start else -1,
                        start=start,
                        blocks=tuple(range(index * size, (index + 1) * size)),
                        adapter=numbers.get(index, 0),
                        state=RowState(index, index),
                    )
                )
    return made


def logits_of(
    executor: CpuExecutor | TorchExecutor,
    texts: Mapping[int, Sequence[int]],
    numbers: Mapping[int, int],
    lengths: Sequence[int] = (),
) -> dict[int, Tensor]:
    """Return the logits [T, V] of each text, computed together in chunks of these lengths, in a new cache."""
    executor.cache.allocate(
        CacheSize(num_blocks=(max(texts) + 1) * MAX_LEN // BLOCK_SIZE, block_size=BLOCK_SIZE, num_states=max(texts) + 1)
    )
    rows = rows_of(texts, lengths, numbers)
    found: dict[int, list[Tensor]] = {index: [] for index in texts}
    with torch.inference_mode():
        for start in sorted({row.start for row in rows}):
            step = tuple(row for row in rows if row.start == start)
            step = tuple(one if executor.program.states else one._replace(state=None) for one in step)
            sizes = [len(row.tokens) for row in step]
            logits_TV = executor.step_logits(step, range(sum(sizes))).clone()
            for row, part in zip(step, torch.split(logits_TV, sizes), strict=True):
                found[row.id].append(part)
    return {index: torch.cat(parts) for index, parts in found.items()}
