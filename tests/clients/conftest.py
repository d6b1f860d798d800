"""One tiny model, and one server of it for all clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.process import Served, serving


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte tokenizer, as Transformers saves one."""
    from tests.server.tiny import make_tiny  # needs Transformers

    return make_tiny(tmp_path_factory.mktemp("tiny_for_clients"))


@pytest.fixture(scope="session")
def tiny_server(tiny_directory: Path) -> Iterator[Served]:
    """A server of the tiny model, called tiny."""
    options = ("--served-model-name", "tiny", "--kv-cache-bytes", "67108864", "--num-threads", "1", "--device", "cpu")
    with serving(tiny_directory, *options) as served:
        yield served
