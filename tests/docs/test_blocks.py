"""Every block of code in README.md, CONTRIBUTING.md and docs/ is executed; `RULES` in tests/docs/shell.py says how.

`python`: the blocks of a page are one program, in order. `bash`, `console`: command by command, by the rules of
`shell.py`. `toml`: a configuration file that the program takes. `json`: parsed. `text` is no code. What has another
label, or none, fails.
"""

from __future__ import annotations

import json
import socket
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference import InferenceEngine
from tests.cases import failures
from tests.docs.furniture import DEFAULT_MODEL, NAMES, TRAINED
from tests.docs.pages import PAGES, Block, blocks_in, blocks_of, name_of, spans_in
from tests.docs.shell import (
    RULES,
    SHOWN_URL,
    Command,
    Place,
    command_of,
    commands_of,
    differs,
    execute,
    is_default,
    rule_for,
)
from tests.server.tiny import Running

SHELL = ("bash", "console")
SHOWN_PORT = "29511"
"""The port at which the pages let trainer and server meet."""
COMMANDS_WITH_OPTIONS = ("chat", "generate", "serve", "bench", "tokenize", "doctor", "models")
SPANS = ("python ", "nano-inference ", "make ", "pip install ")

PlaceOf = Callable[[str], Place]


def needs_model(block: Block) -> bool:
    """Whether a block asks the default model. One that cannot be read fails in its test, not here."""
    try:
        return any(is_default(command) for command in commands_of(block))
    except (AssertionError, ValueError):
        return False


def marked(name: str, value: Any, *, with_model: bool) -> Any:
    return pytest.param(value, id=name, marks=[pytest.mark.model] if with_model else [])


def shell_blocks() -> Iterator[Any]:
    """Yield every block that is no Python."""
    for path in PAGES:
        for block in blocks_of(path):
            if block.language != "python":
                yield marked(block.name, block, with_model=block.language in SHELL and needs_model(block))


def python_pages() -> Iterator[Any]:
    """Yield every page that has Python."""
    for path in PAGES:
        if any(block.language == "python" for block in blocks_of(path)):
            yield marked(name_of(path), path, with_model=name_of(path) in DEFAULT_MODEL)


def check(block: Block, place: Place) -> None:
    """Execute a block that is no Python. Raises `AssertionError`."""
    if block.language in SHELL:
        execute(block, place)
    elif block.language == "toml":
        take_as_configuration(block, place)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "diff":
        assert block.name.startswith("docs/adding-a-sampling-option.md"), "test_adding_a_sampling_option.py applies it"
    else:
        assert block.language == "text", f"{block.name}: no rule executes {block.language or 'a block without a label'}"


def take_as_configuration(block: Block, place: Place) -> None:
    """Let each command that a file speaks of take it."""
    file = place.directory / "shown.toml"
    file.write_text(block.text)
    tables = [name for name, value in tomllib.loads(block.text).items() if isinstance(value, dict)]
    for name in tables or ["serve"]:
        assert name in COMMANDS_WITH_OPTIONS, name
        line = command_of(f"nano-inference {name} --config {file} --print-config")
        assert line is not None
        said = rule_for(line).run(line, place)
        set_lines = [one for one in said.splitlines() if one and one[0] not in "#["]
        assert set_lines, f"{block.name}: nothing of it reaches {name}"


def run_python(blocks: list[Block], names: dict[str, Any], replaced: dict[str, str]) -> None:
    """Execute blocks as one program; close the engines that it leaves open."""
    try:
        for block in blocks:
            text = "\n" * (block.line - 1) + block.text
            for shown, real in replaced.items():
                text = text.replace(shown, real)
            exec(compile(text, block.page, "exec", dont_inherit=True), names)
    finally:
        for value in names.values():
            if isinstance(value, InferenceEngine):
                value.shutdown()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("block", list(shell_blocks()))
def test_a_block(block: Block, place_of: PlaceOf) -> None:
    check(block, place_of(block.page))


@pytest.mark.parametrize("page", list(python_pages()))
def test_a_pages_python(page: Path, place_of: PlaceOf, request: pytest.FixtureRequest) -> None:
    name = name_of(page)
    place_of(name)
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    replaced = {SHOWN_PORT: free_port()}
    if any(SHOWN_URL in block.text for block in blocks):
        server: Running = request.getfixturevalue("trained_server" if name in TRAINED else "tiny_server")
        replaced[SHOWN_URL] = server.url
    names = {"__name__": "__main__", **(NAMES[name]() if name in NAMES else {})}
    run_python(blocks, names, replaced)


def spans() -> Iterator[str]:
    """Yield the whole commands that stand within sentences. Words in capitals are a reader's own."""
    for path in PAGES:
        for text in dict.fromkeys(spans_in(path.read_text(encoding="utf-8"))):
            if text.startswith(SPANS) and not any(word.isupper() or word == "…" for word in text.split()):
                yield text


def test_a_command_within_a_sentence_has_these_options(place_of: PlaceOf) -> None:
    def check(text: str) -> None:
        command = command_of(text)
        assert command is not None
        if command.begins("nano-inference") and not command.has("--print-config", "--help", "-h", "--version"):
            command = command_of(f"{text} --print-config")
            assert command is not None
        if command.begins("python", "-m"):
            return  # `-m pytest`, `-m zensical`: others' programs
        rule_for(command).run(command, place_of("docs/index.md"))

    assert failures(check, zip(spans())) == []


# ---- the test of the tests: each rule, once with what it must not let through


@pytest.mark.parametrize(
    ("language", "text", "complaint"),
    [
        ("", "nano-inference models list", "a block without a label"),
        ("ruby", "puts 1", "no rule executes ruby"),
        ("bash", "rm -r thing", "no rule executes 'rm -r thing'"),
        ("bash", "# nothing", "no command"),
        ("bash", "nano-inference serve --prot 8000", "exit code 2"),
        ("bash", "nano-inference serve --port none", "exit code 2"),
        ("bash", "nano-inference bench --workloads decode1", "exit code 2"),
        ("bash", "nano-inference doctor --bench --no-such", "exit code 2"),
        ("bash", "nano-inference completion --shell basic", "exit code 2"),
        ("bash", "nano-inference models list --no-such", "exit code 2"),
        ("bash", "nano-inference chat --model no/such/place/here -p x", "exit code 2"),
        ("bash", "nano-inference models list | less", "knows no pipe into less"),
        ("bash", "nano-inference chat --print-config --temp 1", "exit code 2"),
        ("bash", "curl http://127.0.0.1:8000/no/such/route", "404"),
        ("bash", "curl http://127.0.0.1:8000/v1/completions -d '{\"prompt\": 1.5}'", "4"),
        ("bash", "nano-inference models list && rm -r thing", "this test knows no &&"),
        ("bash", "curl https://example.org/", "this test knows no"),
        ("bash", "make everything", "everything"),
        ("bash", "pip install '.[everything]'", "everything"),
        ("bash", "uv pip install --torch-backend=cu130 .", "make installs another --torch-backend=cu130"),
        ("bash", "pip install torch==1.0.0", "make installs another"),
        ("bash", "python benchmarks/compare.py --no-such", "compare.py refuses"),
        ("bash", "python benchmarks/no_such.py", "there is no"),
        ("bash", "python examples/demo.py --no-such", "reads no options"),
        ("bash", "python -m nano_inference.no_such", "No module named"),
        ("bash", "python -m pytest tests/test_no_such.py", "not found"),
        ("console", "nano-inference models list", "a session begins with a command"),
        ("console", "$ nano-inference tokenize Hi --model ./checkpoint\n72 105\n", "the page shows"),
        ("toml", "[serve]\nprot = 1\n", "did you mean port"),
        ("toml", "[serve]\nport = 'none'\n", "exit code 2"),
        ("toml", "[kitchen]\nport = 1\n", "kitchen"),
    ],
)
def test_wrong_output_on_page_is_detected(language: str, text: str, complaint: str, place_of: PlaceOf) -> None:
    (block,) = blocks_in(f"```{language}\n{text}\n```\n", "docs/index.md")
    with pytest.raises(AssertionError, match=complaint.replace("[", r"\[")):
        check(block, place_of(block.page))


def test_wrong_json_and_python_are_detected(place_of: PlaceOf) -> None:
    with pytest.raises(json.JSONDecodeError):
        check(Block(page="docs/index.md", line=1, language="json", text="{...}"), place_of("docs/index.md"))
    first = Block(page="docs/index.md", line=3, language="python", text="a = 1\n")
    with pytest.raises(NameError, match="'b'") as failure:
        run_python([first, Block(page="docs/index.md", line=9, language="python", text="a\nb\n")], {}, {})
    assert failure.traceback[-1].lineno == 9, "the traceback names the page's own line (counted from 0 here)"


def test_every_rule_has_a_reason_and_is_used() -> None:
    used = set()
    for path in PAGES:
        for block in blocks_of(path):
            if block.language in SHELL:
                used |= {rule_for(command).name for command in commands_of(block)}
    assert used == {rule.name for rule in RULES} and all(len(rule.reason) > 10 for rule in RULES)


def test_session_is_parsed_verbatim() -> None:
    text = "$ A=1 nano-inference chat \\\n    -t 0 > f\n> Hello\nHi.\n"
    text += "$ curl -s http://127.0.0.1:8000/info | python -m json.tool\n"
    (block,) = blocks_in(f"x\n```console\n{text}```\n", "docs/index.md")
    first, second = commands_of(block)
    assert block.line == 3 and first == Command(
        words=("nano-inference", "chat", "-t", "0"),
        environment={"A": "1"},
        target="f",
        typed=("Hello",),
        output="> Hello\nHi.\n",
    )
    assert second.pipe == ("python", "-m", "json.tool") and second.output == ""


@pytest.mark.parametrize(
    ("shown", "seen", "is_same"),
    [
        ("a\n", "a \n", True),
        ("a\n", "b\n", False),
        ("a ... s\n", "a 0.12 s\n", True),
        ("a ... s\n", "a 0.12 m\n", False),
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\n", "a\n", True),
        ("a\n", "a\nb\n", False),
        ("", "", True),
        ("", "a\n", False),
        ("a.c\n", "abc\n", False),
    ],
)
def test_outputs_are_compared_line_by_line(shown: str, seen: str, is_same: bool) -> None:
    assert (differs(shown, seen) is None) == is_same
