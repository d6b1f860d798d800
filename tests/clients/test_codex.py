"""The Codex CLI with its default configuration: it runs the command that the model asks for, and reads the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.forcing import forcing
from tests.clients.process import NEEDED, Served, node_program, serving, succeed
from tests.clients.recipes import block_after
from tests.server.scripted import make_scripted

CODEX = node_program("codex")
pytestmark = pytest.mark.skipif(not Path(CODEX).exists(), reason=f"the Codex CLI: {NEEDED}")

CONTEXT = 131072
"""Codex' first prompt has 39,000 bytes, which are tokens of the scripted model."""
WRITTEN = "written by the model"
COMMAND = f"echo '{WRITTEN}' > made.txt; cat made.txt"
ANSWER = "The file is there."
FUNCTION = "exec_command"
ASKING = ("exec", "--skip-git-repo-check", "--json", "--sandbox", "workspace-write")
JSON = dict[str, Any]


def served(directory: Path, name: str, arguments: JSON) -> Iterator[Served]:
    """Serve a model that calls the function, and then answers."""
    make_scripted(directory, name, arguments, ANSWER, CONTEXT)
    options = ("--served-model-name", "scripted", "--max-model-len", str(CONTEXT), "--kv-cache-bytes", "67108864")
    batch = ("--max-tokens-per-batch", "4096")  # the long prompt takes few steps
    with serving(directory, *options, *batch, "--num-threads", "1", "--device", "cpu") as one:
        yield one


@pytest.fixture(scope="module")
def commanding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model writes a file by a shell command."""
    yield from served(tmp_path_factory.mktemp("commanding"), FUNCTION, {"cmd": COMMAND})


@pytest.fixture(scope="module")
def delegating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model calls a function in one of Codex' namespaces."""
    yield from served(tmp_path_factory.mktemp("delegating"), "multi_agent_v1.close_agent", {"target": "no-agent"})


def codex(home: Path, server: Served, *arguments: str, url: str = "") -> list[JSON]:
    """Run the Codex CLI in `home`/work; return the events that it prints.

    `url` is that of a proxy before the server.
    """
    config = block_after("`~/.codex/config.toml`", url or server.url, "scripted", "server.md")
    (home / "config.toml").write_text(config)
    work = home / "work"
    work.mkdir(exist_ok=True)
    printed = succeed([CODEX, *arguments], work, CODEX_HOME=str(home))
    return [json.loads(line) for line in printed.splitlines() if line.startswith(b"{")]


def completed(events: list[JSON], kind: str) -> list[JSON]:
    """Return the completed items of a type."""
    return [one["item"] for one in events if one["type"] == "item.completed" and one["item"]["type"] == kind]


def calls_in(home: Path) -> list[JSON]:
    """Return the function calls and outputs that Codex recorded."""
    (record,) = home.glob("sessions/**/*.jsonl")
    items = [json.loads(line).get("payload", {}) for line in record.read_text().splitlines()]
    return [item for item in items if item.get("type") in ("function_call", "function_call_output")]


def test_codex_runs_the_models_command_and_continues(commanding: Served, tmp_path: Path) -> None:
    events = codex(tmp_path, commanding, *ASKING, "Make a file.")
    (command,) = completed(events, "command_execution")
    assert WRITTEN in command["aggregated_output"] and command["exit_code"] == 0
    assert (tmp_path / "work" / "made.txt").read_text() == f"{WRITTEN}\n"
    assert [one["text"] for one in completed(events, "agent_message")] == [ANSWER]
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["cached_input_tokens"] > 10_000
    again = codex(tmp_path, commanding, "exec", "resume", "--last", "--skip-git-repo-check", "--json", "Look again.")
    assert [one["text"] for one in completed(again, "agent_message")] == [ANSWER]
    requests = [one for one in commanding.answers() if one.get("path") == "/v1/responses"]
    assert [one["status"] for one in requests] == [200] * 4


def test_codex_receives_calls_of_its_namespaces(delegating: Served, tmp_path: Path) -> None:
    events = codex(tmp_path, delegating, *ASKING, "Delegate.")
    assert [one["text"] for one in completed(events, "agent_message")] == [ANSWER]
    call, output = calls_in(tmp_path)
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")
    assert output["call_id"] == call["call_id"] and "no-agent" in output["output"]


def test_codex_shows_the_servers_refusal(commanding: Served, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="web_search"):
        codex(tmp_path, commanding, *ASKING, "-c", 'web_search="live"', "Search the web.")


def forced(body: JSON) -> JSON:
    """Return Codex' request with a named function and the only command that its schema allows, or with an answer."""
    schema = {"type": "object", "properties": {"cmd": {"enum": [COMMAND]}}, "required": ["cmd"]}
    tools = [{**tool, "parameters": schema} if tool.get("name") == FUNCTION else tool for tool in body["tools"]]
    if any(item.get("type") == "function_call_output" for item in body["input"]):
        form = {"type": "json_schema", "name": "answer", "schema": {"enum": [ANSWER]}}
        return {**body, "tools": tools, "tool_choice": "none", "text": {"format": form}}
    return {**body, "tools": tools, "tool_choice": {"type": "function", "name": FUNCTION}}


def test_codex_runs_a_command_that_the_default_model_writes_under_a_grammar(
    default_model_path: Path, tmp_path: Path
) -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar`")
    options = ("--served-model-name", "scripted", "--max-model-len", "16384", "--allow-long-context", "--device", "cpu")
    with serving(default_model_path, *options, "--num-threads", "1") as server, forcing(server.url, forced) as url:
        events = codex(tmp_path, server, *ASKING, "Make a file.", url=url)
        (command,) = completed(events, "command_execution")
        assert WRITTEN in command["aggregated_output"] and command["exit_code"] == 0
        assert (tmp_path / "work" / "made.txt").read_text() == f"{WRITTEN}\n"
        assert [json.loads(one["text"]) for one in completed(events, "agent_message")] == [ANSWER]
        assert events[-1]["usage"]["cached_input_tokens"] > 8000, "the second request has the first one's prefix"
