"""docs/nanochat.md's shims in an upstream checkout: stand-ins for its scripts run on them."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.nanochat import GPT, Engine, get_tokenizer, load_model
from tests.nanochat.stand_in import RUN
from tests.nanochat.talkative import Foreign
from tests.nanochat.tiny import model_config, state_dict, write_checkpoint, write_tokenizer

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "nanochat.md"
SHIM = re.compile(r"```python\n(# nanochat/(\w+)\.py\n(?:.*\n)+?)```")
SHIMS = {name: text for text, name in SHIM.findall(PAGE.read_text(encoding="utf-8"))}
FULL_MODULE = "from nano_inference.nanochat.{name} import *\n"
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
OPTIONS: dict[str, Any] = {"max_tokens": 16, "temperature": 0.6, "top_k": 50}
HELLO = [256, 257, *b"hello", 258, 259]
Checkout = Callable[[dict[str, str]], Path]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """Write a package `nanochat` of modules that can be imported, and a base directory; return the latter."""
    base = tmp_path / "base"
    write_tokenizer(base / "tokenizer")
    for name in ("base_checkpoints", "chatsft_checkpoints"):
        write_checkpoint(base / name / "d4", "G4")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # `compute_init` seeds the whole process
    for name in [name for name in sys.modules if name.partition(".")[0] == "nanochat"]:
        monkeypatch.delitem(sys.modules, name)

    def write(modules: dict[str, str]) -> Path:
        package = tmp_path / "checkout" / "nanochat"
        package.mkdir(parents=True)
        for name, text in {"__init__": "", **modules}.items():
            (package / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, f"nanochat.{name}", raising=False)
        monkeypatch.syspath_prepend(str(package.parent))
        return base

    return write


def test_engine_module_compares_itself_with_the_naive_loop(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m nanochat.engine`, as upstream's."""
    checkout({"engine": SHIMS["engine"]})
    runpy.run_module("nanochat.engine", run_name="__main__")
    out = capsys.readouterr().out
    assert "Match: True" in out and "chemical formula of water" in out


def test_scripts_run_on_the_package_alone(checkout: Checkout) -> None:
    checkout({name: FULL_MODULE.format(name=name) for name in ("common", "tokenizer", "gpt")} | SHIMS)
    found = {name: run() for name, run in RUN.items()}
    assert found["infer_bench"] == {
        "step": 650,
        "depth": [4, 64, 4, 2, 256],
        "weights": 966984,
        "bytes": [1024, 73728],
        "flops": [475280, 27829248],
        "peaks": [989e12, 3.35e12],
        "steps": 4,
    }
    assert found["chat_rl"][0] == found["chat_rl"][1] and len(found["chat_rl"][0]) == 3
    assert found["chat_eval"][::2] == [2, 265]
    model, tokenizer, _ = load_model("rl", "cpu", "eval")  # the one that chat_rl's stand-in saved
    assert found["chat_cli"] == [column[0] for column, _ in Engine(model, tokenizer).generate(HELLO, **OPTIONS)]


def test_scripts_run_with_upstreams_model(checkout: Checkout) -> None:
    """Only engine.py is replaced: the model is not this package's, and runs in upstream's loop."""
    modules = {"common": FULL_MODULE.format(name="common"), "checkpoint_manager": UPSTREAMS_MANAGER}
    base = checkout(modules | {"engine": SHIMS["engine"]})
    found = {name: RUN[name]() for name in ("chat_cli", "chat_eval", "chat_rl")}
    config = model_config("G4")
    model = Foreign(GPT.from_state_dict(state_dict("G4", config), config))
    engine = Engine(model, get_tokenizer(base / "tokenizer"))
    assert found["chat_cli"] == [column[0] for column, _ in engine.generate(HELLO, **OPTIONS)]
    assert found["chat_rl"][0] == found["chat_rl"][1]
