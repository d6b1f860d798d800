"""Parse the command lines of the documentation, and execute each by the first of `RULES` that fits.

A command that fits none fails its test, so every command on a page is executed or checked.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from nano_inference.cli import main
from tests.cli.screen import PATIENCE_S, terminal
from tests.docs.pages import ROOT, Block

SHOWN_URL = "http://127.0.0.1:8000"
"""Where the pages say that a server listens."""
OWN_MODEL = ("-m", "--model", "--nanochat", "-i", "--server")
JSON_TOOL = ("python", "-m", "json.tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a block."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    pipe: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()
    """What is typed while it runs, in a session: the lines behind `> `."""
    output: str | None = None
    """What the page shows of it, typed lines among it; None in a block that shows none."""

    def begins(self, *words: str) -> bool:
        """Whether these are its first words."""
        return self.words[: len(words)] == words

    def has(self, *options: str) -> bool:
        """Whether one of these options is among its words."""
        return any(word.partition("=")[0] in options for word in self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a page's commands run."""

    directory: Path
    monkeypatch: pytest.MonkeyPatch
    succeeded: list[Command]
    """What succeeded on any page and shows no output."""
    fixture: Callable[[str], Any]
    """Return a fixture: `tiny_server`, `default_server`, or `forker`, whose forks are servers and chats."""


def commands_of(block: Block) -> list[Command]:
    """Return a block's commands. In a session (`console`) they follow a dollar sign, with their output behind them."""
    if block.language != "console":
        text = re.sub(r"\\\n\s*", " ", block.text)
        return [found for line in text.splitlines() if (found := command_of(line)) is not None]
    first, *parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert first == "", f"{block.name}: a session begins with a command behind `$ `"
    return [session_of(part) for part in parts]


def session_of(part: str) -> Command:
    """Return a command with what is typed into it and what it shows."""
    end = re.search(r"(?<!\\)\n", part)
    assert end is not None
    command, shown = command_of(re.sub(r"\\\n\s*", " ", part[: end.start()])), part[end.end() :]
    assert command is not None
    typed = tuple(line.removeprefix("> ") for line in shown.splitlines() if line.startswith("> "))
    return replace(command, typed=typed, output=shown)


def command_of(line: str) -> Command | None:
    """Return the command of a line, None for an empty one or a comment."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|>&;()<")
    lexer.whitespace_split = True
    words, environment, pipe = list(lexer), {}, ()
    if not words:
        return None
    while re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        name, _, environment[name] = words.pop(0).partition("=")
    if "|" in words:
        at = words.index("|")
        words, pipe = words[:at], tuple(words[at + 1 :])
    rest = {word for word in (*words, *pipe) if set(word) <= set("|>&;()<") or word.startswith("$")}
    assert not rest, f"{line}: this test knows no {' '.join(sorted(rest))}"
    assert pipe in ((), JSON_TOOL), f"{line}: this test knows no pipe into {' '.join(pipe)}"
    return Command(words=tuple(words), environment=environment, pipe=pipe)


def differs(shown: str, seen: str) -> str | None:
    """Return how an output differs from the one on the page, None when it does not.

    `...` on the page matches any text in a line; alone on a line it matches any number of lines.
    """
    pattern = ""
    for line in shown.rstrip().splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(map(re.escape, line.rstrip().split("..."))) + r"[ ]*\n"
    if re.fullmatch(pattern, seen.rstrip() + "\n" if seen.strip() else ""):
        return None
    return f"the page shows\n{shown}\nbut this came\n{seen}"


def run_main(command: Command, place: Place) -> str:
    """Run `nano-inference` in this process, with pydantic not yet imported, as in a process of its own."""
    stream = io.StringIO()
    with place.monkeypatch.context() as patch:
        patch.delitem(sys.modules, "pydantic", raising=False)  # with it cyclopts would check values once more
        if command.output is None:
            patch.setenv("NANO_INFERENCE_MAX_TOKENS", "16")  # a block that shows no output need not wait for long ones
        for name, value in command.environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdin", io.StringIO("Hello\n"))
        words = [str(place.directory / word[2:]) if word.startswith("~/") else word for word in command.words[1:]]
        words = [place.fixture("tiny_server").url if word == SHOWN_URL else word for word in words]
        with redirect_stdout(stream), redirect_stderr(stream):
            code = main(words)
    is_refusal = command.output is not None and command.output.startswith("nano-inference: ")
    assert code == (2 if is_refusal else 0), f"exit code {code}: {stream.getvalue()}"
    return stream.getvalue()


def with_words(*more: str) -> Callable[[Command, Place], str]:
    """Run a command with further words."""
    return lambda command, place: run_main(replace(command, words=(*command.words, *more)), place)


def type_along(command: Command, place: Place) -> str:
    """Run a command in a terminal, type each line at its prompt, leave with Ctrl-D; return what the screen shows."""
    with terminal(
        *command.words[1:], forker=place.fixture("forker"), rows=50, columns=120, **command.environment
    ) as screen:
        for line in command.typed:
            screen.ask(line)
        screen.prompt()
        screen.send("\x04")
        assert screen.leave() == 0, screen.text()
        return screen.text().rstrip(">")


def start_server(command: Command, place: Place) -> str:
    """Start a server at a free port, read what it says until it is ready, stop it as Ctrl-C does."""
    lines: list[str] = []
    process = place.fixture("forker").start([*command.words[1:], "--port", "0"])
    assert process.stderr is not None
    with process.stderr as stderr:
        for line in stderr:
            lines.append(line)
            if line.startswith("  curl"):
                process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0, lines
    return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:8000", "".join(lines))


def send(command: Command, place: Place) -> str:
    """Send what curl would send to a running server; the reply must be 200."""
    url, method, headers, data = None, "GET", {}, None
    words = iter(command.words[1:])
    for word in words:
        if word in ("-H", "--header"):
            name, _, value = next(words).partition(":")
            headers[name.strip()] = value.strip()
        elif word in ("-d", "--data"):
            data, method = next(words), "POST"
        elif word != "-s":
            assert url is None and word.startswith(SHOWN_URL), f"curl: this test knows no {word}"
            url = word
    assert url is not None
    server = place.fixture("tiny_server" if command.output is None else "default_server")
    address = url.replace(SHOWN_URL, server.url)
    reply = httpx2.request(method, address, headers=headers, content=data, timeout=60)
    assert reply.status_code == 200, f"{reply.status_code} {reply.text}"
    return json.dumps(reply.json(), indent=4) + "\n" if command.pipe else reply.text


def plan_target(command: Command, place: Place) -> str:
    """Let make say what it would do for these targets."""
    line = ["make", "--dry-run", *command.words[1:]]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ""


def check_requirement(command: Command, place: Place) -> str:
    """Compare what pip or uv is asked to install with pyproject.toml and scripts/install_torch.py."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    script = (ROOT / "scripts" / "install_torch.py").read_text()
    named = {one.partition(">=")[0] for one in project["dependencies"]} - {"torch"}
    named |= {"--index-url", *re.findall(r'CPU_INDEX = "(.*)"', script), "--torch-backend=cpu", "--no-deps", "."}
    named |= {f"torch=={one}" for one in re.findall(r'^VERSION = "(.*)"', script, re.MULTILINE)}
    named |= {f"{here}[{extra}]" for here in (".", "nano-inference") for extra in project["optional-dependencies"]}
    wrong = set(command.words[command.words.index("install") + 1 :]) - named
    assert not wrong, f"make installs another {wrong}"
    return ""


def check_options(command: Command, place: Place) -> str:
    """Look for a script, and for its options in its folder's sources."""
    script = ROOT / command.words[1]
    assert script.is_file(), f"there is no {script.name}"
    known = "".join(path.read_text(encoding="utf-8") for path in script.parent.rglob("*.py"))
    for word in command.words[2:]:
        assert not word.startswith("--") or f'"{word}"' in known, f"{script.name} has no {word}"
    return ""


def run_module(command: Command, place: Place) -> str:
    """Run a module of the package as a process, in the page's directory, for a short answer."""
    words = [sys.executable, *command.words[1:], "--max-tokens", "8"]
    done = subprocess.run(words, cwd=place.directory, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def find_tests(command: Command, place: Place) -> str:
    """Look for the tests that a command names."""
    for word in command.words[3:]:
        assert not word.startswith("tests") or (ROOT / word).exists(), f"{word} not found"
    return ""


def is_default(command: Command) -> bool:
    """Whether a command of ours asks the default model, so that its test needs it."""
    if command.begins("curl") or command.begins("nano-inference", "serve"):
        return command.output is not None and not command.has("--print-config")
    named = " ".join([word for word in command.words[1:] if not word.startswith("-")][:2])
    asks = named.startswith(("chat", "generate", "tokenize", "models info"))
    is_shown = command.has(*OWN_MODEL, "--print-config", "--help")
    return command.begins("nano-inference") and (named.startswith(("models pull", "doctor")) or (asks and not is_shown))


def ours(*words: str) -> Callable[[Command], bool]:
    return lambda command: command.begins("nano-inference", *words)


RULES: Sequence[tuple[Callable[[Command], bool], Callable[[Command, Place], str]]] = (
    (lambda one: ours()(one) and one.has("--print-config"), run_main),
    (lambda one: ours("serve")(one) and one.output is not None, start_server),
    (lambda one: ours("serve")(one) or ours("bench")(one), with_words("--print-config")),  # they take long or for ever
    (lambda one: ours("completion")(one) and not one.has("--shell"), with_words("--shell", "bash")),
    (lambda one: ours()(one) and bool(one.typed), type_along),
    (ours(), run_main),
    (lambda one: one.begins("curl"), send),
    (lambda one: one.begins("make") and len(one.words) > 1, plan_target),
    (lambda one: one.begins("pip", "install") or one.begins("uv", "pip", "install"), check_requirement),
    (lambda one: one.begins("python") and one.words[1].endswith(".py"), check_options),
    (lambda one: one.begins("python", "-m", "pytest"), find_tests),
    (lambda one: one.begins("python", "-m", "nano_inference.nanochat"), run_module),
)


def execute(command: Command, place: Place) -> str:
    """Run a command by its rule. Raises `AssertionError` if there is none."""
    run = next((run for fits, run in RULES if fits(command)), None)
    assert run is not None, f"no rule executes {shlex.join(command.words)!r}: write one in tests/docs/shell.py"
    return run(command, place)


def execute_block(block: Block, place: Place) -> None:
    """Execute every command of a block, and compare what it says with what the page shows.

    A command that succeeded in another block, and of which neither shows an output, is not run again.
    """
    commands = commands_of(block)
    assert commands, f"{block.name}: no command"
    for command in commands:
        if command in place.succeeded:
            continue
        seen = execute(command, place)
        if command.output is None:
            place.succeeded.append(command)
        else:
            wrong = differs(command.output, seen)
            assert wrong is None, f"{block.name}: {shlex.join(command.words)}: {wrong}"
