"""The terms of nanochat's forward pass. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from nano_inference.checks import check_int, check_number
from nano_inference.models.config import ModelConfig
from nano_inference.types import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class NanochatTerms:
    """The terms of nanochat's forward pass that came and went with its generations. A term is off at its default.

    nanochat's checkpoints carry no version; `nanochat/rules.py` infers these, and users can override them.
    """

    generation: str
    """"G0" to "G4", as the loader's table names them."""
    padded_vocab_size: int
    """Rows of the embedding and of the head; logits are cut to the vocabulary's own size."""
    qk_scale: float = 1.0
    """Multiplies the normalised q and k each."""
    long_window: int | None = None
    """Keys that a layer without a short window sees, itself included; matters only beyond the trained length."""
    has_lambdas: bool = False
    """Each layer's input is r·x + z·x0, with x0 the embedding (G1 on)."""
    gate_columns: int = 0
    """Columns of a layer's input that gate its value embedding; 0 is no value embeddings (G2 on)."""
    gate_scale: float = 2.0
    """The gate is this times a sigmoid."""
    smear_columns: int = 0
    """Columns of the embedding that gate how much of the token before is mixed in; 0 is no smear (G4)."""
    has_backout: bool = False
    """A part of the middle layer's output is taken from the last's (G4)."""
    bigram_rows: int = 0
    """Rows of the table of hashed token pairs; 0 is no such table (G2e)."""
    has_hf_names: bool = False
    """The weights have the names of Transformers' port, not nanochat's own."""
    has_full_decode: bool = False
    """Windows cut the prompt's queries only: queries of answer tokens see all keys before them (decode_window=full)."""

    def __post_init__(self) -> None:
        check_int("padded_vocab_size", self.padded_vocab_size, 1, 2**31 - 1)
        check_number("qk_scale", self.qk_scale, 1e-6, 1e3)
        check_number("gate_scale", self.gate_scale, 0, 1e3, open_low=True)
        check_int("gate_columns", self.gate_columns, 0)
        check_int("smear_columns", self.smear_columns, 0)
        check_int("bigram_rows", self.bigram_rows, 0)

    def has_value_embedding(self, layer: int, num_layers: int) -> bool:
        """Whether a layer has one: every other layer, the last among them."""
        return self.gate_columns > 0 and layer % 2 == (num_layers - 1) % 2


def terms_of(config: ModelConfig) -> NanochatTerms:
    """Return the terms of a nanochat model. Raises `ModelError` for the configuration of any other."""
    if not isinstance(config.terms, NanochatTerms):
        found = type(config.terms).__name__
        raise ModelError(f"{config.architecture}: family nanochat needs terms of the type NanochatTerms, got {found}")
    return config.terms
