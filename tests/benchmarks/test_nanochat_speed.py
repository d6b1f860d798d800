"""benchmarks/nanochat_parity/speed.py: both engines of a pair get the same prompt, which is new in each pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.nanochat_parity import speed
from nano_inference.nanochat import GPT, Engine
from tests.nanochat.tiny import model_config, state_dict


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
    speed.compared(sides, 2, 50, 2, cached=False)
    assert seen["ours"] == seen["upstream"] and len(set(seen["ours"])) == 3
    row = speed.compared(sides, 1, 50, 2, cached=True)
    assert row["cached"] and len(seen["ours"]) == 9 and len(set(seen["ours"])) == 6
