"""A pytest plugin for vLLM's tests without vLLM: its modules are empty, and only tests that start a server are kept."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import types
from collections.abc import Sequence
from importlib import metadata
from typing import Any
from unittest.mock import MagicMock

import pytest
import transformers

VERSION = metadata.version("nano-inference")
_load = transformers.AutoTokenizer.from_pretrained


@functools.cache
def tokenizer() -> Any:
    """Return the tokenizer of the served model, whatever the model that the tests name."""
    return _load(os.environ["NANO_TOKENIZER"], gguf_file=os.environ.get("NANO_TOKENIZER_FILE"))


class Empty(types.ModuleType):
    """A module in which every name is a mock, an exception, or what the tests of a server need."""

    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        """Return the object of a name."""
        if name == "__version__":
            return VERSION
        if name.startswith("__"):
            raise AttributeError(name)
        value = _known(name)
        setattr(self, name, value)
        return value


def _known(name: str) -> Any:
    if name == "get_tokenizer":
        return lambda *_, **__: tokenizer()
    if name == "download_weights_from_hf":
        return lambda model, **_: model
    if name == "current_platform":
        no = types.SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: False, is_xpu=lambda: False)
        return types.SimpleNamespace(**vars(no), is_cpu=lambda: True, is_tpu=lambda: False)
    if name == "envs":
        return types.SimpleNamespace(VLLM_USE_RUST_FRONTEND=False)
    if name.endswith(("Error", "Exception")):
        return type(name, (Exception,), {})
    mock = MagicMock(name=name)
    if name == "ModelConfig":
        mock.return_value.get_vocab_size.return_value = len(tokenizer())
    return mock


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `import vllm.ANYTHING` an empty module."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return a specification for vLLM's modules and those of pooling that its tests import."""
        if name.partition(".")[0] in ("vllm", "mteb"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the module."""
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


def pytest_configure() -> None:
    """Replace vLLM and the loading of tokenizers."""
    sys.meta_path.insert(0, Finder())
    transformers.AutoTokenizer.from_pretrained = staticmethod(lambda *_, **__: tokenizer())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that use a server, without mocks and adapters."""
    kept = [item for item in items if isinstance(item, pytest.Function) and _is_kept(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _is_kept(item: pytest.Function) -> bool:
    source = inspect.getsource(item.function)
    uses = "RemoteOpenAIServer(" in source or any("server" in one or "client" in one for one in item.fixturenames)
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return uses and "mock" not in source.lower() and not any("lora" in str(one).lower() for one in params)


@pytest.fixture(scope="session")
def local_asset_server() -> None:
    """No pictures are served."""


@pytest.fixture(scope="session")
def qwen3_lora_files() -> str:
    """No adapters are served."""
    return "/none"
