"""More servers for those clients that hold answers to schemas: `pytest_plugins` of a test file names this module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.process import Served, serving

ROOM = 16384
"""Tokens, which are bytes: smolagents' prompt alone has 4000."""


@pytest.fixture(scope="session")
def roomy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the tiny random model with room for schemas, called tiny."""
    pytest.importorskip("llguidance", reason="the extra `grammar`")
    from tests.server.tiny import make_tiny  # needs Transformers

    directory = make_tiny(tmp_path_factory.mktemp("roomy_for_clients"), ROOM)
    options = ("--served-model-name", "tiny", "--max-model-len", str(ROOM), "--kv-cache-bytes", "67108864")
    with serving(directory, *options, "--num-threads", "1", "--device", "cpu") as served:
        yield served


@pytest.fixture(scope="session")
def default_server(default_model_path: Path) -> Iterator[Served]:
    """A server of the default model, called default: a template without tools, tokens of several letters."""
    pytest.importorskip("llguidance", reason="the extra `grammar`")
    with serving(default_model_path, "--served-model-name", "default", "--device", "cpu") as served:
        yield served
