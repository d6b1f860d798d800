"""One tiny model for the server's tests, and one running server for those that change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.tiny import Running, make_tiny, running


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's directory."""
    return make_tiny(tmp_path_factory.mktemp("tiny_served"))


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    """A running server, one for a file of tests."""
    with running(tiny_directory) as one:
        yield one
