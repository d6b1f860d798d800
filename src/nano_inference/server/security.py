"""Who may ask and who asks: API keys, Host headers, and the client to which quotas and turns apply."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.support.files import path_of

MIN_KEY = 8  # characters of a key
MAX_KEY_FILE = 1 << 20  # bytes of a key file: a wrong path must not read a model into memory
MAX_HOST = 255  # characters of a Host header
MAX_HOPS = 32  # addresses of X-Forwarded-For that are read, last ones first
IPV6_PREFIX = 64  # bits of an IPv6 address that identify a client: a host may use any address with its prefix

JSON_TYPE, BYTES_TYPE = "application/json", "application/octet-stream"

Headers = Sequence[tuple[bytes, bytes]]  # of an ASGI request; a name may be repeated
Host = tuple[str, int | None]  # a name or address in lower case, and the port if given
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")


def values(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def single(headers: Headers, name: bytes) -> str | None:
    found = values(headers, name)
    return found[0] if len(found) == 1 else None


# ---- requests: what their headers say -------------------------------------------------------------------------------


def announces_body(headers: Headers) -> bool:
    """Return True if the headers announce a body (RFC 9112, 6.3)."""
    lengths = values(headers, b"content-length")
    return bool(values(headers, b"transfer-encoding")) or any(length.strip("0") for length in lengths)


def is_from_page(headers: Headers) -> bool:
    """Return True for a request that a web page caused: browsers add one of these headers, and pages cannot drop it."""
    return bool(values(headers, b"origin") or values(headers, b"sec-fetch-site"))


def presented_key(headers: Headers) -> str | None:
    """Return the key in `Authorization: Bearer` (OpenAI's clients) or `x-api-key` (Anthropic's)."""
    scheme, _, key = (single(headers, b"authorization") or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else single(headers, b"x-api-key")


def check_content(headers: Headers, max_body_bytes: int, wanted: str = JSON_TYPE) -> None:
    """Refuse a body of another type (web pages may send some without a preflight), or that is declared too large.

    JSON needs no type, as some of Ollama's clients send it, unless a web page sends it: a page can omit the type.
    """
    kind = (single(headers, b"content-type") or "").partition(";")[0].strip().lower()
    is_bare = wanted == JSON_TYPE and not values(headers, b"content-type") and not is_from_page(headers)
    if kind != wanted and not is_bare:
        form = "as JSON" if wanted == JSON_TYPE else "as bytes"
        raise ApiError(415, f"send the body {form}, with the header Content-Type: {wanted}")
    if any(value.strip().lower() != "identity" for value in values(headers, b"content-encoding")):
        raise ApiError(415, "send the body without Content-Encoding")
    length = single(headers, b"content-length") or "0"
    if len(length) > 18 or int(length) > max_body_bytes:
        raise too_large(max_body_bytes)


def too_large(limit: int) -> ApiError:
    """Return the 413 for a body above the limit."""
    return ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")


# ---- keys: read once, kept as digests, compared in constant time ----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """Digests of the keys, and the secret from which each key's prefix-cache salt is derived."""

    digests: tuple[bytes, ...] = field(repr=False)
    secret: bytes = field(repr=False)
    is_shared: bool = False  # True if clients with different keys share cached prefixes

    @property
    def is_empty(self) -> bool:
        return not self.digests

    @classmethod
    def of(cls, keys: Sequence[str], *, is_shared: bool = False, secret: bytes | None = None) -> KeyRing:
        """Return a ring of these keys; `secret` is random unless given."""
        digests = tuple(_digest(key) for key in keys)
        return cls(digests=digests, secret=secrets.token_bytes(32) if secret is None else secret, is_shared=is_shared)

    def with_admins(self, admins: KeyRing) -> KeyRing:
        """Return a ring that also accepts admin keys; an empty ring stays empty."""
        return self if self.is_empty else replace(self, digests=self.digests + admins.digests)

    def identify(self, presented: str | None) -> int | None:
        """Return the index of a presented key, or None. Compares all keys, in constant time."""
        found = None
        candidate = _digest(presented or "")
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


def _digest(key: str) -> bytes:
    # Equal lengths, so that the time of a comparison does not reveal the key's.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def load_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return the distinct keys of `api_key` and `api_key_file`; `insecure` allows short ones.

    Raises `ValueError` without the key.
    """
    return _load(config.api_key, config.api_key_file, "api_key", 1 if config.insecure else MIN_KEY)


def load_admin_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return the distinct keys of `admin_key` and `admin_key_file`. Raises `ValueError` without the key."""
    return _load(config.admin_key, config.admin_key_file, "admin_key", MIN_KEY)


def _load(keys: Sequence[str], file: str | None, name: str, shortest: int) -> tuple[str, ...]:
    named = [(f"{name}: key {i}", key) for i, key in enumerate(keys, 1)]
    if file is not None:
        path, field_name = path_of(file, f"{name}_file"), f"{name}_file"
        lines = enumerate(_read_private(path, field_name).decode("utf-8", "replace").split("\n"), 1)
        in_file = [(f"{field_name}: line {i}", line.strip()) for i, line in lines if line.strip()[:1] not in ("", "#")]
        if not in_file:
            raise ValueError(f"{field_name} contains no key: {path}")
        named += in_file
    for place, key in named:
        if len(key) < shortest:
            raise ValueError(f"{place} is shorter than {shortest} characters")
        if not all("!" <= char <= "~" for char in key):
            raise ValueError(f"{place} contains a blank or a character outside visible ASCII")
    return tuple(dict.fromkeys(key for _, key in named))


def _read_private(path: Path, name: str) -> bytes:
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            check_private(path, os.fstat(file.fileno()), name)
            return file.read(MAX_KEY_FILE)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {path}: {error.strerror}") from None


def check_private(path: Path, status: os.stat_result, name: str) -> None:
    """Raise `ValueError` unless it is a regular file, private, and at most `MAX_KEY_FILE` bytes."""
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{name} is not a file: {path}")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(f"{name} may be read by others than its owner (mode {mode:o}): chmod 600 {path}")
    if status.st_size > MAX_KEY_FILE:
        raise ValueError(f"{name} is larger than {MAX_KEY_FILE} bytes: {path}")


# ---- Host headers ---------------------------------------------------------------------------------------------------


def hosts_to_allow(config: ServerConfig) -> tuple[Host, ...]:
    """Return the hosts of `allowed_host` plus the listening address; nothing if `allowed_host` is empty."""
    try:
        allowed = [parse_host(text) for text in config.allowed_host]
    except ValueError as error:
        raise ValueError(f"allowed_host: {error}") from None
    if allowed and config.host not in ("0.0.0.0", "::"):
        allowed.append(parse_host(f"[{config.host}]" if ":" in config.host else config.host))
    return tuple(allowed)


def parse_host(text: str) -> Host:
    """Return the name and port of a Host header (RFC 9110, 7.2). Raises `ValueError` if it is invalid."""
    match = _HOST.fullmatch(text) if len(text) <= MAX_HOST else None
    if match is None:
        raise ValueError("Host must be a name or address, with a port or without")
    port = None if match["port"] is None else int(match["port"])
    if port is not None and not 1 <= port <= 65535:
        raise ValueError("Host has a port that is not in [1, 65535]")
    name = match["name"].lower()
    if name.startswith("["):
        return str(ipaddress.IPv6Address(name[1:-1])), port
    name = name.removesuffix(".")
    if not all(name.split(".")):
        raise ValueError("Host has an empty label")
    return name, port


def is_loopback_name(name: str) -> bool:
    """Return True for localhost, 127.0.0.0/8 and ::1."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name.lower() == "localhost"
    return address in ipaddress.ip_network("127.0.0.0/8") or address == ipaddress.IPv6Address("::1")


# ---- clients --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Client:
    """The unit to which quotas and turns apply."""

    name: str  # `key 2`, `admin 0`, `address 192.0.2.7`; equal for all requests of one client
    is_exempt: bool = False  # True if no quota applies: the request has an admin key


def networks(texts: Iterable[str], name: str) -> tuple[Network, ...]:
    """Return networks from addresses and CIDR ranges. Raises `ValueError` naming the field `name`."""
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text, strict=False))
        except ValueError:
            raise ValueError(f"{name} must be an address or a range such as 10.0.0.0/8, got {text!r}") from None
    return tuple(found)


def address_of(scope: Mapping[str, Any], trusted: Sequence[Network]) -> str:
    """Return the client name made from the client's address.

    That is the peer's address, unless it is a trusted proxy: then the last address in X-Forwarded-For that is not a
    trusted proxy. Each proxy appends the address that it saw, so addresses that the client sent are never read.
    """
    peer = scope.get("client")
    address = parse_address(peer[0]) if peer else None
    if address is None:
        return "address unknown"
    for hop in forwarded(scope["headers"]) if trusted else ():
        before = parse_address(hop) if is_trusted(address, trusted) else None
        if before is None:
            break
        address = before
    return f"address {prefix_of(address)}"


def forwarded(headers: Headers) -> list[str]:
    """Return the addresses of all X-Forwarded-For headers, last first."""
    found = values(headers, b"x-forwarded-for")
    return [hop.strip() for hop in ",".join(found).split(",")[: -MAX_HOPS - 1 : -1]] if found else []


def is_trusted(address: Address, trusted: Sequence[Network]) -> bool:
    return any(address in network for network in trusted)


def parse_address(text: str) -> Address | None:
    """Return the address in `ADDRESS` or `ADDRESS:PORT`; None if it is not an address."""
    host = text.partition("]")[0].removeprefix("[") if text.startswith("[") else text
    if host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def prefix_of(address: Address) -> str:
    """Return an IPv4 address as text, or the network of an IPv6 address (`IPV6_PREFIX`)."""
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))
