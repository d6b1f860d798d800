"""Sizes with units, such as `2GiB` for `--kv-cache-bytes`, from any source of values."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cyclopts import App, Argument, ArgumentCollection, Token

from nano_inference.cli.arguments import options_of
from nano_inference.types import BadRequest

SIZES = ("kv_cache_bytes", "max_body_bytes", "max_stored_bytes", "models_memory")  # fields in bytes
UNITS: Mapping[str, int] = (
    {"": 1, "b": 1}
    | {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
    | {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
)
_SIZE = re.compile(r"\s*(?P<whole>\d{1,18})(?:\.(?P<part>\d{1,9}))?\s*(?P<unit>[a-zA-Z]*)\s*", re.ASCII)
_PLAIN = re.compile(r"-?\d+|none", re.ASCII)


def is_size(option: Argument) -> bool:
    """True if an option is a number of bytes."""
    return option.field_info.name in SIZES


def apply_sizes(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Replace sizes with units by numbers of bytes. Raises `BadRequest` for other values."""
    for option in options_of(arguments):
        if is_size(option):
            option.tokens[:] = [_plain(option, token) for token in option.tokens]


def _plain(option: Argument, token: Token) -> Token:
    if _PLAIN.fullmatch(token.value):
        return token  # the configuration checks the range
    size = size_of(token.value)
    if size is None:
        where = token.keyword if token.source == "env" else option.name
        file = f" ({token.source})" if token.source.startswith("file ") else ""
        raise BadRequest(where or "", f"must be bytes, or a size such as 512MiB or 2GB, got {token.value[:40]!r}{file}")
    return token.evolve(value=str(size))


def size_of(text: str) -> int | None:
    """Parse a size such as `512MiB`, `1.5 GB` or `4096`; None if it is not a whole number of bytes."""
    match = _SIZE.fullmatch(text)
    unit = None if match is None else UNITS.get(match["unit"].lower())
    if match is None or unit is None:
        return None
    part = match["part"] or ""
    size, rest = divmod(int(match["whole"] + part) * unit, 10 ** len(part))
    return None if rest else size
