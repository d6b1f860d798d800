"""CONTRIBUTING.md and the issue forms: folders of tests, guides and the tests that execute them have these names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # comes with huggingface-hub

from tests.docs.pages import ROOT, links_in, name_of

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
EXAMPLES = {
    "A family of models": ("docs/adding-a-model.md", "tests/docs/test_adding_a_model.py"),
    "An operation": ("docs/adding-a-model.md", "tests/docs/test_adding_a_model.py"),
    "An HTTP dialect": ("docs/adding-a-dialect.md", "tests/docs/test_adding_a_dialect.py"),
    "A sampling option": ("docs/adding-a-sampling-option.md", "tests/docs/test_adding_a_sampling_option.py"),
}


def section(heading: str) -> str:
    """Return the text under a heading of the third level."""
    return re.split(r"^##", TEXT.partition(f"### {heading}\n")[2], flags=re.MULTILINE)[0]


def test_every_folder_of_tests_is_described_once() -> None:
    described = re.findall(r"^\| `tests/(\w+)` \|", TEXT, re.MULTILINE)
    assert sorted(described) == sorted({path.parent.name for path in (ROOT / "tests").glob("*/*.py")})


@pytest.mark.parametrize("heading", EXAMPLES)
def test_worked_example_names_its_guide_and_the_test_that_executes_it(heading: str) -> None:
    guide, test = EXAMPLES[heading]
    text = section(heading)
    assert guide in links_in(text) and f"`{test}`" in text
    assert Path(guide).name in (ROOT / test).read_text(encoding="utf-8"), "the test reads the guide"


def test_the_guide_of_models_adds_an_operation_to_both_executors() -> None:
    guide = (ROOT / EXAMPLES["An operation"][0]).read_text(encoding="utf-8")
    for part in ("class Scale(BaseOp)", "def bind_scale(", "def lower_scale("):
        assert part in guide
    assert "`Scale`" in section("An operation")


def fields(form: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {field["id"]: field for field in form["body"] if field["type"] != "markdown"}


@pytest.mark.parametrize("path", FORMS, ids=name_of)
def test_issue_form_is_valid_and_asks_for_doctor(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"] and form["description"] and form["labels"]
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert field["attributes"].get("label") or field["attributes"].get("value")
        options = field["attributes"].get("options", [])
        assert all(isinstance(option, str if field["type"] == "dropdown" else dict) for option in options)
    assert "nano-inference doctor" in fields(form)["doctor"]["attributes"]["label"]


def test_a_bug_needs_the_output_of_doctor() -> None:
    (bug,) = (path for path in FORMS if path.stem == "bug")
    assert fields(yaml.safe_load(bug.read_text(encoding="utf-8")))["doctor"]["validations"] == {"required": True}
