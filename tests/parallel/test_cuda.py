"""Ranks on the CUDA executor, with plain kernels on CPU tensors: against one process with the same kernels."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nano_inference import SamplingParams
from tests.cuda.engines import open_cuda
from tests.cuda.plain import plain_kernels
from tests.parallel.ranks import open_ranks
from tests.parallel.test_engine import assert_same, config_of, divisions, write_model

pytestmark = pytest.mark.slow


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
    with open_ranks(config_of(tmp_path, tensor_parallel=size, lookahead=4), kernels=plain_kernels()) as engine:
        assert engine.parts.code == "cuda"
        assert_same(engine.generate(prompts, params), right)
        for one, other in zip(engine.score(prompts[2:]), scores, strict=True):
            assert one == pytest.approx(other, abs=2e-5)
        assert engine.embed(prompts[3]) == pytest.approx(embedded, abs=2e-5)
