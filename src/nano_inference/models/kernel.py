"""`KernelModel`: a decoder of any family whose weights are packed for the kernels and whose forward pass is one call.

Shapes: T tokens of the step, K those of them that are kept, S rows, E hidden size, V vocabulary, P positions, R rotary
size.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nano_inference.attention import ForwardInput, Laid
from nano_inference.kernels.library import Library
from nano_inference.kernels.native import Cache, Continuation, Layout, NativeProgram
from nano_inference.models.config import ModelConfig
from nano_inference.models.programs import Weights, programs_of
from nano_inference.models.rope import RotaryTable

Keep = Literal["own", "bfloat16", "int8"]
"""How weights are kept: as they come, or rounded."""
Ropes = tuple[tuple[Tensor, Tensor], ...]


class _Parts(NamedTuple):
    """A model's programs, ready to run."""

    body: NativeProgram
    full_body: NativeProgram | None
    """The same without windows, for the answers of models with `has_full_decode`; None for all others."""
    final: NativeProgram
    head: NativeProgram


class KernelModel:
    """Owns packed weights, the programs that compute with them, and the memory of one step."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        library: Library,
        max_len: int,
        keep: Keep = "own",
        ropes: Ropes | None = None,
    ) -> None:
        """`max_len` positions can be computed; the rotary tables are made for them unless they are given.

        `keep` says how the weights were packed, and how the next shall be.
        """
        self.config = config
        self.weights = weights
        self.library = library
        self.max_len = max_len
        self.keep: Keep = keep
        programs = programs_of(config, weights)
        if ropes is None:
            ropes = rope_tables([RotaryTable(rope, torch.device("cpu")) for rope in config.ropes], max_len)
        self._ropes = ropes
        full_body = None
        if config.nanochat is not None and config.nanochat.has_full_decode:
            full_body = NativeProgram(library, programs_of(config.without_windows, weights).body, ropes)
        self._parts: _Parts | None = _Parts(
            body=NativeProgram(library, programs.body, ropes),
            full_body=full_body,
            final=NativeProgram(library, programs.final),
            head=NativeProgram(library, programs.head),
        )

    def with_weights(self, weights: Weights) -> KernelModel:
        """Return the same model with other weights."""
        return KernelModel(self.config, weights, self.library, self.max_len, self.keep, self._ropes)

    def discard(self) -> None:
        """Give the memory of the weights back; nothing can be computed afterwards."""
        self.weights = Weights({}, {})
        self._parts = None

    def run(self, step: Laid, kept: Sequence[int], cache: Cache, *, windows: bool = True) -> Tensor:
        """Return the hidden states [K, E] of the tokens `kept`, ascending, before the last norm.

        They lie in memory that the next step overwrites. Keys and values of all tokens are in the cache afterwards.
        Without `windows` every token sees all keys before it; only a model with `has_full_decode` is asked for that.
        """
        assert self._parts is not None
        body = self._parts.body if windows else self._parts.full_body
        assert body is not None and max(span.end for span in step.spans) <= self.max_len
        body.run(layout_of(step, kept), cache)
        return body.buffer("x", len(kept))

    def run_to_logits(self, step: Laid, kept: Sequence[int], cache: Cache) -> Tensor:
        """Do the same as `run` and then `head`, at once: return float32 logits [K, V]."""
        assert self._parts is not None and max(span.end for span in step.spans) <= self.max_len
        head = self._parts.head
        self._parts.body.run(layout_of(step, kept), cache, Continuation(head, "h", "x"))
        return head.buffer("logits", len(kept), self.config.vocab_size)

    def forward(self, step: ForwardInput, cache: Cache) -> Tensor:
        """Return the hidden states [T, E] of a step as torch's models take it."""
        laid = Laid(step.token_T.tolist(), step.prev_T.tolist(), step.spans)
        return self.run(laid, range(len(laid.tokens)), cache)

    def final(self, hidden_SE: Tensor) -> Tensor:
        """Return hidden states after the last norm, in memory that the next call overwrites."""
        assert self._parts is not None
        self._parts.final.run_rows({"h": hidden_SE})
        return self._parts.final.buffer("n", hidden_SE.size(0))

    def head(self, hidden_SE: Tensor) -> Tensor:
        """Return float32 logits [S, V], in memory that the next call overwrites."""
        assert self._parts is not None
        self._parts.head.run_rows({"h": hidden_SE})
        return self._parts.head.buffer("logits", hidden_SE.size(0), self.config.vocab_size)


def rope_tables(tables: Sequence[RotaryTable], max_len: int) -> Ropes:
    """Return cosines and signed sines [P, R] of every position, a pair for each rotary embedding."""
    position_P = torch.arange(max_len)
    pairs = (table.at(position_P, torch.float32) for table in tables)
    return tuple((cos_P1R.squeeze(1).contiguous(), sin_P1R.squeeze(1).contiguous()) for cos_P1R, sin_P1R in pairs)


def layout_of(step: Laid, kept: Sequence[int]) -> Layout:
    """Return a step as the kernels want it."""
    lengths = [len(span.blocks) for span in step.spans]
    return Layout(
        token_T=array("i", step.tokens),
        previous_T=array("i", step.previous),
        num_tokens_S=array("i", [span.num_tokens for span in step.spans]),
        start_S=array("i", [span.start for span in step.spans]),
        table_begin_S=array("i", accumulate(lengths[:-1], initial=0)),
        tables=array("i", chain.from_iterable(span.blocks for span in step.spans)),
        keep_K=array("i", kept),
    )
