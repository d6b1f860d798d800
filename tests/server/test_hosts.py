"""Parsing of hosts. Their use by the guard is tested in test_guard.py."""

from __future__ import annotations

import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.server.security import MAX_HOST, hosts_to_allow, is_loopback_name, parse_host


def test_parse_host_follows_rfc_9110() -> None:
    assert parse_host("A.b-c_d:80") == ("a.b-c_d", 80)
    assert parse_host("[2001:DB8::0:1]:1") == ("2001:db8::1", 1)
    assert parse_host("a" * MAX_HOST) == ("a" * MAX_HOST, None)
    assert parse_host("localhost.:65535") == ("localhost", 65535)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        *((text, "Host must be a name or address") for text in ("", "a b", "a/b", "a:", "::1", "[::1", "a" * 256)),
        *((text, r"Host has a port that is not in \[1, 65535\]") for text in ("a:0", "a:65536", "[::1]:99999")),
        *((text, "Host has an empty label") for text in (".", "a..b", ".a")),
        ("[::1::]", "At most one"),
    ],
)
def test_invalid_host_is_refused(text: str, reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        parse_host(text)


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", "127.255.255.255", "::1", "0:0::1"])
def test_loopback_names(name: str) -> None:
    assert is_loopback_name(name)


@pytest.mark.parametrize("name", ["", "0.0.0.0", "128.0.0.1", "::", "::2", "::ffff:127.0.0.1", "127.1", "x.localhost"])
def test_other_names_are_not_loopback(name: str) -> None:
    assert not is_loopback_name(name)


def test_listening_address_is_allowed_with_allowed_host() -> None:
    assert hosts_to_allow(ServerConfig(host="192.168.1.5")) == ()
    named = ("nano.example", "proxy:8443")
    expected = (("nano.example", None), ("proxy", 8443))
    for host, own in (("192.168.1.5", "192.168.1.5"), ("2001:DB8:0::1", "2001:db8::1")):
        assert hosts_to_allow(ServerConfig(host=host, allowed_host=named)) == (*expected, (own, None))
    for anywhere in ("0.0.0.0", "::"):
        assert hosts_to_allow(ServerConfig(host=anywhere, allowed_host=named)) == expected
    with pytest.raises(ValueError, match=r"^allowed_host: Host must be"):
        hosts_to_allow(ServerConfig(allowed_host=("http://x",)))
