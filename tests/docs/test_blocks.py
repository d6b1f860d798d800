"""Every block of code in README.md, CONTRIBUTING.md and docs/ is executed.

`python`: the blocks of a page are one program. `bash`, `console`: command by command, by `shell.RULES`. `toml`: a
configuration file that the program takes. `diff`: test_extending.py applies it. `text` is no code. Other labels fail.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference import InferenceEngine
from tests.docs.pages import PAGES, Block, blocks_of, name_of, spans_in
from tests.docs.shell import SHOWN_URL, Place, command_of, commands_of, execute, execute_block, is_default

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT asks for it
]
SHELL = ("bash", "console")
SHOWN_PORT = "29511"
"""The port at which the pages let trainer and server meet."""
SPANS = ("python ", "nano-inference ", "make ", "pip install ")


def marked(name: str, value: Any, *, with_model: bool) -> Any:
    return pytest.param(value, id=name, marks=[pytest.mark.model] if with_model else [])


def shell_blocks() -> Iterator[Any]:
    """Yield every block that is no Python."""
    for path in PAGES:
        for block in blocks_of(path):
            if block.language != "python":
                yield marked(
                    block.name, block, with_model=block.language in SHELL and any(map(is_default, commands_of(block)))
                )


def asks_default(text: str) -> bool:
    return '"default"' in text or "smollm2-135m" in text


def python_pages() -> Iterator[Any]:
    for path in PAGES:
        texts = [block.text for block in blocks_of(path) if block.language == "python"]
        if texts:
            yield marked(name_of(path), path, with_model=asks_default("".join(texts)))


def check(block: Block, place: Place) -> None:
    """Execute a block that is no Python. Raises `AssertionError`."""
    if block.language in SHELL:
        execute_block(block, place)
    elif block.language == "toml":
        take_as_configuration(block, place)
    else:
        assert block.language in ("text", "diff"), f"{block.name}: no rule executes {block.language!r}"


def take_as_configuration(block: Block, place: Place) -> None:
    """Let `serve` and `chat` take a configuration file."""
    file = place.directory / "shown.toml"
    file.write_text(block.text)
    for name in ("serve", "chat"):
        line = command_of(f"nano-inference {name} --config {file} --print-config")
        assert line is not None
        assert any(one and one[0] not in "#[" for one in execute(line, place).splitlines()), f"nothing reaches {name}"


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
def test_a_block(block: Block, place: Place) -> None:
    check(block, place)


@pytest.mark.parametrize("page", list(python_pages()))
def test_a_pages_python(page: Path, place: Place) -> None:
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    replaced = {SHOWN_PORT: free_port()}
    text = "".join(block.text for block in blocks)
    if SHOWN_URL in text:
        replaced[SHOWN_URL] = place.fixture("default_server" if asks_default(text) else "tiny_server").url
    run_python(blocks, {"__name__": "__main__"}, replaced)


def spans() -> Iterator[str]:
    """Yield the whole commands within sentences. Words in capitals are a reader's own; `-m` runs others' programs."""
    found = dict.fromkeys(text for path in PAGES for text in spans_in(path.read_text(encoding="utf-8")))
    for text in found:
        is_whole = not any(word.isupper() or word == "…" for word in text.split())
        if text.startswith(SPANS) and is_whole and not text.startswith("python -m"):
            yield text


@pytest.mark.parametrize("text", list(spans()))
def test_a_command_within_a_sentence_has_these_options(text: str, place: Place) -> None:
    if text.startswith("nano-inference ") and "--help" not in text:
        text += " --print-config"
    command = command_of(text)
    assert command is not None
    execute(command, place)
