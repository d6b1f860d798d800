"""Models that cannot be divided: the message names the cause and the sizes that are possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nano_inference import InferenceEngine
from tests.models.families import make_model
from tests.models.hybrids import make_hybrid
from tests.parallel.test_engine import config_of

FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "3 does not divide the 4 attention heads; possible: 2, 4"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 96},
            2,
            "2 neither divides the 3 key/value heads nor is a multiple of them; possible: 3",
        ),
        ({"intermediate_size": 90}, 4, "4 does not divide the 90 inner units of the MLP; possible: 2"),
        ({"intermediate_size": 81}, 2, "2 does not divide the 81 inner units of the MLP; this model cannot be divided"),
        ({"vocab_size": 24}, 4, "4 is too many for a vocabulary of 24; possible: 2"),
    ],
    ids=["heads", "kv heads", "mlp", "odd mlp", "vocabulary"],
)
def test_indivisible_model_is_refused_by_what_size_does_not_divide(
    changes: dict[str, Any], size: int, message: str, tmp_path: Path
) -> None:
    make_model("llama-ratio1-untied", tmp_path, FOUR_HEADS | changes)
    with pytest.raises(ValueError, match=f"^tensor_parallel: {message}$"):
        InferenceEngine(config_of(tmp_path, tensor_parallel=size))


def test_linear_attention_is_divided_by_whole_key_heads(tmp_path: Path) -> None:
    make_hybrid("plain", tmp_path)
    with pytest.raises(ValueError, match="4 does not divide the 2 key heads of linear attention; possible: 2"):
        InferenceEngine(config_of(tmp_path, tensor_parallel=4))
