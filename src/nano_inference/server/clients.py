"""Whose request it is: the key it came with, or without keys the address it came from."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.types import Scope

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_HOPS = 32
"""Addresses of X-Forwarded-For that are read, from its end."""
IPV6_PREFIX = 64
"""Bits of an IPv6 address that tell clients apart: a host may take any address below them."""


@dataclass(frozen=True, slots=True)
class Client:
    """Who holds places and waits in line."""

    name: str
    """`key 2`, `admin 0`, `address 192.0.2.7`: equal for all requests that count as one client's."""
    is_exempt: bool = False
    """Whether no quota applies: it came with an admin key."""


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
    """Return the client's address as the name of a client.

    It is the peer's, unless that is a trusted proxy: then the last address in X-Forwarded-For that is no trusted proxy,
    because every proxy appends the address that it saw. What a client wrote before that is never reached.
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
    """Return the addresses of all X-Forwarded-For headers, the latest first."""
    values = [value.decode("latin-1") for name, value in headers if name.lower() == b"x-forwarded-for"]
    return [hop.strip() for hop in ",".join(values).split(",")[: -MAX_HOPS - 1 : -1]] if values else []


def is_trusted(address: Address, trusted: Sequence[Network]) -> bool:
    """Return whether an address is in one of the networks."""
    return any(address.version == network.version and address in network for network in trusted)


def parse_address(text: str) -> Address | None:
    """Return the address that a text begins with, which may have a port; None when there is none."""
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
    """Return what counts as one client: an IPv4 address, or the network of an IPv6 address."""
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))
