"""`Columns` and `sample_next_token`: the draws of `torch.multinomial` over all rows, in any order of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nano_inference.nanochat import sample_next_token
from nano_inference.nanochat.columns import Columns
from tests.nanochat.test_engine import GENERATOR_STATE, num_tensors


def reference(logits: Tensor, rng: torch.Generator, temperature: float, top_k: int | None) -> Tensor:
    """nanochat's draw (its engine.py)."""
    if top_k:
        values, ids = logits.topk(min(top_k, logits.size(-1)), dim=-1)
        return ids.gather(1, torch.multinomial((values / temperature).softmax(-1), 1, generator=rng))
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng)


@pytest.mark.parametrize("top_k", [None, 0, 7, 1000])
def test_columns_are_multinomials_bit_for_bit_in_any_order_of_rows(top_k: int | None) -> None:
    logits = torch.randn(6, 5, 70, generator=torch.Generator().manual_seed(0))
    rng, same = torch.Generator().manual_seed(11), torch.Generator().manual_seed(11)
    expected = [reference(column, rng, 0.7, top_k)[:, 0].tolist() for column in logits]
    assert [sample_next_token(column, same, 0.7, top_k)[:, 0].tolist() for column in logits] == expected
    columns = Columns(5, 11, 0.7, top_k, None, torch.device("cpu"))
    turns = [(0, range(3)), (1, range(2)), (3, range(5)), (0, range(3, 6)), (2, range(4)), (1, range(3, 6)), (2, [5])]
    for row, places in turns:
        for place in places:
            token, _ = columns.choose(logits[place, row : row + 1], [row], [place])
            assert int(token) == expected[place][row]


@pytest.mark.slow
@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (50, None), (None, 0.5), (50, 0.5)])
def test_columns_of_a_large_vocabulary_are_multinomials_with_their_logprobs(
    top_k: int | None, top_p: float | None
) -> None:
    columns, rng = Columns(16, 3, 0.8, top_k, top_p, torch.device("cpu")), torch.Generator().manual_seed(3)
    for place in range(2):
        logits = 3 * torch.randn(16, 32768, generator=torch.Generator().manual_seed(place))
        tokens, logprobs = columns.choose(logits, range(16), [place] * 16)
        assert tokens.tolist() == sample_next_token(logits, rng, 0.8, top_k, top_p)[:, 0].tolist()
        chances = (logits.double() / 0.8).softmax(-1)
        ordered = chances.sort(descending=True).values
        kept = torch.arange(32768) < (top_k or 32768)
        mass = (ordered * kept).sum(-1, keepdim=True)
        kept = kept & (ordered.cumsum(-1) - ordered < (top_p or 2.0) * mass)
        own = chances.gather(1, tokens[:, None])[:, 0] / (ordered * kept).sum(-1)
        assert (logprobs - own.log()).abs().max() < 1e-5


def test_columns_keep_only_needed_numbers() -> None:
    columns = Columns(3, 0, 1.0, None, None, torch.device("cpu"))
    logits = torch.zeros(1, 9)
    for place in range(10):
        columns.choose(logits, [0], [place])
    assert num_tensors(GENERATOR_STATE) == num_tensors((3, 9)) == 10
    columns.end(1)
    columns.choose(logits, [2], [7])
    columns.choose(logits, [0], [10])
    assert num_tensors(GENERATOR_STATE) == num_tensors((3, 9)) == 4, "columns 7 to 10"
    before = columns.choose(torch.zeros(1, 9), [0], [10])[0]
    assert torch.equal(before, columns.choose(torch.zeros(1, 9), [0], [10])[0]), "a step that is run again"


def test_row_far_ahead_keeps_only_generator_states() -> None:
    logits = torch.randn(40, 2, 50, generator=torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(4)
    expected = [reference(column, rng, 1.0, None)[:, 0].tolist() for column in logits]
    columns = Columns(2, 4, 1.0, None, None, torch.device("cpu"), kept_bytes=3 * 2 * 50 * 4)
    found: list[list[int]] = [[], []]
    for row, places in ((1, range(20)), (0, range(5)), (1, range(20, 40)), (0, range(5, 40))):
        for place in places:
            found[row].append(int(columns.choose(logits[place, row : row + 1], [row], [place])[0]))
            assert num_tensors((2, 50)) <= 3
    assert found == [[column[row] for column in expected] for row in range(2)]
    assert num_tensors(GENERATOR_STATE) == num_tensors((2, 50)) == 1


def test_sample_next_token_refuses_and_breaks_ties_as_upstream() -> None:
    rng = torch.Generator().manual_seed(0)
    with pytest.raises(AssertionError, match="non-negative"):
        sample_next_token(torch.zeros(1, 4), rng, -0.1)
    assert sample_next_token(torch.tensor([[1.0, 3.0, 3.0]]), rng, 0.0).tolist() == [[1]]
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    for top_p, wanted in ((0.45, {1}), (0.55, {1, 2}), (0.75, {1, 2}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2})):
        assert {int(sample_next_token(logits, rng, 1.0, None, top_p)) for _ in range(80)} == wanted, top_p
