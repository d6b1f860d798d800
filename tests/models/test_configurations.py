"""Configurations read as Transformers reads them; `benchmarks/reliability/fuzz_configs.py` compares thousands."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.models.configurations import FAMILIES, FULL, SLIDING, VOCAB_SIZE, compared, random_config

SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 3, "pad_token_id": None,
}  # fmt: skip
IGNORED: Mapping[str, Mapping[str, Any]] = {
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "partial_rotary_factor in rope_parameters": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
    "sliding_window_pattern": {"sliding_window_pattern": 3},
    "attn_logit_softcapping": {"attn_logit_softcapping": 0.5},
    "an older name": {"layer_types": ["attention", SLIDING, "attention", SLIDING], "use_sliding_window": True},
}
"""Fields that most families ignore, and that some read."""
REFUSED: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "nested": ("llama", {"rope_parameters": {FULL: {"rope_theta": 100.0}}}, "rope_parameters must not differ"),
    "legacy type": ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type is missing"),
    "truncate": (
        "gemma3_text",
        {"rope_parameters": {SLIDING: {"rope_type": "yarn", "factor": 4.0, "truncate": False}}},
        "truncate is not supported",
    ),
}
"""Forms that Transformers ignores or reads in another way than other programs."""


@pytest.mark.parametrize("case", IGNORED)
@pytest.mark.parametrize("family", FAMILIES)
def test_fields_of_other_families_are_read_as_transformers_reads_them(family: str, case: str) -> None:
    fields = IGNORED[case]
    if family == "gemma3_text" and "rope_parameters" in fields:
        fields = {"rope_parameters": {SLIDING: fields["rope_parameters"]}}
    assert compared({"model_type": family, **SIZES, **fields}, seed=1).result == "equal"


@pytest.mark.parametrize("case", REFUSED)
def test_ambiguous_form_is_refused_by_its_field(case: str) -> None:
    family, fields, message = REFUSED[case]
    outcome = compared({"model_type": family, **SIZES, **fields}, seed=1)
    assert outcome.result == "refused" and message in outcome.about


@pytest.mark.slow
@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_configurations_match_or_are_refused_by_name(family: str, count: int) -> None:
    counts = Counter[str]()
    for index in range(count):
        config = random_config(family, random.Random(f"test {family} {index}"))
        outcome = compared(config, index)
        assert outcome.result != "failed", (outcome, config)
        counts[outcome.result] += 1
    assert counts["equal"] >= count / 3
