"""Runs the cases with upstream's own code: `python upstream.py CHECKOUT` prints JSON as its last line.

A second argument `first-shared` leaves out cases whose samples draw several first tokens.
Packages that upstream imports for training or for its tokenizer, and that this machine may lack, are replaced by empty
modules: no case calls them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import cases

REPLACED = (
    *("rustbpe", "tiktoken", "tokenizers", "wandb", "kernels"),
    *("filelock", "psutil", "datasets", "huggingface_hub"),
)


class Anything(types.ModuleType):
    """A module in which every name is a class without behaviour."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Uncached:
    """Upstream's model for its engine, computing the whole sequence for each token instead of using the cache."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self._ids_BT = torch.empty(0, 0, dtype=torch.long)

    def get_device(self) -> torch.device:
        device: torch.device = self.model.get_device()
        return device

    def forward(self, ids_BT: Tensor, kv_cache: object) -> Tensor:
        """Return the last token's logits, (B, 1, V). More than one token is a new prompt."""
        is_prompt = ids_BT.size(1) > 1
        self._ids_BT = ids_BT if is_prompt else torch.cat((self._ids_BT.expand(ids_BT.size(0), -1), ids_BT), dim=1)
        logits_BTV: Tensor = self.model.forward(self._ids_BT)
        return logits_BTV[:, -1:]


def model_of(gpt: Any) -> Any:
    """Return upstream's model with the weights of `cases`."""
    known = inspect.signature(gpt.GPTConfig).parameters
    windows = {"window_pattern": cases.WINDOWS} if "window_pattern" in known else {}
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(**cases.CONFIG, **windows))
    model.init_weights()
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    model.load_state_dict(cases.weights(shapes), strict=True, assign=True)
    return model.eval()


def imported(checkout: Path) -> tuple[Any, Any]:
    """Import upstream's modules `gpt` and `engine` from a working tree."""
    sys.path.insert(0, str(checkout))
    for name in REPLACED:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = Anything(name)
    return importlib.import_module("nanochat.gpt"), importlib.import_module("nanochat.engine")


def main() -> None:
    torch.set_num_threads(1)
    gpt, engine = imported(Path(sys.argv[1]))
    model = model_of(gpt)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    with torch.inference_mode():
        logits_TV = model.forward(torch.tensor([cases.scored()]))[0]
    sampler = engine.Engine(Uncached(model) if cases.has_bigrams(shapes) else model, cases.Tokenizer())
    chosen = cases.cases_of(is_first_shared="first-shared" in sys.argv[2:])
    found = {
        "shapes": shapes,
        "logits": [[round(value, 7) for value in row] for row in logits_TV[-cases.LAST :].tolist()],
        "cases": cases.results(model, sampler, shapes, chosen),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
