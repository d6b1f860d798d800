"""The dependencies are few, bounded, and have documented reasons."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS: list[str] = PROJECT["dependencies"]


def test_every_one_has_a_lowest_and_a_highest_version() -> None:
    for requirement in REQUIREMENTS:
        assert re.fullmatch(r"[a-z0-9-]+>=[\d.]+,<\d+", requirement), requirement


def test_every_one_has_a_reason() -> None:
    lines = (ROOT / "docs" / "dependencies.md").read_text().partition("\n## ")[0].splitlines()
    named = {name.strip() for line in lines if line.startswith("| ") for name in line.split("|")[1].split(",")}
    extras = [requirement for group in PROJECT["optional-dependencies"].values() for requirement in group]
    for requirement in [*REQUIREMENTS, *extras]:
        assert re.split(r"[>=<\[]", requirement)[0] in named, requirement


def test_network_parsers_are_recent() -> None:
    lowest = dict(requirement.split(",")[0].split(">=") for requirement in REQUIREMENTS)
    assert tuple(map(int, lowest["starlette"].split("."))) >= (1, 0, 1)  # CVE-2026-48710: paths out of the Host header
    assert tuple(map(int, lowest["h11"].split("."))) >= (0, 16)  # CVE-2025-43859: lenient chunks
