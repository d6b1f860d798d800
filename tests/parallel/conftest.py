"""The model that divided engines share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.families import make_model


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    make_model("llama-ratio1-untied", directory)
    return directory
