"""Parse the command lines of the documentation, and execute each by the rule for its kind.

A command that matches none of `RULES` fails its test, so every command on a page is executed or parsed.
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
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from nano_inference.cli import main
from tests.cli.screen import PATIENCE_S, terminal
from tests.docs.pages import ROOT, Block
from tests.docs.scripts import parse_only
from tests.warm import Forker

SHOWN_URL = "http://127.0.0.1:8000"
"""Where the pages say that a server listens."""
OWN_MODEL = ("-m", "--model", "--nanochat", "-i", "--server")
JSON_TOOL = ("python", "-m", "json.tool")
WIDE = 120
WITHOUT_PLUGINS = ("-p", "no:cacheprovider", "-p", "no:faulthandler")
"""Options for a second pytest in this process: these plugins hold state of the process."""
ANSWERING = ("chat", "generate", "tokenize", "models info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a block."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    pipe: tuple[str, ...] = ()
    """The command that its output goes to."""
    target: str | None = None
    """The file that its output goes to."""
    fed: str = "Hello\n"
    """Its standard input: the output of `echo`, or one line."""
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
    """Where a page's commands run: a directory of its own that is also the home."""

    directory: Path
    monkeypatch: pytest.MonkeyPatch
    url: Callable[[bool], str]
    """The address of a server: of the tiny model, or (True) of the default one."""
    succeeded: list[Command]
    """What succeeded on any page and shows no output: every page's directory has the same files."""
    forker: Callable[[], Forker]
    """Return the process whose forks are servers, and chats in a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one kind of command is executed."""

    name: str
    reason: str
    """Why it is executed this way."""
    fits: Callable[[Command], bool]
    run: Callable[[Command, Place], str]
    """Execute it; return its output, both streams as a terminal shows them."""


# ---- reading


def commands_of(block: Block) -> list[Command]:
    """Return a block's commands. In a session (`console`) they follow a dollar sign, with their output behind them."""
    if block.language != "console":
        text = re.sub(r"\\\n\s*", " ", block.text)
        return [found for line in text.splitlines() if (found := command_of(line)) is not None]
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert parts[0] == "", f"{block.name}: a session begins with a command behind `$ `"
    return [_session(part) for part in parts[1:]]


def _session(part: str) -> Command:
    """Return a command with what is typed into it and what it shows."""
    end = re.search(r"(?<!\\)\n", part)
    assert end is not None
    command = command_of(re.sub(r"\\\n\s*", " ", part[: end.start()]))
    assert command is not None
    shown = part[end.end() :]
    typed = tuple(line.removeprefix("> ") for line in shown.splitlines() if line.startswith("> "))
    return replace(command, typed=typed, output=shown)


def command_of(line: str) -> Command | None:
    """Return the command of a line, None for an empty one or a comment."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|>&;()<")
    lexer.whitespace_split = True
    words = list(lexer)
    if not words:
        return None
    environment = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        name, _, environment[name] = words.pop(0).partition("=")
    target, pipe = None, ()
    if ">" in words:
        at = words.index(">")
        assert len(words) == at + 2, f"{line}: something follows the file"
        words, target = words[:at], words[at + 1]
    if "|" in words:
        at = words.index("|")
        words, pipe = words[:at], tuple(words[at + 1 :])
    rest = {word for word in (*words, *pipe) if set(word) <= set("|>&;()<") or word.startswith("$")}
    assert not rest, f"{line}: this test knows no {' '.join(sorted(rest))}"
    command = Command(words=tuple(words), environment=environment, pipe=pipe, target=target)
    if words[0] == "echo" and len(words) == 2 and pipe:
        return replace(command, words=pipe, pipe=(), fed=f"{words[1]}\n")
    assert pipe in ((), JSON_TOOL), f"{line}: this test knows no pipe into {' '.join(pipe)}"
    return command


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


# ---- executing


def run_main(command: Command, place: Place) -> str:
    """Run `nano-inference` in this process: `main` is all that the installed command calls.

    As in a process of its own, nothing has imported pydantic yet: with it cyclopts would check values once more. A
    block that shows no output need not wait for long answers.
    """
    stream = io.StringIO()
    out = stream if command.target is None else io.StringIO()
    with place.monkeypatch.context() as patch:
        patch.delitem(sys.modules, "pydantic", raising=False)
        if command.output is None:
            patch.setenv("NANO_INFERENCE_MAX_TOKENS", "16")
        for name, value in command.environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdin", io.StringIO(command.fed))
        words = [str(place.directory / word[2:]) if word.startswith("~/") else word for word in command.words[1:]]
        words = [place.url(False) if word == SHOWN_URL else word for word in words]
        with redirect_stdout(out), redirect_stderr(stream):
            code = main(words)
    is_refusal = command.output is not None and command.output.startswith("nano-inference: ")
    assert code == (2 if is_refusal else 0), f"exit code {code}: {stream.getvalue()}"
    if command.target is not None:
        (place.directory / command.target).write_text(out.getvalue())
    return stream.getvalue()


def type_along(command: Command, place: Place) -> str:
    """Run a command in a terminal, type each line at its prompt, leave with Ctrl-D; return what the screen shows."""
    with terminal(*command.words[1:], forker=place.forker(), rows=50, columns=WIDE, **command.environment) as screen:
        for line in command.typed:
            screen.ask(line)
        screen.prompt()
        screen.send("\x04")
        assert screen.leave() == 0, screen.text()
        return screen.text().rstrip(">")


def with_words(command: Command, *more: str) -> Command:
    """Return a command with further words."""
    return replace(command, words=(*command.words, *more))


def print_config(command: Command, place: Place) -> str:
    """Let every option be read and every configuration be made, and nothing be run."""
    return run_main(with_words(command, "--print-config"), place)


def start_server(command: Command, place: Place) -> str:
    """Start a server at a free port, read what it says until it is ready, stop it as Ctrl-C does."""
    lines: list[str] = []
    process = place.forker().start([*command.words[1:], "--port", "0"])
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
    url, method, headers, data, is_open = None, "GET", {}, None, False
    words = iter(command.words[1:])
    for word in words:
        if word in ("-H", "--header"):
            name, _, value = next(words).partition(":")
            headers[name.strip()] = value.strip()
        elif word in ("-d", "--data"):
            data, method = next(words), "POST"
        elif word in ("-N", "-s", "-sN"):
            is_open = True
        else:
            assert url is None and word.startswith(SHOWN_URL), f"curl: this test knows no {word}"
            url = word
    assert url is not None
    address = url.replace(SHOWN_URL, place.url(command.output is not None))
    reply = httpx2.request(method, address, headers=headers, content=data, timeout=60)
    assert reply.status_code == 200, f"{reply.status_code} {reply.text}"
    assert is_open or command.output is None, "curl draws a meter when its output goes elsewhere: -s keeps it quiet"
    return json.dumps(reply.json(), indent=4) + "\n" if command.pipe else reply.text


def plan_target(command: Command, place: Place) -> str:
    """Let make say what it would do for these targets."""
    command_line = ["make", "--dry-run", *command.words[1:]]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ""


def check_requirement(command: Command, place: Place) -> str:
    """Hold what pip or uv is asked to install to what pyproject.toml and scripts/install_torch.py name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    unpinned = {one.partition(">=")[0] for one in project["dependencies"]} - {"torch"}
    script = (ROOT / "scripts" / "install_torch.py").read_text()
    options = {"--index-url", f"{re.search(r'CPU_INDEX = .(.*).', script)[1]}", "--torch-backend=cpu", "--no-deps"}  # type: ignore[index]
    for word in command.words[3 if command.begins("uv") else 2 :]:
        if word in options | unpinned:
            continue
        here = re.fullmatch(r"(?:\.|nano-inference)(?:\[(.+)\])?", word)
        if here is not None:
            assert set((here[1] or "").split(",")) - {""} <= set(extras), word
        else:
            version = re.search(r'^VERSION = "(.*)"', script, re.MULTILINE)
            assert version is not None and word == f"torch=={version[1]}", f"make installs another {word}"
    return ""


def run_script(command: Command, place: Place) -> str:
    """Let a script read its options, and end there."""
    parse_only(ROOT / command.words[1], command.words[2:])
    return ""


def run_module(command: Command, place: Place) -> str:
    """Run a module of the package as a program of its own, in the page's directory.

    nanochat's module computes each token from the whole text: a short answer shows the same.
    """
    words = [sys.executable, *command.words[1:]]
    if command.words[2] == "nano_inference.nanochat" and not command.has("--max-tokens"):
        words += ["--max-tokens", "8"]
    done = subprocess.run(words, cwd=place.directory, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def collect_tests(command: Command, place: Place) -> str:
    """Let pytest find the tests that a command names, and run none.

    In this process, which has imported them: a new one would import torch and every library that they use.
    """
    words = [*command.words[3:], "--collect-only", "--quiet", "--numprocesses", "0", "--capture=no", *WITHOUT_PLUGINS]
    stream = io.StringIO()
    with chdir(ROOT), redirect_stdout(stream), redirect_stderr(stream):
        code = pytest.main(words)
    assert code == pytest.ExitCode.OK, stream.getvalue()
    return ""


def is_default(command: Command) -> bool:
    """Whether a command of ours asks the default model, so that its test needs it."""
    if command.begins("curl") or command.begins("nano-inference", "serve"):
        return command.output is not None and not command.has("--print-config")
    named = [word for word in command.words[1:] if not word.startswith("-")]
    asks = command.begins("nano-inference") and " ".join(named[:2]).startswith(ANSWERING)
    pulls = command.begins("nano-inference", "models", "pull") or command.begins("nano-inference", "doctor")
    return pulls or (asks and not command.has(*OWN_MODEL, "--print-config", "--help"))


def ours(*words: str) -> Callable[[Command], bool]:
    return lambda command: command.begins("nano-inference", *words)


RULES: Sequence[Rule] = (
    Rule(
        name="options printed",
        reason="the command runs unchanged",
        fits=lambda command: command.begins("nano-inference") and command.has("--print-config"),
        run=run_main,
    ),
    Rule(
        name="serve, in a session",
        reason="a process with a port of its own, so that nothing else on the machine is met; stopped once it is ready",
        fits=lambda command: command.begins("nano-inference", "serve") and command.output is not None,
        run=start_server,
    ),
    Rule(
        name="serve",
        reason="it would run for ever: its options are read; starting is what a session and tests/cli/test_serve.py do",
        fits=ours("serve"),
        run=print_config,
    ),
    Rule(
        name="bench",
        reason="minutes: its options are read",
        fits=ours("bench"),
        run=print_config,
    ),
    Rule(
        name="completion for this shell",
        reason="which shell that is, it reads off the parent process, which is no shell here",
        fits=lambda command: command.begins("nano-inference", "completion") and not command.has("--shell"),
        run=lambda command, place: run_main(with_words(command, "--shell", "bash"), place),
    ),
    Rule(
        name="a chat, in a session",
        reason="the command runs unchanged, in a terminal, where the page's lines are typed at its prompt",
        fits=lambda command: command.begins("nano-inference") and bool(command.typed),
        run=type_along,
    ),
    Rule(
        name="nano-inference",
        reason="the command runs unchanged, with another server; a chat without a prompt reads one line, Hello",
        fits=ours(),
        run=run_main,
    ),
    Rule(
        name="curl",
        reason="sent by a client in this process to a server that listens at another port",
        fits=lambda command: command.begins("curl"),
        run=send,
    ),
    Rule(
        name="make",
        reason="it installs and downloads, or runs these tests: make plans it, and runs nothing",
        fits=lambda command: command.begins("make") and len(command.words) > 1,
        run=plan_target,
    ),
    Rule(
        name="pip install",
        reason="it downloads: what it names is held to pyproject.toml and scripts/install_torch.py",
        fits=lambda command: command.begins("pip", "install") or command.begins("uv", "pip", "install"),
        run=check_requirement,
    ),
    Rule(
        name="a script",
        reason="it measures or trains for minutes: the script reads its options with its own parser, and ends there",
        fits=lambda command: command.begins("python") and command.words[1].endswith(".py"),
        run=run_script,
    ),
    Rule(
        name="pytest",
        reason="tests that run tests: pytest collects them, and runs nothing",
        fits=lambda command: command.begins("python", "-m", "pytest"),
        run=collect_tests,
    ),
    Rule(
        name="a module of the package",
        reason="the command runs as a process; nanochat's gives a short answer",
        fits=lambda command: command.begins("python", "-m") and command.words[2].startswith("nano_inference"),
        run=run_module,
    ),
)


def rule_for(command: Command) -> Rule:
    """Return the rule that a command is executed by. Raises when there is none."""
    found = next((rule for rule in RULES if rule.fits(command)), None)
    if found is None:
        raise AssertionError(f"no rule executes {shlex.join(command.words)!r}: write one in tests/docs/shell.py")
    return found


def execute(block: Block, place: Place) -> None:
    """Execute every command of a block, and compare what it says with what the page shows.

    A command that succeeded in another block, and of which neither shows an output, is not run again.
    """
    commands = commands_of(block)
    assert commands, f"{block.name}: no command"
    for command in commands:
        rule = rule_for(command)
        if command in place.succeeded:
            continue
        seen: Any = rule.run(command, place)
        if command.output is None and command.target is None and rule.run is run_main:
            place.succeeded.append(command)
        if command.output is not None:
            wrong = differs(command.output, seen)
            assert wrong is None, f"{block.name}: {shlex.join(command.words)}: {wrong}"
