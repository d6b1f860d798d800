"""Ray Serve that is not installed; with it, see tests/clients/test_ray_serve.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.forking import Forks

pytestmark = pytest.mark.slow

LINE = "Ray Serve is not installed: pip install 'nano-inference[ray]'"
CODE = """
from nano_inference import EngineConfig
from nano_inference.server.ray_serve import application, deployment
from nano_inference.support.packages import MissingPackage
from nano_inference.server.config import ServerConfig
for make in (lambda: deployment(EngineConfig(model_path='m'), ServerConfig()), lambda: application({'model': 'm'})):
    try:
        make()
    except MissingPackage as error:
        print(error)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(["torch"]) as one:
        yield one


@pytest.mark.parametrize("hidden", ["ray", "fastapi"], ids=["no ray", "ray without the packages of serve"])
def test_missing_ray_serve_is_one_line(hidden: str, forks: Forks) -> None:
    if hidden != "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray")
    done = forks.run(CODE, hidden=[hidden])
    assert done.stdout == 2 * f"{LINE}\n", done.stderr
