"""The backward pass of exact log-probabilities goes layer by layer, over texts grouped by length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nano_inference import SamplingParams
from nano_inference.rl.exact import program, train_logprobs
from tests.rl.exact_checks import PROMPTS, Case, made


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Case]:
    yield from made("llama3-rope-ratio3-tied", tmp_path)


def test_gradients_of_a_layer_are_stored_before_the_next_are_computed(fresh: Case) -> None:
    """Else all of a model's gradients would exist twice: computed, and in `.grad`."""
    named = dict(fresh.model.named_parameters())
    upper, lower = (named[f"model.layers.{index}.mlp.down_proj.weight"] for index in (1, 0))
    values = train_logprobs(fresh.policy, fresh.samples(), temperature=0.8)

    def change(_: Tensor) -> None:
        lower.detach().add_(1e-3)

    upper.register_post_accumulate_grad_hook(change)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()
    assert upper.grad is not None and lower.grad is None


def test_optimizers_may_step_within_the_backward_pass(fresh: Case) -> None:
    samples = fresh.samples()
    train_logprobs(fresh.policy, samples, temperature=0.8).sum().backward()
    expected = [leaf.detach() - 1e-3 * leaf.grad for leaf in fresh.policy.leaves]
    fresh.model.zero_grad()

    def step(leaf: Tensor) -> None:
        leaf.detach().sub_(1e-3 * leaf.grad)
        leaf.grad = None

    for leaf in fresh.policy.leaves:
        leaf.register_post_accumulate_grad_hook(step)
    train_logprobs(fresh.policy, samples, temperature=0.8).sum().backward()
    assert all(torch.equal(leaf, one) for leaf, one in zip(fresh.policy.leaves, expected, strict=True))


def test_graph_that_is_kept_has_a_gradient_for_some_parameters(fresh: Case) -> None:
    loss = train_logprobs(fresh.policy, fresh.samples(), temperature=0.8).sum()
    leaves = fresh.policy.leaves
    whole = torch.autograd.grad(loss, leaves, retain_graph=True)
    for index in (1, len(leaves) // 2, len(leaves) - 1, 0):
        assert torch.equal(torch.autograd.grad(loss, leaves[index], retain_graph=True)[0], whole[index])


def test_texts_of_one_length_are_split_where_their_scores_are_many(
    fresh: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = fresh.engine.generate(PROMPTS * 3, SamplingParams(max_tokens=20, seed=5, ignore_eos=True))
    found = []
    for most in (1 << 20, 2 * 26**2, 1):
        monkeypatch.setattr(program, "SCORES", most)
        values = train_logprobs(fresh.policy, samples)
        found.append(torch.autograd.grad((values * torch.arange(len(values))).sum(), fresh.policy.leaves))
    for one, *others in zip(*found, strict=True):
        assert all((one - other).norm() <= 2e-6 * one.norm() for other in others)
