"""docs/extending.md: its diff, applied to a copy of the package, works; its dialect, installed, is served."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nano_inference.server.app import App, guard_policy, installed_dialects
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import EngineLink
from nano_inference.server.security import KeyRing
from nano_inference.support.plugins import PluginError
from tests.docs.pages import ROOT
from tests.server.tiny import Running, running

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
KEY = "a-key-of-32-characters-and-more-0"
IN_PYTHON = """
from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.core.step import Row
from nano_inference.executors.cuda.slots import needs_reference
from nano_inference.server.schema import ChatBody
engine = InferenceEngine(EngineConfig(model_path="calculator", num_threads=1))
def drawn(**options):
    return engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True, **options), 4)
(greedy, *_) = drawn(temperature=0)
assert {s.completion_tokens for s in drawn(seed=1, epsilon_cutoff=1.0)} == {greedy.completion_tokens}
asked = [s.completion_tokens for s in drawn(seed=1, temperature=3.0)]
cut = [s.completion_tokens for s in drawn(seed=1, temperature=3.0, epsilon_cutoff=0.02)]
assert asked != cut
row = Row(1, (5,), -1, 0, (0,), 1, SamplingParams(epsilon_cutoff=0.02), "raw", 0, 0)
assert needs_reference(row) and not needs_reference(row._replace(params=SamplingParams(top_k=5)))
body = {"messages": [{"role": "user", "content": "x"}], "epsilon_cutoff": 0.1}
assert ChatBody.model_validate(body).epsilon_cutoff == 0.1
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the page's diff applied."""
    root = tmp_path_factory.mktemp("changed")
    shutil.copytree(ROOT / "src" / "nano_inference", root / "src" / "nano_inference")
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for part in re.split(r"^--- a/", diff, flags=re.MULTILINE)[1:]:
        path = root / part.partition("\n")[0]
        for hunk in re.split(r"^@@.*\n", part, flags=re.MULTILINE)[1:]:
            lines, text = hunk.splitlines(keepends=True), path.read_text()
            before = "".join(line[1:] for line in lines if line[0] != "+")
            assert text.count(before) == 1, f"the page's diff no longer fits {path.name}"
            path.write_text(text.replace(before, "".join(line[1:] for line in lines if line[0] != "-")))
    return root / "src"


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("-c", IN_PYTHON), 0, ""),
        (
            ("-m", "nano_inference", "generate", "1+1", "--model", "calculator", "--epsilon-cutoff", "2"),
            2,
            "nano-inference: --epsilon-cutoff must be in [0, 1], got 2.0\n",
        ),
    ],
    ids=["python and a body", "command line"],
)
def test_the_option_works(changed: Path, arguments: tuple[str, ...], code: int, error: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(changed)}
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, error)


def install(directory: Path, name: str, code: str) -> None:
    """Write a package with the entry point `name` in the group of dialects."""
    (directory / f"{name}_dialect.py").write_text("from __future__ import annotations\n\n" + code)
    info = directory / f"{name}_dialect-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dialect\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[nano_inference.dialects]\n{name} = {name}_dialect:DIALECT\n")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Iterator[Running]:
    """The tiny model, served with the page's dialect among the installed ones."""
    packages = tmp_path_factory.mktemp("packages")
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    install(packages, "shout", code)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(packages)
        with running(tiny_directory, ServerConfig(port=0, log_requests=False, api_key=(KEY,))) as one:
            one.client.headers["authorization"] = f"Bearer {KEY}"
            yield one


def test_its_routes_answer_in_its_form(server: Running) -> None:
    same = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
    text = server.post("/v1/completions", same).json()["choices"][0]["text"]
    assert text and server.post("/shout", {"text": "hello", "length": 12}).json() == {"shout": text.upper()}
    *pieces, done = server.events("/shout", {"text": "hello", "length": 12, "stream": True})
    assert done == "[DONE]" and "".join(one["shout"] for one in pieces) == text.upper()
    assert server.post("/shout/words", {"text": "two words"}).json() == {"words": 2}
    context = server.opened.model.limits.max_model_len
    assert server.client.get("/shout/limits").json() == {"context": context, "running": 0}
    assert server.client.get("/health").json()["can_shout"] is True
    refused = server.post("/shout", {"text": "a", "length": 0})
    assert refused.status_code == 400 and refused.json()["field"] == "length" and "wrong" in refused.json()


def test_the_servers_guard_metrics_and_schema_apply(server: Running) -> None:
    assert server.client.get("/shout/limits", headers={"authorization": "Bearer wrong"}).status_code == 401
    paths = server.client.get("/openapi.json").json()["paths"]
    assert paths["/shout"]["post"]["summary"] == "Continue a text in capitals."
    server.post("/shout/words", {"text": "a"})
    assert "/shout/words" in server.client.get("/metrics").text


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("'a word'", "is a str, not a Dialect"),
        ("Dialect(describing=(Describing(path='load', describe=dict, summary='x'),))", "path must begin with /"),
        ("Dialect(describing=(Describing(path='/props', describe=dict, summary='x'),))", "GET /props is served twice"),
    ],
)
def test_a_wrong_row_ends_the_start(
    value: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"wrong{len(value)}"  # a module of its own
    install(tmp_path, name, f"from nano_inference.server.dialect import Describing, Dialect\nDIALECT = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = ServerConfig()
    with pytest.raises(PluginError, match=complaint):
        App(config, guard_policy(config, KeyRing.of(())), EngineLink(step_timeout=60), installed_dialects())
