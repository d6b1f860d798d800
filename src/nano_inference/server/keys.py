"""API keys: read once, kept as digests, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nano_inference.server.config import ServerConfig
from nano_inference.support.files import path_of

MIN_KEY = 8  # minimum characters of a key

MAX_KEY_FILE = 1 << 20  # maximum bytes of a key file: a wrong path must not read a model into memory


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """Digests of the keys, and the secret from which each key's prefix-cache salt is derived."""

    digests: tuple[bytes, ...] = field(repr=False)
    secret: bytes = field(repr=False)
    is_shared: bool = False  # True if clients with different keys share cached prefixes

    @property
    def is_empty(self) -> bool:
        """True if there are no keys, so that requests need none."""
        return not self.digests

    @property
    def num_keys(self) -> int:
        return len(self.digests)

    @classmethod
    def of(cls, keys: Sequence[str], *, is_shared: bool = False, secret: bytes | None = None) -> KeyRing:
        """Return a ring of these keys; `secret` is random unless given."""
        digests = tuple(digest(key) for key in keys)
        return cls(digests=digests, secret=secrets.token_bytes(32) if secret is None else secret, is_shared=is_shared)

    def with_admins(self, admins: KeyRing) -> KeyRing:
        """Return a ring that also accepts admin keys; an empty ring stays empty."""
        return self if self.is_empty else replace(self, digests=self.digests + admins.digests)

    def identify(self, presented: str | None) -> int | None:
        """Return the index of a presented key, or None. Compares all keys, in constant time."""
        found = None
        candidate = digest(presented or "")
        for index, known in enumerate(self.digests):
            found = index if hmac.compare_digest(candidate, known) else found
        return found

    def cache_salt(self, key_index: int | None, requested: str | None) -> str:
        """Return the prefix-cache salt of a request; only requests with equal salts share cached prefixes.

        Raises `ValueError` if `key_index` is None although the ring has keys and `is_shared` is False.
        """
        if self.is_shared or self.is_empty:
            return requested or ""
        if key_index is None:
            raise ValueError("key_index must be given: keys do not share cached prefixes")
        message = self.digests[key_index] + (requested or "").encode("utf-8", "surrogatepass")
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()


def digest(key: str) -> bytes:
    """Return a key's SHA-256; equal lengths, so that comparison times do not reveal the key's."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def load_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return the distinct keys of `api_key` and `api_key_file`; `insecure` allows short ones.

    Raises `ValueError` without the key.
    """
    return _load(config.api_key, config.api_key_file, "api_key", 1 if config.insecure else MIN_KEY)


def load_admin_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return the distinct keys of `admin_key` and `admin_key_file`. Raises `ValueError` without the key."""
    return _load(config.admin_key, config.admin_key_file, "admin_key")


def _load(keys: Sequence[str], file: str | None, name: str, shortest: int = MIN_KEY) -> tuple[str, ...]:
    named = [(f"{name}: key {i}", key) for i, key in enumerate(keys, 1)]
    if file is not None:
        named += keys_in_file(path_of(file, f"{name}_file"), f"{name}_file")
    for place, key in named:
        check_key(place, key, shortest)
    return tuple(dict.fromkeys(key for _, key in named))


def check_key(place: str, key: str, shortest: int = MIN_KEY) -> None:
    """Raise `ValueError` for a key that is too short or that a header cannot contain."""
    if len(key) < shortest:
        raise ValueError(f"{place} is shorter than {shortest} characters")
    if not all("!" <= char <= "~" for char in key):
        raise ValueError(f"{place} contains a blank or a character outside visible ASCII")


def keys_in_file(path: Path, name: str = "api_key_file") -> list[tuple[str, str]]:
    """Return (place, key) of every line that is neither blank nor a #-comment; `name` is the configuration field."""
    text = read_private(path, name).decode("utf-8", "replace")
    lines = [(f"{name}: line {i}", line.strip()) for i, line in enumerate(text.split("\n"), 1)]
    keys = [(place, line) for place, line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{name} contains no key: {path}")
    return keys


def read_private(path: Path, name: str = "api_key_file") -> bytes:
    """Return the content of a file. Raises `ValueError` if others than its owner may read it."""
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            check_private(path, os.fstat(file.fileno()), name)
            return file.read(MAX_KEY_FILE)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {path}: {error.strerror}") from None


def check_private(path: Path, status: os.stat_result, name: str = "api_key_file") -> None:
    """Raise `ValueError` unless it is a regular file, private, and at most `MAX_KEY_FILE` bytes."""
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{name} is not a file: {path}")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(f"{name} may be read by others than its owner (mode {mode:o}): chmod 600 {path}")
    if status.st_size > MAX_KEY_FILE:
        raise ValueError(f"{name} is larger than {MAX_KEY_FILE} bytes: {path}")
