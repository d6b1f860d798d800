"""The worked example of docs/adding-a-dialect.md: an installed package, served with a tiny model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nano_inference.server.app import App, guard_policy, installed_dialects
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import EngineLink
from nano_inference.server.security import KeyRing
from nano_inference.support.plugins import PluginError
from tests.server.tiny import Running, make_tiny, running

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-dialect.md"
KEY = "a-key-of-32-characters-and-more-0"


def install(directory: Path, name: str, code: str) -> None:
    """Write a package with the entry point `name` in the group of dialects."""
    (directory / f"{name}_dialect.py").write_text("from __future__ import annotations\n\n" + code)
    info = directory / f"{name}_dialect-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dialect\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[nano_inference.dialects]\n{name} = {name}_dialect:DIALECT\n")


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Iterator[Running]:
    """The tiny model, served with the page's dialect among the installed ones."""
    packages = tmp_path_factory.mktemp("packages")
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    install(packages, "shout", code)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(packages)
        with running(tiny_directory) as one:
            yield one


def test_a_reply_has_the_dialect_s_form(server: Running) -> None:
    same = {"prompt": "hello", "max_tokens": 16, "temperature": 0}
    text = server.post("/v1/completions", same).json()["choices"][0]["text"]
    assert text and server.post("/shout", {"text": "hello"}).json() == {"shout": text.upper()}


def test_a_stream_has_the_dialect_s_events(server: Running) -> None:
    whole = server.post("/shout", {"text": "hello", "length": 12}).json()["shout"]
    *pieces, done = server.events("/shout", {"text": "hello", "length": 12, "stream": True})
    assert done == "[DONE]" and len(pieces) > 1 and "".join(one["shout"] for one in pieces) == whole


def test_routes_without_the_engine_answer(server: Running) -> None:
    assert server.post("/shout/words", {"text": "two words"}).json() == {"words": 2}
    assert server.client.get("/shout/limits").json() == {
        "context": server.opened.model.limits.max_model_len,
        "running": 0,
    }
    assert server.client.get("/health").json()["can_shout"] is True
    assert server.client.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize(
    ("path", "body", "field", "why"),
    [
        ("/shout", {"text": "a", "length": 0}, "length", "length: input should be"),
        ("/shout", {}, "text", "text"),
        ("/shout/words", {"text": " "}, "text", "text has no words"),
    ],
)
def test_errors_have_the_dialect_s_form(server: Running, path: str, body: object, field: str, why: str) -> None:
    refused = server.post(path, body)
    assert refused.status_code == 400 and set(refused.json()) == {"wrong", "field"}
    assert refused.json()["field"] == field and why in refused.json()["wrong"]
    assert server.client.get(path).status_code == 405


def test_its_routes_are_described_and_counted(server: Running) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    assert paths["/shout"]["post"]["summary"] == "Continue a text in capitals."
    assert "get" in paths["/shout/limits"] and "post" in paths["/shout/words"]
    server.post("/shout/words", {"text": "a"})
    assert 'route="/shout/words"' in server.client.get("/metrics").text.replace("handler=", "route=")


def test_the_guard_asks_for_a_key_on_its_routes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_directory: Path
) -> None:
    code = "from nano_inference.server.dialect import Describing, Dialect\n"
    code += "DIALECT = Dialect(describing=(Describing(path='/x', describe=lambda m, o: {}, summary='x'),))"
    install(tmp_path, "guarded", code)
    monkeypatch.syspath_prepend(tmp_path)
    with running(tiny_directory, ServerConfig(port=0, log_requests=False, api_key=(KEY,))) as server:
        assert server.client.get("/x").status_code == 401
        assert server.client.get("/x", headers={"authorization": f"Bearer {KEY}"}).json() == {}


@pytest.mark.parametrize(
    ("method", "path", "owner"),
    [("GET", "/metrics", "the server"), ("GET", "/props", "llamacpp"), ("POST", "/pause", "the server")],
)
def test_a_path_that_is_taken_is_refused_with_both_owners(
    method: str, path: str, owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = f"Describing(path={path!r}, describe=lambda m, o: {{}}, summary='x')"
    field = "describing"
    if method == "POST":
        row, field = f"Converting(path={path!r}, body=Body, work=lambda b, m: {{}}, summary='x')", "converting"
    code = "from nano_inference.server.dialect import Converting, Describing, Dialect\n"
    code += f"from nano_inference.server.schema import Body\nDIALECT = Dialect({field}=({row},))"
    install(tmp_path, f"taken{path[1:]}", code)
    monkeypatch.syspath_prepend(tmp_path)
    config = ServerConfig()
    with pytest.raises(PluginError, match=f"{method} {path} is served twice: .*by {owner}"):
        App(config, guard_policy(config, KeyRing.of(())), EngineLink(step_timeout=60), installed_dialects())


def test_a_row_of_another_kind_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "wrong", "DIALECT = 'a word'")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"dialects wrong of the package wrong-dialect: .* is a str, not a Dialect"):
        installed_dialects()


def test_a_path_without_a_slash_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from nano_inference.server.dialect import Describing, Dialect\n"
    code += "DIALECT = Dialect(describing=(Describing(path='load', describe=lambda m, o: {}, summary='x'),))"
    install(tmp_path, "bare", code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"of the package bare-dialect: .* path must begin with /, got 'load'"):
        installed_dialects()
