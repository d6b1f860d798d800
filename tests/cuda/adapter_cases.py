"""The kernels of adapters in float64, and against themselves with fewer tokens.

Shapes: T tokens, X places, M matrices, N outputs and K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.cuda.records import LowRankStack
from tests.cuda.case import Case
from tests.cuda.pointwise_cases import BOUNDS, relative

RANKS = ((1, 0, 16), (33, 17, 4))  # of the matrices of each place
STARTS = (0, 48, 64, 164)
NUM_IN, MOST_RANKS = 300, 64
INDICES = (-1, 1, 0, 0, -1, 1, 1)


def added(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> float:
    """Return the difference from float64; infinity if other bits depend on the batch, or rows without change."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    stack = LowRankStack(
        a_XMRK=random(2, 3, MOST_RANKS, NUM_IN) / 16,
        b_XNR=random(2, STARTS[-1], MOST_RANKS) / 4,
        rank_XM=torch.tensor(RANKS, dtype=torch.int32),
        scale_XM=torch.tensor([[0.5, 1.0, 2.0], [0.3, 1.0, 0.7]]),
        start_M=torch.tensor(STARTS, dtype=torch.int32),
        widest=100,
        low_TMR=torch.full((len(INDICES), 3, MOST_RANKS), float("nan")),
    )
    for place, ranks in enumerate(RANKS):  # what is beyond a pair's ranks is never read
        for matrix, rank in enumerate(ranks):
            stack.a_XMRK[place, matrix, rank:] = float("nan")
            stack.b_XNR[place, STARTS[matrix] : STARTS[matrix + 1], rank:] = float("nan")
    x_TK, before_TN = random(len(INDICES), NUM_IN + 5)[:, :NUM_IN], random(len(INDICES), STARTS[-1])
    expected_TN = before_TN.double()
    for token, place in enumerate(INDICES):
        for matrix, (start, end) in enumerate(pairwise(STARTS)):
            if place >= 0 and (rank := RANKS[place][matrix]):
                low_R = stack.a_XMRK[place, matrix, :rank].double() @ x_TK[token].double()
                more_N = stack.b_XNR[place, start:end, :rank].double() @ low_R
                expected_TN[token, start:end] += stack.scale_XM[place, matrix].double() * more_N
    on = LowRankStack(*(part.to(device) if isinstance(part, torch.Tensor) else part for part in stack))
    x_on, index_T = x_TK.to(device), torch.tensor(INDICES, dtype=torch.int32, device=device)
    together, alone = before_TN.to(device).clone(), before_TN.to(device).clone()
    kernels.adapt.add_adapters(together, x_on, on, index_T)
    for token in range(len(INDICES)):
        one = slice(token, token + 1)
        kernels.adapt.add_adapters(alone[one], x_on[one], on, index_T[one])
    is_same = torch.equal(together, alone) and torch.equal(together[[0, 4]].cpu(), before_TN[[0, 4]])
    return relative(together, expected_TN) if is_same else float("inf")


def cases() -> Iterator[Case]:
    """Yield every case."""
    for dtype, bound in BOUNDS.items():
        name, needs_gpu = str(dtype).removeprefix("torch."), dtype == torch.bfloat16
        yield Case(f"adapters-added-{name}", lambda k, d, t=dtype: added(k, d, t), bound, needs_gpu)
