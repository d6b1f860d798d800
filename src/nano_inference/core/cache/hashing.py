"""Block hashes: a SHA-256 chain over parent hash and tokens, truncated to 128 bits."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

_DIGEST_BYTES = 16


def compute_block_hash(token_ids: Sequence[int], prefix_hash: int | None = None) -> int:
    """Return the 128-bit hash of these tokens after the prefix with hash `prefix_hash`.

    The same on every machine and in every process. Raises `ValueError` when there are no tokens.
    """
    if not token_ids:
        raise ValueError("token_ids must hold at least one token")
    prefix = b"" if prefix_hash is None else prefix_hash.to_bytes(_DIGEST_BYTES, "little")
    try:
        data = b"q" + struct.pack(f"<{len(token_ids)}q", *token_ids)
    except struct.error:  # an id exceeds 64 bits
        data = b"d" + ",".join(str(int(token)) for token in token_ids).encode()
    digest = hashlib.sha256(bytes([len(prefix)]) + prefix + data).digest()
    return int.from_bytes(digest[:_DIGEST_BYTES], "little")


def root_hash(version: int, namespace: str, adapter: int) -> int:
    """Return the prefix hash of the first block under a `Salt`."""
    numbers = struct.pack("<qq", version, adapter)
    digest = hashlib.sha256(b"root" + numbers + namespace.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:_DIGEST_BYTES], "little")
