"""Unusual spellings of command paths do not bypass the admin key; errors of the guard have the dialect's form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nano_inference.server.config import ServerConfig
from tests.server.tiny import Running, running

USER, ADMIN = "ordinary-key", "admin-key-1"


@pytest.fixture(scope="module")
def keyed(tiny_directory: Path) -> Iterator[Running]:
    config = ServerConfig(port=0, log_requests=False, enable_rl=True, api_key=(USER,), admin_key=(ADMIN,))
    with running(tiny_directory, config) as one:
        yield one


@pytest.mark.parametrize("path", ["/pause", "/v1/load_lora_adapter"])
def test_no_spelling_of_a_command_bypasses_the_admin_key(keyed: Running, path: str) -> None:
    """A router might match a path with a trailing line break, which is not in `ADMIN_PATHS`."""
    spelled = (path, path + "%0A", path + "%0a%0a", path + "%0D", path + "%00", path + "%7F", path + "/", path.upper())
    for one in (*spelled, "/" + path, "/." + path, path.replace("/", "/%2e/", 1), path + "%3F", path + ";x=1"):
        for method in ("POST", "GET", "PUT", "HEAD", "OPTIONS"):
            reply = keyed.client.request(method, keyed.url + one, headers={"authorization": f"Bearer {USER}"}, json={})
            assert reply.status_code in (400, 403, 404, 405, 415), (one, method, reply.status_code)
    assert keyed.client.get("/is_paused", headers={"authorization": f"Bearer {USER}"}).json()["is_paused"] is False


def test_guard_errors_have_the_form_of_the_dialect(keyed: Running) -> None:
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    reply = keyed.post("/v1/messages", body)
    assert reply.status_code == 401 and reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "authentication_error"
    assert keyed.client.get("/v1/messages", headers={"x-api-key": USER}).json()["type"] == "error"
    assert "detail" in keyed.post("/chat/completions", body).json()
    assert keyed.post("/v1/completions", {"prompt": "x"}).json()["error"]["code"] == "invalid_api_key"
