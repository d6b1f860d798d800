"""Pickles read as data: plain values as CPython writes them; names, calls and instances as records; nothing is run."""

from __future__ import annotations

import pickle
import pickletools
import random
from pathlib import Path
from typing import Any

import pytest

from nano_inference.loading import pickle_data
from nano_inference.loading.pickle_data import Named, PickleError, name_of, read_data
from tests.pickles import Runs

NOTHING = frozenset[str]()
SHARED = ("a", b"b", [1])
PLAIN: Any = {
    "none": [None, True, False],
    "integers": [0, 255, 256, 65536, -1, -(2**31), 2**31, 2**62, -(2**63)],
    "texts": ["", "é", "x" * 300, "y" * 70_000],
    "bytes": [b"", b"\0\xff", b"z" * 300],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "batches": [list(range(2500)), {str(i): i for i in range(2500)}],
    "shared": [SHARED, SHARED, {"again": SHARED}],
}


class Plain:
    """An instance with a dict."""

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("pickler", ["c", "python", "optimized"])
def test_plain_values_are_read(protocol: int, pickler: str) -> None:
    data = (pickle._dumps if pickler == "python" else pickle.dumps)(PLAIN, protocol=protocol)
    assert read_data(pickletools.optimize(data) if pickler == "optimized" else data, NOTHING) == PLAIN


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_calls_and_instances_are_records(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    here = f"{__name__} Plain"
    value = read_data(
        pickle.dumps([Runs(open, str(marker), "w"), Plain(7), Plain], protocol), frozenset({"io open", here})
    )
    call, instance, named = value
    assert isinstance(call, Named) and (call.name, call.arguments) == ("io open", (str(marker), "w"))
    assert isinstance(instance, Named) and (instance.name, instance.arguments) == (here, ())
    assert instance.state == {"value": 7} and (name_of(named), name_of(call)) == (here, "")
    assert not marker.exists()


@pytest.mark.parametrize("value", [open, Plain, Plain(1), Runs(eval, "1"), {1}, 1.5, 1 << 80, bytearray(1)])
def test_types_that_are_not_listed_are_refused(value: Any) -> None:
    with pytest.raises(PickleError):
        read_data(pickle.dumps([value]), NOTHING)


def test_a_value_may_contain_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    found = read_data(pickle.dumps(loop), NOTHING)
    assert found[0] is found


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"h\0", "it is damaged"),
        (b"q\0", "memoizes a value that is not there"),
        (b"Nr\xff\xff\xff\xff", "memoizes a value that is not there"),
        (b"0", "opcode '0' at byte 2"),
        (b"]K\1", "does not end with exactly one value"),
        (b"N.N", "does not end with exactly one value"),
        (b"(", "pops from an empty stack"),
        (b"e", "ends a batch without a mark"),
        (b")" + b"\x85" * 65, "nested more than 64 deep"),
        (b")" + b"\x94\x85h\0\x86" * 40, "nested more than 64 deep"),
        (b"](K\1u", "it is damaged"),
        (b"}(K\1u", "it is damaged"),
        (b"K\1)R", "it is damaged"),
        (b"ca\nb\n}b", "it is damaged"),
        (b"ca\nb\n)\x81}b}b", "sets the state of an instance twice"),
        (b"c" + b"a" * 300, "it is damaged"),
        (b"cos\nsystem\n", "it names 'os system'"),
        (b"\x8c\2os\x8c\6system\x93", "it names 'os system'"),
        (b"\x8c\3\xed\xa0\x80", "it is damaged"),
        (b"\x8a\xff" + b"\1" * 255, "an integer of more than 8 bytes"),
        (b"\x8e" + b"\xff" * 8, "it is damaged"),
        (b"Pab\n", "opcode 'P'"),
    ],
)
def test_invalid_opcodes_are_named(body: bytes, message: str) -> None:
    with pytest.raises(PickleError, match=message):
        read_data(b"\x80\x04" + body + b".", frozenset({"a b"}))


def test_sizes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_data, "MAX_VALUES", 1000)
    with pytest.raises(PickleError, match=f"limit {pickle_data.MAX_BYTES}"):
        read_data(bytes(pickle_data.MAX_BYTES + 1), NOTHING)
    with pytest.raises(PickleError, match=f"more than {pickle_data.MAX_VALUES} values"):
        read_data(b"\x80\x04](" + b"N" * pickle_data.MAX_VALUES + b"e.", NOTHING)


def test_damaged_pickles_raise_nothing_else() -> None:
    rng = random.Random(3)
    good = pickle.dumps({name: value for name, value in PLAIN.items() if name != "batches"})
    codes = [info.code.encode("latin-1") for info in pickletools.opcodes]
    num_refused = 0
    for round_ in range(2000):
        data = bytearray(good)
        if round_ % 2:
            body = b"".join(rng.choice(codes) + rng.randbytes(rng.choice([0, 0, 1, 4])) for _ in range(40))
            data = bytearray(b"\x80\x04" + body + b".")
        elif round_ % 4:
            data = data[: rng.randrange(len(data))]
        for _ in range(rng.choice([0, 1, 8]) if data else 0):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            read_data(bytes(data), NOTHING)
        except PickleError as error:
            assert "\n" not in str(error) and len(str(error)) < 200
            num_refused += 1
    assert num_refused > 1000
