"""The public surface is what tests/surface/ has: `python -m tests.surface` writes a change that is meant."""

from __future__ import annotations

import sys

import pytest

from tests.surface import HERE, SURFACES, text_of


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons spell signatures differently")
@pytest.mark.parametrize("name", SURFACES)
def test_the_surface_is_frozen(name: str) -> None:
    kept = (HERE / name).read_text().splitlines()
    found = text_of(name).splitlines()
    gone, new = sorted(set(kept) - set(found)), sorted(set(found) - set(kept))
    assert found == kept, f"{name}: gone {gone[:5]}, new {new[:5]}; if this is meant: python -m tests.surface"
