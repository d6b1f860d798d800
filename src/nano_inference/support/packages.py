"""The packages that only some features need, and the error if one is not installed.

The engine runs a model from a Hugging Face directory with only torch, numpy, safetensors and tokenizers. A module that
imports one of `PACKAGES` is imported where its feature is used, inside `needed`. docs/dependencies.md lists them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from nano_inference.support.errors import ModelError

PACKAGES: Mapping[str, str] = {
    "cyclopts": "cyclopts",
    "gguf": "gguf",
    "h11": "h11",
    "httpx2": "httpx2",
    "huggingface_hub": "huggingface-hub",
    "markdown_it": "rich",
    "prometheus_client": "prometheus-client",
    "prompt_toolkit": "prompt-toolkit",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic",
    "regex": "regex",
    "rich": "rich",
    "starlette": "starlette",
    "tiktoken": "tiktoken",
    "uvicorn": "uvicorn",
}
"""Maps top-level modules to the names of their packages for pip."""


class MissingPackage(ModelError, ImportError):
    """A package that a feature needs is not installed. The message names the feature, the package and pip's command."""


@contextmanager
def needed(feature: str) -> Iterator[None]:
    """Raise `MissingPackage` if an import in the block does not find one of `PACKAGES`; its message starts with
    `feature`."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = PACKAGES.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        raise MissingPackage(f"{feature} needs the package {package}: pip install {package}") from error


def ray_address() -> str:
    """Return the Ray cluster that Ray's own variable RAY_ADDRESS names, else "local": a new one for this process."""
    return os.environ.get("RAY_ADDRESS") or "local"
