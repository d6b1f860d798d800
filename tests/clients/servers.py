"""Further servers for clients that use schemas; a test file loads them with `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.process import Served, serving

CONTEXT = 16384
"""Context in tokens, which are bytes: smolagents' prompt has 4000."""


@pytest.fixture(scope="session")
def roomy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a tiny model with a context long enough for schemas, under the name "tiny"."""
    pytest.importorskip("llguidance", reason="the extra `grammar`")
    from tests.server.tiny import make_tiny  # imports Transformers

    directory = make_tiny(tmp_path_factory.mktemp("long_context"), CONTEXT)
    options = ("--served-model-name", "tiny", "--max-model-len", str(CONTEXT), "--kv-cache-bytes", "67108864")
    with serving(directory, *options, "--num-threads", "1", "--device", "cpu") as served:
        yield served


@pytest.fixture(scope="session")
def default_server(default_model_path: Path) -> Iterator[Served]:
    """A server of the default model under the name "default"; its chat template has no tools."""
    pytest.importorskip("llguidance", reason="the extra `grammar`")
    with serving(default_model_path, "--served-model-name", "default", "--device", "cpu") as served:
        yield served
