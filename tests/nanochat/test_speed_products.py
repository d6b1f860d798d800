"""What benchmarks/nanochat_parity/speed.py prints at its end: operations of a call's matrix products."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.nanochat_parity import speed
from benchmarks.nanochat_parity.peak import compared_with_products, product_flops
from nano_inference.nanochat import GPT, Engine
from tests.nanochat.tiny import model_config, state_dict

SIZE, LAYERS, ROWS = 64, 4, 320
"""Of the tiny model, the padded vocabulary last."""


@pytest.mark.parametrize(("prompt", "samples", "tokens"), [(10, 1, 1), (10, 1, 2), (7, 3, 5)])
def test_products_are_counted_for_each_position_that_is_computed(prompt: int, samples: int, tokens: int) -> None:
    config = model_config("G0", n_kv_head=4)
    model = GPT.from_state_dict(state_dict("G0", config), config)
    positions = prompt + samples * (tokens - 1)
    heads = 1 + samples * (tokens - 1)
    expected = 2 * (positions * LAYERS * 12 * SIZE**2 + heads * SIZE * ROWS)
    assert product_flops(model, prompt, [tokens] * samples) == expected


def test_products_after_the_end_of_a_row_or_of_a_cached_prompt_are_not_counted() -> None:
    config = model_config("G0", n_kv_head=4)
    model = GPT.from_state_dict(state_dict("G0", config), config)
    whole, ended, cached = (product_flops(model, *case) for case in ((10, [5, 5]), (10, [5, 2]), (1, [5, 5])))
    position, head = LAYERS * 12 * SIZE**2, SIZE * ROWS
    assert whole - ended == 2 * 3 * (position + head) and whole - cached == 2 * 9 * position


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


def test_call_is_compared_with_its_products_at_the_peak() -> None:
    row = {"depth": 12, "samples": 64, "top_k": 0, "cached": False, "upstream": 6.0, "ours": 3.0, "ratio": 2.0}
    assert compared_with_products(row | {"flops": 200 * 10**9}, 100e9) == (
        "d12 n=64 top-k –: 200.0 GFLOP; products alone at peak would take 2.000 s, which is 3.00x; "
        "measured 2.00x, 67% of the peak over the whole call"
    )
