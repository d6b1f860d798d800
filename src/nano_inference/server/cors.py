"""CORS: the reply to a preflight request, and the headers that let web pages read a response."""

from __future__ import annotations

import re

from starlette.types import Scope

from nano_inference.server.headers import Headers, single, values

PREFLIGHT_SECONDS = 600
PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    # By the Fetch standard, * does not include authorization.
    (b"access-control-allow-headers", b"authorization, *"),
    (b"access-control-max-age", b"%d" % PREFLIGHT_SECONDS),
)
"""Headers of the reply to a preflight."""


LOCALHOST = "localhost"  # in a list of origins: those of this machine, any port of a loopback name with http or https
_LOOPBACK = re.compile(r"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]{1,5})?")


def granted_origin(headers: Headers, origins: frozenset[str]) -> str | None:
    """Return the value of access-control-allow-origin: the page's origin, * for any page, None to send no header."""
    origin = single(headers, b"origin")
    if origin is None:
        return None
    if "*" in origins:
        return "*"
    is_local = LOCALHOST in origins and _LOOPBACK.fullmatch(origin) is not None
    return origin if is_local or origin in origins else None


def is_preflight(scope: Scope, origins: frozenset[str]) -> bool:
    """Return True for a preflight request of an allowed origin; such a request cannot carry a key."""
    headers = scope["headers"]
    asks = scope["method"] == "OPTIONS" and single(headers, b"access-control-request-method") is not None
    return asks and granted_origin(headers, origins) is not None


def cors_headers(scope: Scope, origins: frozenset[str]) -> list[tuple[bytes, bytes]]:
    """Return the CORS headers of a response; never with credentials."""
    if not origins:
        return []
    vary = (b"vary", b"origin")
    origin = granted_origin(scope["headers"], origins)
    if origin is None:
        return [vary]
    exposed = (b"access-control-expose-headers", b"x-request-id, x-max-tokens, retry-after")
    return [vary, (b"access-control-allow-origin", origin.encode("latin-1")), exposed]


def is_from_page(headers: Headers) -> bool:
    """Return True for a request that a web page caused: browsers add one of these headers, and pages cannot drop it."""
    return bool(values(headers, b"origin") or values(headers, b"sec-fetch-site"))
