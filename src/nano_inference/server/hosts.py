"""Parses Host headers; lists the allowed hosts of a configuration; recognises loopback names. Pure."""

from __future__ import annotations

import ipaddress
import re

from nano_inference.server.config import ServerConfig

Host = tuple[str, int | None]  # a name or address in lower case, and the port if given

MAX_HOST = 255

_HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")


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
