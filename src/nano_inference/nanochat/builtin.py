"""The packaged model: an entry point of `nano_inference.models`. No torch."""

from __future__ import annotations

from pathlib import Path

from nano_inference.loading.catalog import BuiltinModel

CALCULATOR = BuiltinModel(
    name="calculator",
    directory=Path(__file__).parent / "data" / "calculator",
    sampling={"temperature": 0},
)
"""A nanochat model of 3.6 MB that calls the calculator (examples/train_calculator.py)."""
