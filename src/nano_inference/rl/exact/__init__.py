"""Exact log-probabilities in a trainer: the engine's values, bit for bit, with a gradient. See docs/rl.md."""

from nano_inference.rl.exact.functions import exact_values, train_logprobs, with_values
from nano_inference.rl.exact.policy import Policy, StaleWeights, exact_executor

__all__ = ["Policy", "StaleWeights", "exact_executor", "exact_values", "train_logprobs", "with_values"]
