"""instructor, which wants an older jiter than the other clients and so has an environment of its own."""

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
    """What the script asks for, told once more: answers are checked on this side too."""

    model_config = ConfigDict(extra="forbid", strict=True)

    number: Annotated[int, Field(ge=1, le=31)]
    kind: Literal["sun", "rain"]
    note: Annotated[str, Field(max_length=8)]


class Report(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    city: Annotated[str, Field(min_length=1, max_length=10)]
    days: Annotated[list[Day], Field(min_length=1, max_length=2)]
    unit: Literal["C", "F"]


def asked(server: Served, directory: Path, name: str, what: str) -> Any:
    """Return what the script printed."""
    script = Path(__file__).with_name("instructor_calls.py")
    printed = succeed([str(PYTHON), str(script), server.url, name, what], directory)
    return json.loads(printed.decode().splitlines()[-1])


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_every_answer_is_of_its_class(roomy_server: Served, tmp_path: Path, mode: str) -> None:
    got = asked(roomy_server, tmp_path, "tiny", mode)
    for answer in (*got["whole"], *got["asynchronous"], *got["streamed"]):
        Report.model_validate(answer)
    assert got["asynchronous"] == got["whole"][:1], "the seed is the same"
    assert len({json.dumps(answer) for answer in got["whole"]}) > 1, "the others are not"
    assert min(got["pieces"]) > 3, "an answer comes as it is written"


def test_other_dialects_and_any_object(roomy_server: Served, tmp_path: Path) -> None:
    got = asked(roomy_server, tmp_path, "tiny", "others")
    for answer in (*got["responses"], *got["messages"]):
        Report.model_validate(answer)
    assert isinstance(got["object"], dict)


@pytest.mark.model
def test_the_default_model_answers_in_a_few_words(default_server: Served, tmp_path: Path) -> None:
    got = asked(default_server, tmp_path, "default", "small")
    for answer in (got["tools"], got["schema"], got["iterable"]):
        Day.model_validate(answer)
