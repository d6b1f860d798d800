"""Who may come in: API keys are read once, kept as digests, and told apart without telling how alike they are."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nano_inference.config import ServerConfig
from nano_inference.files import path_of

MIN_KEY = 8
"""Characters of the shortest key that is accepted."""

MAX_KEY_FILE = 1 << 20
"""Bytes of the largest key file: a wrong path must not read a model into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """The digests of all keys, and the secret from which each key's prefix-cache salt is made."""

    digests: tuple[bytes, ...] = field(repr=False)
    secret: bytes = field(repr=False)
    is_shared: bool = False
    """Whether clients with different keys may reuse each other's cached prefixes."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no keys, so that nobody needs one."""
        return not self.digests

    @property
    def num_keys(self) -> int:
        """Return how many keys there are."""
        return len(self.digests)

    @classmethod
    def of(cls, keys: Sequence[str], *, is_shared: bool = False, secret: bytes | None = None) -> KeyRing:
        """Return the ring of these keys; `secret` is fresh unless a test gives one."""
        digests = tuple(digest(key) for key in keys)
        return cls(digests=digests, secret=secrets.token_bytes(32) if secret is None else secret, is_shared=is_shared)

    def with_admins(self, admins: KeyRing) -> KeyRing:
        """Return the ring that lets in admins as well; one that nobody needs a key for stays as it is."""
        return self if self.is_empty else replace(self, digests=self.digests + admins.digests)

    def identify(self, presented: str | None) -> int | None:
        """Return the index of the key that was presented, or None; every key is compared, whichever matches."""
        found = None
        candidate = digest(presented or "")
        for index, known in enumerate(self.digests):
            found = index if hmac.compare_digest(candidate, known) else found
        return found

    def cache_salt(self, key_index: int | None, requested: str | None) -> str:
        """Return the prefix-cache salt of a request; only requests with equal salts share cached prefixes.

        `ValueError`: there are keys that do not share, and the request came without one.
        """
        if self.is_shared or self.is_empty:
            return requested or ""
        if key_index is None:
            raise ValueError("key_index must be given: each key has prefixes of its own")
        message = self.digests[key_index] + (requested or "").encode("utf-8", "surrogatepass")
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()


def digest(key: str) -> bytes:
    """Return a key's SHA-256: of one length, so that a comparison tells nothing of the key's."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def load_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return the keys of `api_key` and `api_key_file`, each once; raise `ValueError` naming field and rule, not key."""
    named = [(f"api_key: key {i}", key) for i, key in enumerate(config.api_key, 1)]
    if config.api_key_file is not None:
        named += keys_in_file(path_of(config.api_key_file, "api_key_file"))
    return checked_keys(named)


def load_admin_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return the keys of `admin_key` and `admin_key_file`, as `load_keys` does."""
    named = [(f"admin_key: key {i}", key) for i, key in enumerate(config.admin_key, 1)]
    if config.admin_key_file is not None:
        named += keys_in_file(path_of(config.admin_key_file, "admin_key_file"), "admin_key_file")
    return checked_keys(named)


def checked_keys(named: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the keys of (place, key) pairs, each once; raise `ValueError` naming the place of one that is none."""
    for place, key in named:
        check_key(place, key)
    return tuple(dict.fromkeys(key for _, key in named))


def check_key(place: str, key: str) -> None:
    """Refuse a key that is too short, or that no header can carry."""
    if len(key) < MIN_KEY:
        raise ValueError(f"{place} is shorter than {MIN_KEY} characters")
    if not all("!" <= char <= "~" for char in key):
        raise ValueError(f"{place} holds a blank or a character outside visible ASCII")


def keys_in_file(path: Path, name: str = "api_key_file") -> list[tuple[str, str]]:
    """Return (place, key) of every line that is neither blank nor a #-comment; `name` is the field's."""
    text = read_private(path, name).decode("utf-8", "replace")
    lines = [(f"{name}: line {i}", line.strip()) for i, line in enumerate(text.split("\n"), 1)]
    keys = [(place, line) for place, line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{name} holds no key: {path}")
    return keys


def read_private(path: Path, name: str = "api_key_file") -> bytes:
    """Return the bytes of a file that only its owner may read."""
    try:
        # Opening a pipe would wait for its writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            check_private(path, os.fstat(file.fileno()), name)
            return file.read(MAX_KEY_FILE)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {path}: {error.strerror}") from None


def check_private(path: Path, status: os.stat_result, name: str = "api_key_file") -> None:
    """Refuse what is no file, what others may read, and what is far too large."""
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{name} is not a file: {path}")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(f"{name} may be read by others than its owner (mode {mode:o}): chmod 600 {path}")
    if status.st_size > MAX_KEY_FILE:
        raise ValueError(f"{name} is larger than {MAX_KEY_FILE} bytes: {path}")
