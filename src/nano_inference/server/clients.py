"""Identifies a request's client: by its API key, or by its address if the server has no keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.types import Scope

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_HOPS = 32
"""Addresses of X-Forwarded-For that are read, last ones first."""
IPV6_PREFIX = 64
"""Bits of an IPv6 address that identify a client: a host may use any address with its prefix."""


@dataclass(frozen=True, slots=True)
class Client:
    """The unit to which quotas and turns apply."""

    name: str
    """`key 2`, `admin 0`, `address 192.0.2.7`; equal for all requests of one client."""
    is_exempt: bool = False
    """True if no quota applies: the request has an admin key."""


UNKNOWN = Client("address unknown")


def networks(texts: Iterable[str], field: str) -> tuple[Network, ...]:
    """Return networks from addresses and CIDR ranges. Raises `ValueError` naming `field`."""
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text, strict=False))
        except ValueError:
            raise ValueError(f"{field} must be an address or a range such as 10.0.0.0/8, got {text!r}") from None
    return tuple(found)


def address_of(scope: Scope, trusted: Sequence[Network]) -> str:
    """Return the client name made from the client's address.

    That is the peer's address, unless it is a trusted proxy: then the last address in X-Forwarded-For that is not a
    trusted proxy. Each proxy appends the address that it saw, so addresses that the client sent are never read.
    """
    peer = scope.get("client")
    address = parse_address(peer[0]) if peer else None
    if address is None:
        return UNKNOWN.name
    for hop in forwarded(scope["headers"]) if trusted else ():
        if not is_trusted(address, trusted):
            break
        before = parse_address(hop)
        if before is None:
            break
        address = before
    return f"address {prefix_of(address)}"


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Return the addresses of all X-Forwarded-For headers, last first."""
    values = [value.decode("latin-1") for name, value in headers if name.lower() == b"x-forwarded-for"]
    return [hop.strip() for hop in ",".join(values).split(",")[: -MAX_HOPS - 1 : -1]] if values else []


def is_trusted(address: Address, trusted: Sequence[Network]) -> bool:
    """Return whether an address is in one of the networks."""
    return any(address.version == network.version and address in network for network in trusted)


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
