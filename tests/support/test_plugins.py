"""Tables that installed packages extend: what is added, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from nano_inference.support.plugins import PluginError, table

GROUP = "nano_inference.numbers"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return what installs a package with entry points: a module and its metadata in a directory of `sys.path`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, code: str, points: str) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}\n")

    return make


def test_rows_of_installed_packages_come_after_our_own(install) -> None:
    install("registry_more", "THREE = 3\nTWO = 2", "two = registry_more:TWO\nthree = registry_more:THREE")
    assert list(table(GROUP, {"one": 1}, int).items()) == [("one", 1), ("three", 3), ("two", 2)]


def test_table_without_extensions_has_the_built_in_rows() -> None:
    assert dict(table(GROUP, {"one": 1}, int)) == {"one": 1}


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ("one = registry_bad:ONE", "the name one is taken"),
        ("two = registry_bad:WORD", "registry_bad:WORD is a str, not a int"),
        ("two = registry_bad:MISSING", "has no attribute 'MISSING'"),
        ("two = registry_absent:TWO", "ModuleNotFoundError: No module named 'registry_absent'"),
        ("two = registry_broken:TWO", "ValueError: a number is odd"),
    ],
)
def test_unusable_entry_point_is_refused_with_its_package(install, tmp_path: Path, points: str, why: str) -> None:
    install("registry_bad", "ONE = 1\nWORD = 'two'", points)
    (tmp_path / "registry_broken.py").write_text("raise ValueError('''a number\nis odd''')")
    with pytest.raises(PluginError, match=f"entry point {GROUP} .* of the package registry_bad: .*{why}") as caught:
        table(GROUP, {"one": 1}, int)
    assert "\n" not in str(caught.value)
