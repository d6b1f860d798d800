"""instructor; it needs an older jiter than the other clients and so has a separate virtual environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.process import NEEDED, Served, succeed
from tests.clients.weather import Day, Report

PYTHON = Path(sys.prefix) / "instructor" / "bin" / "python"
if not PYTHON.exists():
    pytest.skip(f"instructor: {NEEDED}", allow_module_level=True)

pytest_plugins = ["tests.clients.servers"]


def results_of(server: Served, directory: Path, name: str, kind: str) -> Any:
    """Return the JSON that the script prints."""
    script = Path(__file__).with_name("instructor_calls.py")
    root = str(Path(__file__).parents[2])
    printed = succeed([str(PYTHON), str(script), server.url, name, kind], directory, PYTHONPATH=root)
    return json.loads(printed.decode().splitlines()[-1])


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_answers_are_valid_in_every_mode(roomy_server: Served, tmp_path: Path, mode: str) -> None:
    got = results_of(roomy_server, tmp_path, "tiny", mode)
    for answer in (*got["whole"], *got["asynchronous"], *got["streamed"]):
        Report.model_validate(answer, strict=True)
    assert got["asynchronous"] == got["whole"][:1], "same seed"
    assert len({json.dumps(answer) for answer in got["whole"]}) > 1, "other seeds"
    assert min(got["pieces"]) > 3, "answers are streamed"


def test_responses_messages_and_json_object(roomy_server: Served, tmp_path: Path) -> None:
    got = results_of(roomy_server, tmp_path, "tiny", "others")
    for answer in (*got["responses"], *got["messages"]):
        Report.model_validate(answer, strict=True)
    assert isinstance(got["object"], dict)


@pytest.mark.model
def test_default_model_returns_valid_answers(default_server: Served, tmp_path: Path) -> None:
    got = results_of(default_server, tmp_path, "default", "small")
    for answer in (got["tools"], got["schema"], got["iterable"]):
        Day.model_validate(answer, strict=True)
