"""aider edits a file as the model says; it pins its dependencies and so has a separate virtual environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.process import NEEDED, Served, run, serving
from tests.clients.recipes import command, snippets

AIDER = Path(sys.prefix) / "aider" / "bin" / "aider"
pytestmark = pytest.mark.skipif(not AIDER.exists(), reason=f"aider: {NEEDED}")

CONTEXT = 32768
"""aider's prompt has 10,000 bytes, which are tokens of the scripted model."""
FILE, OLD, NEW = "hello.py", "print('old')\n", "print('new')\n"
EDITS = {
    "diff": f"{FILE}\n```python\n<<<<<<< SEARCH\n{OLD}=======\n{NEW}>>>>>>> REPLACE\n```\n",
    "whole": f"{FILE}\n```\n{NEW}```\n",
}
"""aider's edit format -> the model's answer."""
QUIET = ("--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")


@pytest.fixture(scope="module")
def editors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """A server for each edit format, whose model writes that edit."""
    from tests.server.scripted import make_scripted  # imports Transformers

    options = ("--served-model-name", "scripted", "--max-model-len", str(CONTEXT), "--kv-cache-bytes", "8388608")
    homes = {kind: tmp_path_factory.mktemp(kind) for kind in EDITS}
    for kind, home in homes.items():
        make_scripted(home, "none", {}, EDITS[kind], CONTEXT)
    with (
        serving(homes["diff"], *options, "--num-threads", "1", "--device", "cpu") as diff,
        serving(homes["whole"], *options, "--num-threads", "1", "--device", "cpu") as whole,
    ):
        yield {"diff": diff, "whole": whole}


def aider(home: Path, server: Served, *arguments: str, provider: str = "openai") -> subprocess.CompletedProcess[bytes]:
    """Let aider edit a file in `home`/work with one request."""
    work = home / "work"
    work.mkdir()
    (work / FILE).write_text(OLD)
    by_openai, by_ollama = (command(recipe) for recipe in snippets("aider", server.url, "scripted"))
    chosen = by_openai if provider == "openai" else by_ollama
    model = [word.replace("ollama_chat/", f"{provider}/") for word in chosen.arguments]
    whole = [str(AIDER), *model, "--message", "Print new.", *QUIET, *arguments, FILE]
    return run(whole, work, HOME=str(home), LITELLM_LOCAL_MODEL_COST_MAP="True", **chosen.environ)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("provider", "path"),
    [("openai", "/v1/chat/completions"), ("ollama_chat", "/api/chat"), ("ollama", "/api/generate")],
)
def test_aider_applies_the_models_edit(
    editors: dict[str, Served], tmp_path: Path, provider: str, path: str, streams: bool
) -> None:
    mode = "--stream" if streams else "--no-stream"
    num_before = len(editors["diff"].answers())
    done = aider(tmp_path, editors["diff"], "--edit-format", "diff", mode, provider=provider)
    assert (tmp_path / "work" / FILE).read_text() == NEW, done.stdout.decode()[-2000:]
    assert b"Applied edit to hello.py" in done.stdout
    requests = [(one["path"], one["status"]) for one in editors["diff"].answers()[num_before:] if one.get("path")]
    assert [one for one in requests if one[0] != "/api/show"] == [(path, 200)]


def test_aider_shows_the_servers_refusal(editors: dict[str, Served], tmp_path: Path) -> None:
    settings = tmp_path / "settings.yml"
    settings.write_text("- name: openai/scripted\n  extra_params:\n    extra_body: {mirostat: 2}\n")
    done = aider(tmp_path, editors["diff"], "--model-settings-file", str(settings))
    assert b"mirostat is not supported here" in done.stdout and (tmp_path / "work" / FILE).read_text() == OLD
