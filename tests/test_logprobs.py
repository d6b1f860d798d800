"""Log-probabilities against float64 on large vocabularies, and who may compute a log-sum-exp at all."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nano_inference
from nano_inference import sample_with_logprobs
from nano_inference.core.step import Row
from nano_inference.executors.logprobs import Normaliser, normalise
from nano_inference.types import LogprobsMode, SamplingParams
from tests.draws import draw
from tests.logit_shapes import SHAPES, shaped

HOME = Path(nano_inference.__file__).parent
VOCAB = 262_144


def exact(logits_BV: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities in float64; a temperature is a float32."""
    divisor = torch.tensor(temperature or 1.0).double()
    return ((logits_BV.double() - logits_BV.double().amax(-1, keepdim=True)) / divisor).log_softmax(-1)


def allowed(logprob: float) -> float:
    """1e-6, or an ulp where that is more."""
    return max(1e-6, math.ulp(logprob) * 2**29)


def row(number: int, mode: LogprobsMode, **params: Any) -> Row:
    return Row(id=number, tokens=(1,), prev_token=-1, start=5, blocks=(0,), num_sampled=1, logprobs_mode=mode,
               seed=number, sample_index=0, params=SamplingParams(**params))  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_sampled_logprobs_are_unbiased_over_a_large_vocabulary(name: str, temperature: float) -> None:
    logits_BV = shaped(name, 8, VOCAB)
    uniforms_B = torch.linspace(0.05, 0.95, 8, dtype=torch.float64)
    token_B, logprob_B = sample_with_logprobs(logits_BV, torch.full((8,), temperature), uniforms_B=uniforms_B)
    expected_B = exact(logits_BV, temperature).gather(-1, token_B[:, None])[:, 0]
    assert torch.equal(logprob_B, expected_B.float()), "float64, rounded once"


@pytest.mark.parametrize("name", ["normal", "flat with a peak"])
@pytest.mark.parametrize("mode", ["raw", "tempered", "processed"])
def test_every_reported_logprob_is_accurate_over_a_large_vocabulary(mode: LogprobsMode, name: str) -> None:
    """Drawn tokens, the likeliest ones and raw log-probabilities, with a truncation, under each mode."""
    logits_BV = shaped(name, 4, VOCAB)
    top_k = VOCAB // 2
    rows = [row(i, mode, temperature=0.7, top_k=top_k, logprobs=3, raw_logprobs=True) for i in range(4)]
    drawn = draw(logits_BV.clone(), rows)
    for i, logit_V in enumerate(logits_BV):
        raw_V, tempered_V = exact(logit_V), exact(logit_V, 0.7)
        processed_V = tempered_V - tempered_V.topk(top_k).values.logsumexp(-1)
        expected_V = {"raw": raw_V, "tempered": tempered_V, "processed": processed_V}[mode]
        reported = [(drawn.tokens[i], drawn.logprobs[i]), *((top.token, top.logprob) for top in drawn.top_logprobs[i])]
        assert len(reported) == 4
        for token, logprob in reported:
            assert abs(logprob - float(expected_V[token])) <= allowed(logprob)
        raw = drawn.extras[i].raw_logprob
        assert raw is not None and abs(raw - float(raw_V[drawn.tokens[i]])) <= allowed(raw)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("vocab_size", [5, 512, 1300, 49_157, VOCAB])
def test_normaliser_does_not_depend_on_batch_or_threads(vocab_size: int, threads: int) -> None:
    logits_BV = shaped("normal", 7, vocab_size)
    temperatures = [0.0, 0.3, 1.0, 1.0, 1.7, 0.01, 1e-40]
    together = normalise(logits_BV, temperatures)
    exact_B = torch.stack([exact(logits_BV[i], t)[logits_BV[i].argmax()] for i, t in enumerate(temperatures[:-1])])
    assert float((together.log_mass[:-1, 0] + exact_B).abs().max()) < 1e-13
    for i, temperature in enumerate(temperatures):
        alone = normalise(logits_BV[i : i + 1], [temperature])
        assert all(torch.equal(part[i : i + 1], own) for part, own in zip(together, alone, strict=True))


def test_row_with_nan_has_no_logprobs_and_leaves_others_unaffected() -> None:
    logits_BV = torch.randn(5, 700, generator=torch.Generator().manual_seed(3))
    clean = normalise(logits_BV, [1.0] * 5)
    logits_BV[0, 3], logits_BV[1, 3], logits_BV[2] = math.nan, math.inf, -math.inf
    spoiled: Normaliser = normalise(logits_BV, [1.0] * 5)
    assert spoiled.log_mass[:3].isnan().all()
    assert torch.equal(spoiled.log_mass[3:], clean.log_mass[3:])
    rows = [row(i, "raw", logprobs=2) for i in range(5)]
    drawn = draw(logits_BV, rows)
    assert [len(tops) for tops in drawn.top_logprobs] == [0, 0, 0, 2, 2]
    assert [math.isnan(logprob) for logprob in drawn.logprobs] == [True, True, True, False, False]


# ---- the source


SUMS = {"log_softmax", "logsumexp", "softmax", "softmin", "logaddexp", "cross_entropy", "nll_loss", "log1p"}
NOT_FOR_LOGPROBS = {
    ("executors/torch/attention/sdpa.py", "softmax"),
    ("nanochat/columns.py", "softmax"),  # weights of a draw, upstream's
    ("nanochat/gpt.py", "cross_entropy"),  # upstream's loss
    ("executors/sampling.py", "log_softmax"),  # weights of a draw, whose bits decide tokens
    ("executors/sampling.py", "softmax"),
}
NUMERIC = ("executors/", "models/", "nanochat/")
LOGS = {
    ("executors/logprobs.py", "log_"),
    ("executors/cuda/kernels/sampler.py", "log"),  # in float64; tests/cuda compares it with float64 at 512k logits
    ("executors/cuda/kernels/select.py", "log"),  # of min_p
    ("nanochat/columns.py", "log"),  # of uniform numbers: torch's exponential draws, which upstream uses
}
"""Who takes the logarithm of a tensor."""


def called_names(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id, node


def test_one_function_of_torch_and_one_of_c_compute_log_sum_exps() -> None:
    """`math.log` of one number is no sum; the modules of nanochat's own loop draw and report nothing else."""
    sums, logs = set(), set()
    for path in sorted(HOME.rglob("*.py")):
        name = path.relative_to(HOME).as_posix()
        for called, node in called_names(path):
            if called in SUMS:
                sums.add((name, called))
            if (
                called in ("log", "log_")
                and name.startswith(NUMERIC)
                and not ast.unparse(node.func).startswith("math.")
            ):
                logs.add((name, called))
    assert sums == NOT_FOR_LOGPROBS
    assert logs == LOGS
    in_c = {
        path.name for path in (HOME / "executors/cpu/c").iterdir() if re.search(r"\blog[f12p]*\(", path.read_text())
    }
    assert in_c == {"sample.h"}


def test_sampling_probabilities_are_used_only_for_sampling() -> None:
    tree = ast.parse((HOME / "executors" / "sampling.py").read_text())
    users = {
        function.name: sorted(ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call))
        for function in tree.body
        if isinstance(function, ast.FunctionDef)
    }
    assert {name for name, found in users.items() if "_weights" in found} == {"invert_cdf"}
    assert {name for name, found in users.items() if "torch.log_softmax" in found} == {"_weights"}
