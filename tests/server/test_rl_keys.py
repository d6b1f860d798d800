"""Keys of the trainer routes: admin keys, ordinary keys, web pages, spellings of paths, and checks at server start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.app import guard_policy
from nano_inference.server.config import ServerConfig
from nano_inference.server.security import KeyRing, load_admin_keys, load_keys
from nano_inference.server.trainers.routes import ADMIN_PATHS, QUESTIONS
from tests.cases import failures
from tests.server.tiny import Running
from tests.server.trainer import ok, refused, serving

pytestmark = pytest.mark.slow

KEY, ADMIN = "ordinary-key", "admin-key-1"
ROOT = Path(__file__).resolve().parents[2]


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with serving(tiny_directory, api_key=(KEY,), admin_key=(ADMIN,)) as one:
        yield one


def test_command_needs_an_admin_key(server: Running) -> None:
    def check(path: str) -> None:
        refused(server.post(path, {"tags": 1}), 401, "admin key")
        assert refused(server.post(path, {"tags": 1}, **bearer(KEY)), 403, "admin key")["code"] == "admin_key_needed"
        refused(server.post(path, {"tags": 1}, **bearer("unknown-key")), 403, "admin key")
        accepted = server.post(path, {"is_checkpoint_format": 1, "tags": 1, "mode": 1}, **bearer(ADMIN))
        assert accepted.status_code not in (401, 403)

    assert failures(check, zip(sorted(ADMIN_PATHS))) == []


def test_question_needs_an_ordinary_key(server: Running) -> None:
    for path in sorted(QUESTIONS):
        refused(server.client.get(path), 401)
        for key in (KEY, ADMIN):
            assert server.client.get(path, headers=bearer(key)).status_code == 200


def test_admin_key_is_accepted_on_ordinary_routes(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    for key in (KEY, ADMIN):
        assert server.post("/v1/completions", body, **bearer(key)).status_code == 200
    refused(server.post("/v1/completions", body), 401)
    refused(server.post("/v1/completions", body, **bearer("unknown-key")), 401)


def test_admin_key_has_its_own_cache_salt() -> None:
    keys = guard_policy(ServerConfig(enable_rl=True, admin_key=(ADMIN,)), KeyRing.of((KEY,))).keys
    indices = [keys.identify(key) for key in (KEY, ADMIN)]
    assert len({keys.cache_salt(index, None) for index in indices}) == 2


def test_admin_key_alone_does_not_protect_ordinary_routes(tiny_directory: Path) -> None:
    with serving(tiny_directory, admin_key=(ADMIN,)) as one:
        assert one.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
        assert one.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, **bearer(ADMIN)).status_code == 200
        refused(one.post("/pause", {}), 401)
        refused(one.post("/pause", {}, **bearer("unknown-key")), 403)
        ok(one.post("/resume", {}, **bearer(ADMIN)))


def test_ordinary_key_may_command_if_there_is_no_admin_key(tiny_directory: Path) -> None:
    with serving(tiny_directory, api_key=(KEY,)) as one:
        refused(one.post("/resume", {}), 401)
        ok(one.post("/resume", {}, **bearer(KEY)))


@pytest.mark.parametrize("header", [{"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_command_from_a_web_page_is_refused(server: Running, header: dict[str, str], method: str) -> None:
    response = server.client.request(method, "/flush_cache", headers={**header, **bearer(ADMIN)})
    assert refused(response, 403, "web pages")["code"] == "not_from_pages"


def test_a_get_that_changes_something_is_refused_to_a_browser(tiny_directory: Path) -> None:
    """Of an image in a page of another site, an older browser says only which languages its user reads."""
    with serving(tiny_directory) as open_to_this_machine:
        client = open_to_this_machine.client
        refused(client.get("/flush_cache", headers={"accept-language": "en"}), 403, "web pages")
        assert client.get("/flush_cache").status_code == 200


def test_security_md_lists_the_routes_that_answer_without_a_key(server: Running) -> None:
    (text,) = re.findall(r"With keys, every route .*? except (.*?)\)\. ", (ROOT / "SECURITY.md").read_text(), re.DOTALL)
    answering = set()
    for route in server.app.routes:
        path = re.sub(r"\{.*?\}", "x", route.path)
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"):
            if server.client.request(method, path).status_code != 401:
                answering.add((method, path))
    assert answering == {(method, path) for path in re.findall("`(.*?)`", text) for method in ("GET", "HEAD")}


def test_command_without_body_is_accepted_and_form_is_refused(server: Running) -> None:
    ok(server.client.post("/resume", headers=bearer(ADMIN)))
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        headers = {**bearer(ADMIN), "content-type": kind}
        refused(server.client.post("/resume", headers=headers), 415)
        refused(server.client.post("/pause", headers=headers, content=b"{}"), 415)
    refused(server.client.post("/v1/completions", headers=bearer(KEY)), 400)
    refused(
        server.client.post("/pause", headers={**bearer(ADMIN), "content-type": "application/json"}, content=b"x"), 400
    )


PUBLIC: dict[str, Any] = {"host": "0.0.0.0", "api_key": (KEY,)}


@pytest.mark.parametrize("more", [{"admin_key": (ADMIN,)}, {"insecure": True}, {"host": "127.0.0.1"}, {"host": "::1"}])
def test_public_server_with_enable_rl_needs_an_admin_key(more: dict[str, Any]) -> None:
    ring = KeyRing.of((KEY,))
    with pytest.raises(ValueError, match=r"^enable_rl: host 0\.0\.0\.0 .*set admin_key_file or admin_key, or insecure"):
        guard_policy(ServerConfig(enable_rl=True, **PUBLIC), ring)
    policy = guard_policy(ServerConfig(enable_rl=True, **{**PUBLIC, **more}), ring)
    assert policy.admin_paths == ADMIN_PATHS
    assert guard_policy(ServerConfig(**PUBLIC), ring).admin_paths == frozenset()


def test_admin_keys_are_read_from_option_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# admin keys\n{ADMIN}\nanother-key\n")
    file.chmod(0o600)
    config = ServerConfig(enable_rl=True, admin_key=(ADMIN,), admin_key_file=str(file))
    assert load_admin_keys(config) == (ADMIN, "another-key") and load_keys(config) == ()
    assert ADMIN not in repr(config)
    file.chmod(0o644)
    with pytest.raises(ValueError, match=r"^admin_key_file may be read by others"):
        guard_policy(config, KeyRing.of(()))
    with pytest.raises(ValueError, match=r"^admin_key: key 1 is shorter") as caught:
        load_admin_keys(ServerConfig(enable_rl=True, admin_key=("short",)))
    assert "short-" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"weights_dir": "here"}, "weights_dir is for a trainer: it needs enable_rl"),
        ({"admin_key": ("admin-key-1",)}, "admin_key is for a trainer: it needs enable_rl"),
        ({"weights_dir": "", "enable_rl": True}, "weights_dir"),
        ({"enable_rl": 1}, "enable_rl"),
        ({"weight_timeout": 0}, "weight_timeout"),
        ({"admin_key": "one-text"}, "admin_key"),
    ],
)
def test_invalid_options_are_named(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        ServerConfig(**fields)


@pytest.mark.parametrize("path", ["/pause", "/v1/load_lora_adapter"])
def test_no_spelling_of_a_command_bypasses_the_admin_key(server: Running, path: str) -> None:
    """A router might match a path with a trailing line break, which is not in `ADMIN_PATHS`."""
    spelled = (path, path + "%0A", path + "%0a%0a", path + "%0D", path + "%00", path + "%7F", path + "/", path.upper())
    for one in (*spelled, "/" + path, "/." + path, path.replace("/", "/%2e/", 1), path + "%3F", path + ";x=1"):
        for method in ("POST", "GET", "PUT", "HEAD", "OPTIONS"):
            reply = server.client.request(method, server.url + one, headers={"authorization": f"Bearer {KEY}"}, json={})
            assert reply.status_code in (400, 403, 404, 405, 415), (one, method, reply.status_code)
    assert server.client.get("/is_paused", headers={"authorization": f"Bearer {KEY}"}).json()["is_paused"] is False


def test_guard_errors_have_the_form_of_the_dialect(server: Running) -> None:
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    reply = server.post("/v1/messages", body)
    assert reply.status_code == 401 and reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "authentication_error"
    assert server.client.get("/v1/messages", headers={"x-api-key": KEY}).json()["type"] == "error"
    assert "detail" in server.post("/chat/completions", body).json()
    assert server.post("/v1/completions", {"prompt": "x"}).json()["error"]["code"] == "invalid_api_key"
