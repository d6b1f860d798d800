"""Fixtures: the tiny model, and a running server per module for tests that do not change its state."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from nano_inference import EngineConfig, InferenceEngine
from tests.server.tiny import Running, make_tiny, running


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run asynchronous tests on an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny_served"))


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    """A running server, shared by a module's tests."""
    with running(tiny_directory) as one:
        yield one


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[InferenceEngine]:
    """The tiny model in this process."""
    config = EngineConfig(model_path=str(tiny_directory), kv_cache_bytes=8 << 20, device="cpu", num_threads=1)
    with InferenceEngine(config) as one:
        yield one
