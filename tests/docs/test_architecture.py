"""The architecture picture shows every room in a band, and every import points down or stays in its band."""

from __future__ import annotations

from scripts.architecture import BANDS, PICTURE, arrows, drawn, imports_of
from tests.test_rooms import HOME

BAND_OF = {room: number for number, names in enumerate(BANDS.values()) for room in names.split()}


def test_every_room_is_in_one_band() -> None:
    rooms = {path.stem for path in HOME.glob("*.py")} | {path.parent.name for path in HOME.glob("*/__init__.py")}
    assert sorted(room for names in BANDS.values() for room in names.split()) == sorted(
        rooms - {"__init__", "__main__"}
    )


def test_imports_point_down() -> None:
    for room, used in imports_of(BAND_OF).items():
        assert not {other for other in used if BAND_OF[other] > BAND_OF[room]}, room


def test_arrows_leave_out_what_a_chain_of_imports_implies() -> None:
    assert arrows({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == [("a", "b"), ("b", "c")]


def test_the_picture_is_up_to_date() -> None:
    assert PICTURE.read_text() == drawn(), "run scripts/architecture.py"
