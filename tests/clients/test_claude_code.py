"""Claude Code with its defaults: it runs the command that the model asks for, shows reasoning apart, and reads on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.process import NEEDED, Served, node_program, serving, succeed
from tests.clients.recipes import command, snippets
from tests.server.reasoner import ANSWER as SUM
from tests.server.reasoner import THOUGHT, make_reasoner
from tests.server.scripted import make_scripted

CLAUDE = node_program("claude")
pytestmark = pytest.mark.skipif(not Path(CLAUDE).exists(), reason=f"Claude Code: {NEEDED}")

CONTEXT = 262144
"""Claude Code's first prompt has over 100,000 bytes, which are tokens of the scripted model."""
WRITTEN = "written by the model"
ANSWER = "The file is there."
COMMAND = {"command": f"echo '{WRITTEN}' > made.txt; cat made.txt", "description": "Make a file"}
JSON = dict[str, Any]


def served(directory: Path) -> Iterator[Served]:
    options = ("--served-model-name", "scripted", "--max-model-len", str(CONTEXT), "--kv-cache-bytes", "134217728")
    more = ("--max-tokens-per-batch", "4096", "--max-body-bytes", "16MiB", "--num-threads", "1", "--device", "cpu")
    with serving(directory, *options, *more) as one:
        yield one


@pytest.fixture(scope="module")
def commanding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model writes a file by a shell command, and then answers."""
    yield from served(make_scripted(tmp_path_factory.mktemp("commanding"), "Bash", COMMAND, ANSWER, CONTEXT))


@pytest.fixture(scope="module")
def reasoning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model reasons before it calls and before it answers."""
    call = f"<tool_call>\n{json.dumps({'name': 'Bash', 'arguments': COMMAND})}\n</tool_call>"
    yield from served(make_reasoner(tmp_path_factory.mktemp("reasoning"), call=call, positions=CONTEXT))


def claude(home: Path, server: Served, *arguments: str) -> list[JSON]:
    """Run Claude Code in `home`/work; return the events that it prints."""
    work = home / "work"
    work.mkdir(exist_ok=True)
    (recipe,) = snippets("Claude Code", server.url, "scripted")
    printed = command(recipe)
    run = [CLAUDE, *printed.arguments, "--print", "--output-format", "stream-json", "--verbose", *arguments]
    environ = {
        **printed.environ,
        "HOME": str(home),
        "CLAUDE_CONFIG_DIR": str(home / "config"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    events = succeed(run, work, **environ)
    return [json.loads(line) for line in events.splitlines() if line.startswith(b"{")]


def blocks(events: list[JSON], kind: str) -> list[JSON]:
    """Return the blocks of a type in the assistant's and the user's messages."""
    messages = [one["message"] for one in events if one["type"] in ("assistant", "user")]
    return [block for message in messages for block in message["content"] if block["type"] == kind]


def test_claude_code_runs_the_models_command_and_continues(commanding: Served, tmp_path: Path) -> None:
    events = claude(tmp_path, commanding, "--allowedTools", "Bash", "--", "Make a file.")
    (use,) = blocks(events, "tool_use")
    (result,) = blocks(events, "tool_result")
    assert use["name"] == "Bash" and result["tool_use_id"] == use["id"] and WRITTEN in str(result["content"])
    assert (tmp_path / "work" / "made.txt").read_text() == f"{WRITTEN}\n"
    assert [one["text"] for one in blocks(events, "text")] == [ANSWER]
    last = events[-1]
    assert (last["type"], last["is_error"], last["result"]) == ("result", False, ANSWER)
    assert last["usage"]["cache_read_input_tokens"] > 10_000, "the second request has the first one's prefix"


def test_claude_code_receives_reasoning_apart_from_the_answer(reasoning: Served, tmp_path: Path) -> None:
    events = claude(tmp_path, reasoning, "--allowedTools", "Bash", "--", "Make a file.")
    assert [one["thinking"] for one in blocks(events, "thinking")] == ["Look it up.", THOUGHT]
    assert [one["name"] for one in blocks(events, "tool_use")] == ["Bash"]
    assert [one["text"] for one in blocks(events, "text")] == [SUM] and events[-1]["result"] == SUM
