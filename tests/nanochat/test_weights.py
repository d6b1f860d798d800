"""Weight updates of a nanochat model on the core engine, with nanochat's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, WeightError, weights_checksum
from nano_inference.models.ops import Embed, Linear, Norm, WeightSpec
from nano_inference.models.program import Program
from nano_inference.nanochat import GPT
from tests.nanochat.tiny import GENERATIONS, model_config, state_dict, write_checkpoint, write_tokenizer

pytestmark = pytest.mark.slow

PROMPT = [256, *range(40, 90)]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_update_changes_all_weights(tmp_path: Path, generation: str) -> None:
    path = write_checkpoint(write_tokenizer(tmp_path), generation)
    config = model_config(generation)
    new = state_dict(generation, config, seed=5)
    overrides = ("generation=G2s",) if generation == "G2s" else ()
    with InferenceEngine(EngineConfig(model_path=str(path), overrides=overrides)) as engine:
        before = engine.score(PROMPT)
        with pytest.raises(WeightError, match=r"lacks 1 tensors: lm_head\.weight"):
            engine.update_weights({name: one for name, one in new.items() if "head" not in name}, blocking=True)
        assert engine.score(PROMPT) == before
        engine.update_weights(new)
        engine.finish_update()
        after = engine.score(PROMPT)
        assert engine.weights_checksum() == weights_checksum(new.items())
        logits = GPT.from_state_dict(new, config, overrides=overrides).forward(torch.tensor([PROMPT]))[0]
        expected = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
        assert max(abs(a - b) for a, b in zip(after, expected.tolist(), strict=True)) < 1e-4
        assert max(abs(a - b) for a, b in zip(after, before, strict=True)) > 0.1  # type: ignore[arg-type]


def test_tables_are_the_weights_of_which_single_rows_are_read() -> None:
    config = model_config("G4")
    own = GPT.from_state_dict(state_dict("G4", config), config).model.program
    values = {name for name in state_dict("G4", config) if name.startswith("value_embeds.")}
    assert own.tables == {"transformer.wte.weight", *values} and values
    tied = Program(
        body=(Embed(out="x", table=WeightSpec("table", (8, 4))),),
        final=(Norm(x="x", out="h", weight=None, eps=1e-6),),
        head=(Linear(x="h", out=("logits",), matrices=(WeightSpec("table", (8, 4)),)),),
        vocab_size=8,
        hidden_size=4,
        ropes=(),
    )
    assert not tied.tables, "the head multiplies by it"
