"""Ranks on the CUDA executor, with plain kernels on CPU tensors: against one process with the same kernels."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.executors.protocol import Executor
from nano_inference.types import EngineDead
from tests.cuda.engines import open_cuda
from tests.cuda.plain import plain_kernels
from tests.cuda.test_executor import KINDS, TIGHT
from tests.engine.test_lookahead import run_all
from tests.forking import ROOT
from tests.parallel.ranks import leading, open_ranks
from tests.parallel.test_engine import TOLERANCE, assert_same, config_of, divisions, write_model
from tests.parallel.test_processes import SOON_S
from tests.parallel.test_updates import weights_of

pytestmark = pytest.mark.slow

LONG = SamplingParams(max_tokens=50, seed=3, ignore_eos=True)


@pytest.mark.parametrize(("name", "size"), divisions())
def test_every_family_is_the_undivided_one(name: str, size: int, tmp_path: Path) -> None:
    write_model(name, tmp_path)
    config = config_of(tmp_path, lookahead=4)
    with open_cuda(tmp_path, config) as whole:
        vocab_size, longest = whole.parts.vocab_size, whole.parts.max_model_len - 40
        rng = random.Random(2)
        prompts = [[rng.randrange(vocab_size) for _ in range(count)] for count in (1, 2, 17, min(150, longest))]
        params = [SamplingParams(max_tokens=6, seed=i, temperature=float(i % 3 > 0), logprobs=2) for i in range(4)]
        right, scores, embedded = whole.generate(prompts, params), whole.score(prompts[2:]), whole.embed(prompts[3])
    with open_ranks(replace(config, tensor_parallel=size), kernels=plain_kernels()) as engine:
        assert engine.parts.code == "cuda"
        assert_same(engine.generate(prompts, params), right)
        for one, other in zip(engine.score(prompts[2:]), scores, strict=True):
            assert one == pytest.approx(other, abs=TOLERANCE)
        assert engine.embed(prompts[3]) == pytest.approx(embedded, abs=TOLERANCE)


@pytest.mark.parametrize(("lookahead", "options"), [(1, {}), (16, TIGHT)])
def test_every_kind_of_request_is_the_undivided_one(lookahead: int, options: dict[str, Any], tiny: Path) -> None:
    config = config_of(tiny, lookahead=lookahead, **options)
    with open_cuda(tiny, config) as whole:
        right, _ = run_all(whole, KINDS)
    with open_ranks(replace(config, tensor_parallel=2), kernels=plain_kernels()) as engine:
        mine, stats = run_all(engine, KINDS)
    assert_same(mine, right)
    assert any(step.num_sampled > step.num_rows for step in stats) == (lookahead > 1)


def test_deterministic_bits_depend_neither_on_the_batch_nor_on_chunks_nor_on_windows(tmp_path: Path) -> None:
    """Four ranks, whose sums an all-reduce adds in an order that depends on a value's place in the message."""
    write_model("gemma2", tmp_path)
    prompts = [[index * 7 % 160] * (40 + index) for index in range(7)]

    def bits(engine: InferenceEngine, some: list[list[int]]) -> list[Any]:
        params = [replace(LONG, seed=len(prompt), max_tokens=12, logprobs=2) for prompt in some]
        found = engine.generate(some, params)
        return [(one.completion_tokens, one.logprobs, one.top_logprobs) for one in found]

    config = config_of(tmp_path, tensor_parallel=4, deterministic=True)
    with open_ranks(replace(config, lookahead=1), kernels=plain_kernels()) as engine:
        alone = [bits(engine, [prompt])[0] for prompt in prompts]
    with open_ranks(replace(config, lookahead=5, max_tokens_per_batch=33), kernels=plain_kernels()) as engine:
        assert bits(engine, prompts) == alone
