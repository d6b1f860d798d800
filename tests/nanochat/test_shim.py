"""docs/nanochat.md's shims in an upstream checkout: stand-ins for its scripts run on them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nano_inference.nanochat import GPT, Engine, get_tokenizer, load_model
from tests.nanochat.stand_in import IMPORTS, RUN
from tests.nanochat.talkative import Foreign
from tests.nanochat.tiny import model_config, state_dict, write_checkpoint, write_tokenizer

ROOT = Path(__file__).parents[2]
SHIM = re.compile(r"```python\n(# nanochat/(\w+)\.py\n(?:.*\n)+?)```")
FULL_MODULE = """
from nano_inference.nanochat.{name} import *
"""
UPSTREAMS_MANAGER = """
from tests.nanochat.tiny import model_config, state_dict
from tests.nanochat.talkative import Foreign
from nano_inference.nanochat import GPT, get_tokenizer
class Theirs(Foreign):
    def __call__(self, ids): return self.forward(ids)
    def state_dict(self): return self.model.state_dict()
def load_model(source, device, phase, model_tag=None, step=None):
    config = model_config("G4")
    return Theirs(GPT.from_state_dict(state_dict("G4", config), config)), get_tokenizer(), {"model_config": config}
def save_checkpoint(*arguments): pass
"""
"""Replaces upstream's own module, whose models are not this package's."""


def shims() -> dict[str, str]:
    """Return the shims of the page: module -> its text."""
    return {name: text for text, name in SHIM.findall((ROOT / "docs" / "nanochat.md").read_text(encoding="utf-8"))}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "base" / "tokenizer")
    config = model_config("G4")
    for name in ("base_checkpoints", "chatsft_checkpoints"):
        write_checkpoint(tmp_path / "base" / name / "d4", "G4", config=config, state=state_dict("G4", config))
    return tmp_path / "base"


def printed(base: Path, modules: dict[str, str], *arguments: str) -> str:
    """Return what a Python process prints with a package `nanochat` of these modules."""
    package = base.parent / "checkout" / "nanochat"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", **modules}.items():
        (package / f"{name}.py").write_text(text)
    paths = os.pathsep.join([str(package.parent), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "NANOCHAT_BASE_DIR": str(base), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, cwd=base, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run(base: Path, modules: dict[str, str], *scripts: str) -> Any:
    """Return the results of stand-ins."""
    out = printed(base, modules, "-m", "tests.nanochat.stand_in", *scripts)
    return json.loads(out.splitlines()[-1].rpartition("\r")[2].removeprefix("0/1"))


def test_page_shows_a_few_lines_for_each_module() -> None:
    assert {"engine", "checkpoint_manager"} <= shims().keys()
    assert all(len(text.splitlines()) <= 7 for text in shims().values())


def test_engine_module_compares_itself_with_the_naive_loop(base: Path) -> None:
    """`python -m nanochat.engine`, as upstream's."""
    out = printed(base, {"engine": shims()["engine"]}, "-m", "nanochat.engine")
    assert "Match: True" in out and "chemical formula of water" in out


def test_scripts_run_on_the_package_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: FULL_MODULE.format(name=name) for name in ("common", "tokenizer", "gpt")} | shims()
    found = run(base, modules, *RUN)
    assert found["infer_bench"] == {
        "step": 650,
        "depth": [4, 64, 4, 2, 256],
        "weights": 966984,
        "bytes": [1024, 73728],
        "flops": [475280, 27829248],
        "peaks": [989e12, 3.35e12],
        "steps": 4,
    }
    assert found["chat_rl"]["lengths"] == found["chat_rl"]["masks"] and len(found["chat_rl"]["lengths"]) == 3
    assert found["chat_eval"]["shape"][::2] == [2, 265]
    assert {name for one in IMPORTS["tests"].values() for name in one} == set(found["tests"])
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base))
    model, tokenizer, _ = load_model("rl", "cpu", "eval")  # the one that chat_rl's stand-in saved
    prompt = [256, 257, *b"hello", 258, 259]
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 0.6, "top_k": 50}
    expected = [column[0] for column, _ in Engine(model, tokenizer).generate(prompt, **options)]
    assert found["chat_cli"]["tokens"] == found["chat_web"]["tokens"] == expected


def test_scripts_run_with_upstreams_model(base: Path) -> None:
    """Only engine.py is replaced: the model is not this package's, and runs in upstream's loop."""
    modules = {"common": FULL_MODULE.format(name="common"), "checkpoint_manager": UPSTREAMS_MANAGER}
    found = run(base, modules | {"engine": shims()["engine"]}, "chat_cli", "chat_eval", "chat_rl")
    config = model_config("G4")
    model = Foreign(GPT.from_state_dict(state_dict("G4", config), config))
    engine = Engine(model, get_tokenizer(base / "tokenizer"))
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 0.6, "top_k": 50}
    expected = [column[0] for column, _ in engine.generate([256, 257, *b"hello", 258, 259], **options)]
    assert found["chat_cli"]["tokens"] == expected
    assert found["chat_rl"]["lengths"] == found["chat_rl"]["masks"]
