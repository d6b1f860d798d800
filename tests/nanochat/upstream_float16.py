"""The stand-in of upstream's model under NANOCHAT_DTYPE=float16: the constant is the Python module's."""

from __future__ import annotations

import torch

from tests.nanochat.upstream import StandIn

COMPUTE_DTYPE = torch.float16


class GPT(StandIn):
    """A model that computes in the module's precision."""

    def __init__(self, *, inserts: bool) -> None:
        super().__init__(COMPUTE_DTYPE, inserts=inserts)
