"""What benchmarks/nanochat_parity/speed.py prints at its end: operations of a call's matrix products."""

from __future__ import annotations

import pytest

from benchmarks.nanochat_parity.peak import compared_with_products, product_flops
from nano_inference.nanochat import GPT
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
    assert product_flops(model, prompt, samples, tokens) == expected


def test_call_is_compared_with_its_products_at_the_peak() -> None:
    row = {"depth": 12, "samples": 64, "top_k": 0, "upstream": 6.0, "ours": 3.0, "ratio": 2.0}
    assert compared_with_products(row, 200 * 10**9, 100e9) == (
        "d12 n=64 top-k –: 200.0 GFLOP; products alone at peak would take 2.000 s, which is 3.00x; "
        "measured 2.00x, 67% of the peak over the whole call"
    )
