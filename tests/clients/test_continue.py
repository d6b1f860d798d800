"""Continue's command line runs the function that the model calls and reads the answer, by three of its providers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.process import NEEDED, Served, node_program, run, serving
from tests.clients.recipes import block_after

CN = node_program("cn")
pytestmark = pytest.mark.skipif(not Path(CN).exists(), reason=f"Continue's CLI: {NEEDED}")

CONTEXT = 65536
"""Continue asks Anthropic's providers for 32,000 tokens; its prompt has 8,000 bytes, which are tokens of the model."""
WRITTEN, ANSWER = "written by the model", "The file is there."
ROUTES = {"openai": "/v1/chat/completions", "ollama": "/v1/chat/completions", "anthropic": "/v1/messages"}
"""Continue's provider -> the route that its command line calls."""
BASES = {"openai": "/v1", "ollama": "", "anthropic": "/v1/"}


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model writes a file by a function of Continue's."""
    from tests.server.scripted import make_scripted  # imports Transformers

    home = tmp_path_factory.mktemp("writing")
    make_scripted(home, "Write", {"filepath": "made.txt", "content": WRITTEN}, ANSWER, CONTEXT)
    options = ("--served-model-name", "scripted", "--max-model-len", str(CONTEXT), "--kv-cache-bytes", "16777216")
    with serving(home, *options, "--num-threads", "1", "--device", "cpu") as served:
        yield served


def ask(home: Path, server: Served, provider: str, fields: str = "") -> subprocess.CompletedProcess[bytes]:
    """Run Continue in `home`/work with one question."""
    config = block_after("### Continue", server.url, "scripted")
    config = config.replace("provider: openai", f"provider: {provider}")
    (home / "config.yaml").write_text(config.replace(f"{server.url}/v1", f"{server.url}{BASES[provider]}") + fields)
    work = home / "work"
    work.mkdir()
    command = [CN, "--config", str(home / "config.yaml"), "--auto", "-p", "Make a file."]
    return run(command, work, HOME=str(home), CONTINUE_TELEMETRY_ENABLED="0")


@pytest.mark.parametrize("provider", ROUTES)
def test_continue_runs_the_models_function(writing: Served, tmp_path: Path, provider: str) -> None:
    num_before = len(writing.answers())
    done = ask(tmp_path, writing, provider)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert (tmp_path / "work" / "made.txt").read_text() == WRITTEN
    assert done.stdout.decode().strip() == ANSWER
    requests = [one for one in writing.answers()[num_before:] if one.get("path")]
    assert [(one["path"], one["status"]) for one in requests] == [(ROUTES[provider], 200)] * 2


def test_continue_shows_the_servers_refusal(writing: Served, tmp_path: Path) -> None:
    extra = "    requestOptions:\n      extraBodyProperties: {mirostat: 2}\n"
    done = ask(tmp_path, writing, "openai", extra)
    assert done.returncode == 1 and b"mirostat is not supported here" in done.stdout + done.stderr
