"""The terms of nanochat's forward pass. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from nano_inference.models.config import ModelConfig
from nano_inference.support.checks import check_int, check_number
from nano_inference.types import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class NanochatTerms:
    """The terms of nanochat's forward pass that differ between generations; by default a term is off.

    `nanochat/rules.py` infers them, because checkpoints have no version.
    """

    generation: str  # a key of `rules.GENERATIONS`
    padded_vocab_size: int  # rows of the embedding and of the head; logits are truncated to the vocabulary size
    qk_scale: float = 1.0  # factor of the normalised q, and of k
    long_window: int | None = None
    """Keys visible to a layer without a short window, including the query's own; matters beyond the trained length."""
    has_lambdas: bool = False  # each layer's input is r·x + z·x0, with x0 the embedding (from G1)
    gate_columns: int = 0  # columns of a layer's input that gate its value embedding (from G2); 0 if there are none
    gate_scale: float = 2.0  # factor of the gate's sigmoid
    smear_columns: int = 0  # columns of the embedding that gate the share of the previous token's (G4); 0 is no smear
    has_backout: bool = False  # a multiple of the middle layer's output is subtracted from the last one's (G4)
    bigram_rows: int = 0  # rows of the table of hashed token pairs (G2e); 0 if there is none
    has_hf_names: bool = False  # weights have the names of Transformers' port
    has_full_decode: bool = False
    """Windows apply to the prompt's queries only; answer tokens attend to all keys (decode_window=full)."""

    def __post_init__(self) -> None:
        check_int("padded_vocab_size", self.padded_vocab_size, 1, 2**31 - 1)
        check_number("qk_scale", self.qk_scale, 1e-6, 1e3)
        check_number("gate_scale", self.gate_scale, 0, 1e3, open_low=True)
        check_int("gate_columns", self.gate_columns, 0)
        check_int("smear_columns", self.smear_columns, 0)
        check_int("bigram_rows", self.bigram_rows, 0)

    def has_value_embedding(self, layer: int, num_layers: int) -> bool:
        """Return whether a layer has one: every other layer, including the last."""
        return self.gate_columns > 0 and layer % 2 == (num_layers - 1) % 2


def terms_of(config: ModelConfig) -> NanochatTerms:
    """Return the terms of a nanochat model. Raises `ModelError` for other configurations."""
    if not isinstance(config.terms, NanochatTerms):
        found = type(config.terms).__name__
        raise ModelError(f"{config.architecture}: family nanochat needs terms of the type NanochatTerms, got {found}")
    return config.terms
