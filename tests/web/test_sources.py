"""Conventions of the pages' JavaScript sources, and requirements for bundling them into one scope."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import nano_inference
from nano_inference.server.pages import module_paths
from tests.cases import failures

WEB = Path(nano_inference.__file__).parent / "server" / "web"
MODULES = sorted(path for path in WEB.rglob("*.js") if "vendor" not in path.parts)
NAME = re.compile(r"^(?:export )?(?:async )?(?:function\*?|const|let|class) (\w+)", re.MULTILINE)
IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";$', re.MULTILINE)


def test_module_conventions() -> None:
    def check(path: Path) -> None:
        text = path.read_text()
        assert [line for line in text.splitlines() if len(line) > 120] == []
        assert IMPORT.sub("", text).lstrip().startswith("/**"), "a module starts with a doc comment"
        for found in re.finditer(r"^export ", text, re.MULTILINE):
            assert text[: found.start()].rstrip().endswith("*/"), "exports have doc comments"
        assert len(re.findall(r"^import ", text, re.MULTILINE)) == len(IMPORT.findall(text))
        for names, source in IMPORT.findall(text):
            exported = re.findall(
                r"^export (?:async )?(?:function\*?|const|class) (\w+)", (path.parent / source).read_text(), re.M
            )
            assert {name.strip() for name in names.split(",") if name.strip()} <= set(exported), source
        code = re.sub(r"^\s*(?:/\*\*|\*|//).*$", "", text, flags=re.MULTILINE)
        code = re.sub(r'"(?:[^"\\\n]|\\.)*"|/[^/\s]+/[a-z]*', "", code)
        assert not [line for line in code.splitlines() if line.count("`") % 2], "bundling removes indentation"
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert sink not in text, "only DOMPurify may create elements from text"

    assert failures(check, zip(MODULES)) == []


@pytest.mark.parametrize("page", ["chat", "dashboard", "docs", "formulas"])
def test_bundled_modules_have_unique_names(page: str) -> None:
    sources = [(WEB / path).read_text() for path in module_paths(f"{page}/main.js")]
    counts = Counter(name for text in sources for name in NAME.findall(text))
    assert [name for name, count in counts.items() if count > 1] == []
