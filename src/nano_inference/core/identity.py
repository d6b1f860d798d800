"""What identifies a sequence's K/V: the salt under which it is shared, and the block that is computed next."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nano_inference.core.cache import Salt
from nano_inference.core.recurrent import is_shared
from nano_inference.core.sequence import Sequence


def salt_of(seq: Sequence, version: int) -> Salt | None:
    """Return the salt under which a sequence publishes; None if its K/V is of several versions, or faulty."""
    if seq.version != version or seq.finish_reason == "abort":
        return None
    return (version, seq.request.salt, seq.adapter)


def next_key(
    seq: Sequence, num_computed: int, blocks: Seq[int], reach: int, block_size: int, *, has_states: bool
) -> object:
    """Return the identity of the block that a sequence computes next: the block before it, and its tokens.

    With recurrent states, all tokens to the end of that block, or to where it keeps a snapshot that others share.
    While the first sample scores a prompt, it is the request id for all samples: the others wait for the scores.
    """
    uncached = (seq.leader or seq).first_uncached
    if uncached is not None and seq.request.num_samples > 1:
        return seq.request_id
    start = num_computed // block_size * block_size
    if len(seq.tokens) - num_computed <= 1 or (uncached is not None and start + block_size > uncached):
        return None
    if has_states:
        end = (max(num_computed, reach) // block_size + 1) * block_size
        return (seq.request.salt, seq.adapter, *seq.tokens[: reach if is_shared(num_computed, reach) else end])
    parent = blocks[start // block_size - 1] if start else -1
    return (seq.request.salt, seq.adapter, parent, *seq.tokens[start : start + block_size])
