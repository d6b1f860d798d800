"""SGLang's POST /weights_checker: whether an update has replaced all weights.

A trainer takes a snapshot, replaces the weights by random numbers, sends its own, and compares. Fields as in
sglang/srt/managers/io_struct.py (0.5.23), whose `skip_tensor_list` needs a checksum of each tensor and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nano_inference.server.call import JSON
from nano_inference.server.errors import ApiError

_SCALE = 0.02
"""Standard deviation of the random weights."""


class Snapshot:
    """Owns the checksum of the latest snapshot. Accessed on the event loop."""

    def __init__(self) -> None:
        self._checksum: str | None = None

    def take(self, checksum: str) -> JSON:
        """Keep a checksum of all weights; return SGLang's reply."""
        self._checksum = checksum
        return {"success": True, "message": "snapshot taken", "checksum": checksum}

    def compare(self, checksum: str) -> JSON:
        """Return SGLang's reply for equal weights. Raises `ApiError` 400 if they differ, or without a snapshot."""
        if self._checksum is None:
            raise ApiError(400, "action: compare needs a snapshot first", param="action", code="no_snapshot")
        if checksum != self._checksum:
            text = f"the weights differ from the snapshot: checksum {checksum}, in the snapshot {self._checksum}"
            raise ApiError(400, text, code="weights_differ")
        return {"success": True, "message": "the weights equal the snapshot", "checksum": checksum, "equal": True}


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Any]]:
    """Yield (name, float32 tensor) of random weights, one at a time: a skipped tensor of an update becomes visible."""
    import torch

    generator = torch.Generator().manual_seed(len(shapes))
    for name, shape in shapes.items():
        yield name, torch.empty(shape).normal_(0.0, _SCALE, generator=generator)
