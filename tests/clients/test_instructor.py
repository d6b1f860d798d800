"""instructor; it needs an older jiter than the other clients and so has a separate virtual environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.process import NEEDED, Served, succeed

PYTHON = Path(sys.prefix) / "instructor" / "bin" / "python"
if not PYTHON.exists():
    pytest.skip(f"instructor: {NEEDED}", allow_module_level=True)

pytest_plugins = ["tests.clients.servers"]


class Day(BaseModel):
    """The class of `instructor_calls.py` with strict types, to check its answers."""

    model_config = ConfigDict(extra="forbid", strict=True)

    number: Annotated[int, Field(ge=1, le=31)]
    kind: Literal["sun", "rain"]
    note: Annotated[str, Field(max_length=8)]


class Report(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    city: Annotated[str, Field(min_length=1, max_length=10)]
    days: Annotated[list[Day], Field(min_length=1, max_length=2)]
    unit: Literal["C", "F"]


def results_of(server: Served, directory: Path, name: str, kind: str) -> Any:
    """Return the JSON that the script prints."""
    script = Path(__file__).with_name("instructor_calls.py")
    printed = succeed([str(PYTHON), str(script), server.url, name, kind], directory)
    return json.loads(printed.decode().splitlines()[-1])


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_answers_are_valid_in_every_mode(roomy_server: Served, tmp_path: Path, mode: str) -> None:
    got = results_of(roomy_server, tmp_path, "tiny", mode)
    for answer in (*got["whole"], *got["asynchronous"], *got["streamed"]):
        Report.model_validate(answer)
    assert got["asynchronous"] == got["whole"][:1], "same seed"
    assert len({json.dumps(answer) for answer in got["whole"]}) > 1, "other seeds"
    assert min(got["pieces"]) > 3, "answers are streamed"


def test_responses_messages_and_json_object(roomy_server: Served, tmp_path: Path) -> None:
    got = results_of(roomy_server, tmp_path, "tiny", "others")
    for answer in (*got["responses"], *got["messages"]):
        Report.model_validate(answer)
    assert isinstance(got["object"], dict)


@pytest.mark.model
def test_default_model_returns_valid_answers(default_server: Served, tmp_path: Path) -> None:
    got = results_of(default_server, tmp_path, "default", "small")
    for answer in (got["tools"], got["schema"], got["iterable"]):
        Day.model_validate(answer)
