"""API keys: validation, identification, and prefix-cache salts."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
from pathlib import Path

import pytest

from nano_inference.server import security
from nano_inference.server.config import ServerConfig
from nano_inference.server.security import MAX_HOST, KeyRing, hosts_to_allow, load_keys, parse_host

FIRST, SECOND = "first-key-1", "second-key-2"


def key_file(folder: Path, text: str | bytes, mode: int = 0o600) -> ServerConfig:
    path = folder / "keys"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return ServerConfig(api_key_file=str(path))


def test_keys_of_option_and_file_are_distinct(tmp_path: Path) -> None:
    file = key_file(tmp_path, f"# ours\n\n  {SECOND}  \r\n{FIRST}\n#{'x' * 20}\nthird-key-3")
    config = ServerConfig(api_key=(FIRST,), api_key_file=file.api_key_file)
    assert load_keys(config) == (FIRST, SECOND, "third-key-3")
    assert load_keys(ServerConfig(api_key=("a" * 8, "~!#$%^&*"))) == ("a" * 8, "~!#$%^&*")
    assert load_keys(ServerConfig()) == ()


def test_short_keys_need_insecure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="api_key: key 1 is shorter than 8 characters"):
        load_keys(ServerConfig(api_key=("a-short",)))
    assert load_keys(ServerConfig(api_key=("a-short",), insecure=True)) == ("a-short",)
    admin = ServerConfig(admin_key=("a-short",), enable_rl=True, insecure=True)
    with pytest.raises(ValueError, match="admin_key: key 1 is shorter than 8 characters"):
        security.load_admin_keys(admin)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610, 0o601])
def test_key_file_readable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match=rf"^api_key_file may be read by others .*mode {mode:o}"):
        load_keys(key_file(tmp_path, FIRST, mode))


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"^api_key_file contains no key"):
        load_keys(key_file(tmp_path, text))


def test_key_file_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^api_key_file cannot be read: .*No such file"):
        load_keys(ServerConfig(api_key_file=str(tmp_path / "missing")))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match=r"^api_key_file is not a file"):
        load_keys(ServerConfig(api_key_file=str(tmp_path / "pipe")))
    with pytest.raises(ValueError, match=r"^api_key_file"):
        load_keys(ServerConfig(api_key_file=str(tmp_path)))
    with pytest.raises(ValueError, match=r"^api_key_file is larger than"):
        load_keys(key_file(tmp_path, "k" * (security.MAX_KEY_FILE + 1)))


BAD_KEYS = ["short-7", "with a blank", "umläut-key", "del\x7f-key-key", "nul\x00-key-key", "\u20ac" * 8]


@pytest.mark.parametrize("bad", BAD_KEYS)
def test_invalid_key_error_does_not_show_key(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ValueError, match=r"^api_key: key 2 ") as listed:
        load_keys(ServerConfig(api_key=(FIRST, bad)))
    with pytest.raises(ValueError, match=r"^api_key_file: line 3 ") as filed:
        load_keys(key_file(tmp_path, f"# keys\n{FIRST}\n{bad}\n"))
    assert bad not in str(listed.value) + str(filed.value)


def test_identify_returns_index_of_each_key() -> None:
    ring = KeyRing.of((FIRST, SECOND))
    assert (ring.identify(FIRST), ring.identify(SECOND)) == (0, 1)
    wrong = [None, "", "x", FIRST[:-1], FIRST + "x", FIRST.upper(), f" {FIRST}", FIRST + SECOND, "\udc80", "é" * 10]
    assert [ring.identify(presented) for presented in wrong] == [None] * len(wrong)
    assert KeyRing.of(()).identify("") is None
    assert KeyRing.of(()).identify(FIRST) is None


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    ring = KeyRing.of((FIRST, SECOND, "third-key-3"))
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for presented in (FIRST, "wrong", None):
        compared.clear()
        ring.identify(presented)
        assert compared == list(ring.digests)
    assert {len(digest) for digest in ring.digests} == {32}


def test_repr_shows_no_key() -> None:
    ring = KeyRing.of((FIRST,), secret=b"our-secret")
    assert repr(ring) == "KeyRing(is_shared=False)"
    assert FIRST not in str(ring.digests)


SALTS = [None, "", "a", "b", "a" * 128, "\udc80"]


def test_different_keys_or_requests_have_different_salts() -> None:
    ring = KeyRing.of((FIRST, SECOND))
    salts = {(key, asked or ""): ring.cache_salt(key, asked) for key, asked in itertools.product((0, 1), SALTS)}
    assert len(salts) == 10 and len(set(salts.values())) == 10
    assert all(ring.cache_salt(key, asked) == salt for (key, asked), salt in salts.items())
    assert all(len(salt) == 64 and int(salt, 16) >= 0 for salt in salts.values())


def test_salt_is_keyed_hash_of_key_and_request() -> None:
    ring = KeyRing.of((FIRST,), secret=b"s")
    message = hashlib.sha256(FIRST.encode()).digest() + b"mine"
    assert ring.cache_salt(0, "mine") == hmac.new(b"s", message, "sha256").hexdigest()
    assert ring.cache_salt(0, "mine") != KeyRing.of((FIRST,), secret=b"t").cache_salt(0, "mine")
    assert KeyRing.of((FIRST,)).secret != KeyRing.of((FIRST,)).secret
    assert len(KeyRing.of(()).secret) >= 16
    assert KeyRing.of((SECOND, FIRST), secret=b"s").cache_salt(1, "mine") == ring.cache_salt(0, "mine")


def test_salt_without_key_is_refused_unless_shared() -> None:
    with pytest.raises(ValueError, match=r"^key_index"):
        KeyRing.of((FIRST,)).cache_salt(None, "mine")


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
