"""The recipes of docs/clients.md, with a test's URL and model in place of those of the page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_DOCS = Path(__file__).parents[2] / "docs"
_URL, _MODEL = "http://127.0.0.1:8000", "smollm2-135m-instruct"


class Command(NamedTuple):
    """A command line as a shell reads it."""

    environ: Mapping[str, str]
    program: str
    arguments: list[str]


def snippets(client: str, url: str, model: str) -> list[str]:
    """Return the code of a client's row in the tables of recipes."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", _recipes(), re.MULTILINE)
    (cell,) = [how for name, how in rows if name == client]
    return [_filled(code, url, model) for code in re.findall(r"`([^`]+)`", cell)]


def command(text: str) -> Command:
    """Return a command line with the variables that are set before it."""
    words = shlex.split(text)
    count = next(index for index, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    environ = dict(word.split("=", 1) for word in words[:count])
    return Command(environ, words[count], words[count + 1 :])


def printed_command(program: str, url: str, model: str) -> Command:
    """Return the command of a program among the measurements."""
    for block in re.findall(r"^```text\n(.*?)^```", _recipes(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith(f"{program} "):
                return command(_filled(line, url, model))
    raise AssertionError(f"docs/clients.md has no command of {program}")


def block_after(text: str, url: str, model: str, page: str = "clients.md") -> str:
    """Return the first block of text after a text of a page."""
    after = (_DOCS / page).read_text(encoding="utf-8").partition(text)[2]
    found = re.search(r"^```text\n(.*?)^```", after, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/{page} has no block after {text!r}"
    return _filled(found[1], url, model)


def value(code: str, names: Mapping[str, Any]) -> Any:
    """Return the value of a recipe's Python expression; `names` are what it needs imported."""
    return eval(code, dict(names))


def _recipes() -> str:
    return (_DOCS / "clients.md").read_text(encoding="utf-8").partition("\n## Recipes\n")[2]


def _filled(text: str, url: str, model: str) -> str:
    return text.replace(_URL, url).replace(_MODEL, model).replace("the-served-name", model)
