"""The tiny model and one server of it, shared by all client tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.process import Served, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as slow: they start servers and other programs."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random Llama with a byte tokenizer, saved by Transformers."""
    from tests.server.tiny import make_tiny  # imports Transformers

    return make_tiny(tmp_path_factory.mktemp("tiny_for_clients"))


@pytest.fixture(scope="session")
def tiny_server(tiny_directory: Path) -> Iterator[Served]:
    """A server of the tiny model under the name "tiny"."""
    options = ("--served-model-name", "tiny", "--kv-cache-bytes", "67108864", "--num-threads", "1", "--device", "cpu")
    with serving(tiny_directory, *options) as served:
        yield served
