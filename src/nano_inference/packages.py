"""Imports of packages that only some features need, and the error when one is not installed.

With torch, numpy, safetensors and tokenizers alone, the engine runs on a Hugging Face directory. A module that imports
one of `PACKAGES` is imported where its feature is used, inside `needed`. docs/dependencies.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from nano_inference.types import ModelError

PACKAGES: Mapping[str, str] = MappingProxyType(
    {
        "cyclopts": "cyclopts",
        "gguf": "gguf",
        "h11": "h11",
        "httpx2": "httpx2",
        "huggingface_hub": "huggingface-hub",
        "markdown_it": "rich",
        "minijinja": "minijinja",
        "prometheus_client": "prometheus-client",
        "prompt_toolkit": "prompt-toolkit",
        "pydantic": "pydantic",
        "pydantic_core": "pydantic",
        "rich": "rich",
        "starlette": "starlette",
        "tiktoken": "tiktoken",
        "uvicorn": "uvicorn",
    }
)
"""Maps each top-level module that a feature imports to the package that pip installs."""


class MissingPackage(ModelError, ImportError):
    """A package that a feature needs is not installed. One line: the feature, the package, the command for pip."""


@contextmanager
def needed(feature: str) -> Iterator[None]:
    """Raise `MissingPackage` if an import in the block does not find one of `PACKAGES`; `feature` begins the line."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = PACKAGES.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        raise MissingPackage(f"{feature} needs the package {package}: pip install {package}") from error
