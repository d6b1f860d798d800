"""Runs the cases with this package, and compares the results with upstream's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.nanochat_parity import cases
from benchmarks.nanochat_parity.commits import Conditions
from nano_inference.config import EngineConfig, KernelsName
from nano_inference.nanochat import GPT, Engine
from nano_inference.nanochat.format import open_tensors

TOLERANCE = 2e-5
"""Of float32 logits, whose size is up to 15."""


class Finding(NamedTuple):
    """Results of one kind of case: rows that are equal, of all rows that upstream's commit can run."""

    equal: int = 0
    total: int = 0

    def plus(self, equal: int, total: int) -> Finding:
        """Return the sum."""
        return Finding(self.equal + equal, self.total + total)

    def __str__(self) -> str:
        return f"{self.equal}/{self.total}" if self.total else "–"


class Comparison(NamedTuple):
    """This package beside one commit of upstream."""

    generation: str
    overrides: tuple[str, ...]
    """Constants that the weights do not show."""
    logits: float
    """Largest difference."""
    found: Mapping[str, Finding]
    """Kind of case -> rows with equal tokens and masks; `batch`: equal results of `generate_batch`."""
    calls: int
    """Results that upstream's calculator inserted."""
    forced: int
    """Tokens of these results."""

    @property
    def is_equal(self) -> bool:
        """True if everything agrees."""
        return self.logits <= TOLERANCE and all(one.equal == one.total for one in self.found.values())


def compare(
    recorded: Mapping[str, Any], conditions: Conditions, chosen: Sequence[cases.Case], *, kernels: KernelsName = "auto"
) -> Comparison:
    """Run the chosen ones of the recorded cases on the weights of a recording (`upstream.py`); return what is equal.

    Raises `ModelError` for weights that this package does not load.
    """
    shapes = recorded["shapes"]
    windows = {"window_pattern": cases.WINDOWS} if "resid_lambdas" in shapes else {}
    overrides = conditions.overrides
    if cases.has_bigrams(shapes):
        overrides = tuple(one for one in overrides if not one.startswith("decode_window="))
    opened = open_tensors(cases.weights(shapes), {**cases.CONFIG, **windows}, overrides)
    model = GPT.of(opened)
    config = EngineConfig(model_path="nanochat", max_model_len=2**31 - 1, num_threads=1, kernels=kernels)
    logits_TV = model.forward(torch.tensor([cases.scored()]))[0, -cases.LAST :].double()
    expected_TV = torch.tensor(recorded["logits"], dtype=torch.float64)
    engine = Engine(model, cases.Tokenizer(), config=config)
    all_cases = cases.cases_of(is_first_shared=conditions.is_first_shared)
    pairs = [pair for pair in zip(all_cases, recorded["cases"], strict=True) if pair[0] in chosen]
    own = cases.results(model, engine, shapes, [case for case, _ in pairs])
    found: dict[str, Finding] = {}
    for ours, (_, theirs) in zip(own, pairs, strict=True):
        rows = [[*map(list, row)] for row in ours["rows"]]
        equal = [a == b for a, b in zip(rows, theirs["rows"], strict=True)]
        found[ours["kind"]] = found.get(ours["kind"], Finding()).plus(sum(equal), len(equal))
        if "batch" in theirs:
            found["batch"] = found.get("batch", Finding()).plus(ours["batch"] == theirs["batch"], 1)
    masks = [mask for one in recorded["cases"] for _, mask in one["rows"]]
    return Comparison(
        overrides=overrides,
        generation=str(opened.inferred.values["generation"].value) if opened.inferred else "",
        logits=float((logits_TV - expected_TV).abs().max()),
        found=found,
        calls=sum(map(forced_runs, masks)),
        forced=sum(mask.count(0) for mask in masks),
    )


def forced_runs(mask: Sequence[int]) -> int:
    """Return the number of runs of zeros."""
    return sum(one == 0 and before == 1 for before, one in zip([1, *mask], mask, strict=False))
