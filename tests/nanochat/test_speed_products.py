"""What benchmarks/nanochat_parity/speed.py prints at its end: operations of a call's matrix products."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.nanochat_parity import speed
from benchmarks.nanochat_parity.peak import product_flops
from nano_inference.nanochat import GPT, Engine
from tests.nanochat.tiny import model_config, state_dict

SIZE, LAYERS, ROWS = 64, 4, 320  # of the tiny model; the padded vocabulary


@pytest.mark.parametrize(("prompt", "tokens"), [(10, [1]), (10, [2]), (7, [5, 5, 5]), (10, [5, 2])])
def test_products_are_counted_for_each_position_that_is_computed(prompt: int, tokens: list[int]) -> None:
    config = model_config("G0", n_kv_head=4)
    model = GPT.from_state_dict(state_dict("G0", config), config)
    decoded = sum(tokens) - len(tokens)
    expected = 2 * ((prompt + decoded) * LAYERS * 12 * SIZE**2 + (1 + decoded) * SIZE * ROWS)
    assert product_flops(model, prompt, tokens) == expected


def test_each_pair_of_the_speed_table_has_a_new_prompt() -> None:
    """An engine that has seen a prompt would be measured with its prefix cached, except in the rows `cached`."""
    config = model_config("G4", vocab_size=speed.VOCAB)
    model = GPT.from_state_dict(state_dict("G4", config), config)
    seen: dict[str, list[tuple[int, ...]]] = {"upstream": [], "ours": []}

    class Watched(Engine):
        def generate(self, tokens: list[int], *arguments: Any, **named: Any) -> Iterator[Any]:
            seen[self.name].append(tuple(tokens))
            return super().generate(tokens, *arguments, **named)

        name = "ours"

    sides = {name: Watched(model, speed.Ids()) for name in seen}
    for name, engine in sides.items():
        engine.name = name
    wish = argparse.Namespace(repeat=2, prompt=5, tokens=3)
    speed.compared(sides, 2, 50, wish, cached=False)
    assert seen["ours"] == seen["upstream"] and len(set(seen["ours"])) == 3
    row = speed.compared(sides, 1, 50, wish, cached=True)
    assert row["cached"] and len(seen["ours"]) == 9 and len(set(seen["ours"])) == 6
