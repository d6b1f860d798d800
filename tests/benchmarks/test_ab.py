"""benchmarks/ab.py: what counts as a difference, and that a changed constant is found between two trees."""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
sys.path.insert(0, BENCHMARKS)

import ab  # noqa: E402
from recording import checkpoints, golden  # noqa: E402
from recording.cases import BITWISE, RELATIVE, cases_of  # noqa: E402
from recording.streams import Recording, Stream, first_difference  # noqa: E402

STREAM = Stream(
    label="request 0, sample 0",
    tokens=[5, 9, 3],
    logprobs=[-1.5, -0.25, -3.0],
    floats={"top_logprobs": [-1.5, -2.0], "prompt_logprobs": [-700.0]},
    ids={"top_logprobs": [5, 7]},
    finish="length None",
)
RECORDING = Recording(case="m float32 c mixed", streams=[STREAM], code="avx2")


def changed(**fields: object) -> Recording:
    return replace(RECORDING, streams=[replace(STREAM, **fields)])  # type: ignore[arg-type]


def flipped(value: float) -> float:
    """The next float: one bit of the significand."""
    return math.nextafter(value, math.inf)


def test_equal_recordings_have_no_difference() -> None:
    again = Recording.from_dict(asdict(RECORDING))
    assert first_difference(RECORDING, again, BITWISE) is None
    nan = changed(logprobs=[math.nan, -0.25, -3.0])
    assert first_difference(nan, nan, BITWISE) is None


def test_a_flipped_bit_is_a_difference() -> None:
    other = changed(logprobs=[-1.5, flipped(-0.25), -3.0])
    text = first_difference(RECORDING, other, BITWISE)
    assert text == (
        "request 0, sample 0: token 1: id 9 (-0x1.0000000000000p-2) here, id 9 (-0x1.fffffffffffffp-3) there"
    )
    assert first_difference(RECORDING, other, RELATIVE) is None
    tops = changed(floats={**STREAM.floats, "top_logprobs": [-1.5, flipped(-2.0)]})
    assert "top_logprobs[1]: -0x1.0000000000000p+1 here" in str(first_difference(RECORDING, tops, BITWISE))
    assert first_difference(changed(logprobs=[0.0, 0.0, 0.0]), changed(logprobs=[0.0, -0.0, 0.0]), BITWISE)


def test_a_different_token_is_a_difference_with_any_tolerance() -> None:
    other = changed(tokens=[5, 8, 3])
    for tolerance in (BITWISE, RELATIVE):
        assert "token 1: id 9 (-0x1.0000000000000p-2) here, id 8" in str(first_difference(RECORDING, other, tolerance))
    shorter = changed(tokens=[5, 9], logprobs=[-1.5, -0.25])
    assert "token 2: id 3 (-0x1.8000000000000p+1) here, id none (none) there" in str(
        first_difference(RECORDING, shorter, BITWISE)
    )


def test_the_tolerance_is_relative_to_the_lists_largest_number() -> None:
    assert first_difference(RECORDING, changed(logprobs=[-1.5, -0.25 - 2.9e-5, -3.0]), RELATIVE) is None
    assert first_difference(RECORDING, changed(logprobs=[-1.5, -0.25 - 3.1e-5, -3.0]), RELATIVE)
    assert first_difference(RECORDING, changed(logprobs=[-1.5, math.nan, -3.0]), RELATIVE)


def test_missing_streams_numbers_and_refusals_are_differences() -> None:
    assert first_difference(RECORDING, replace(RECORDING, streams=[]), BITWISE) == "1 streams here, 0 there"
    assert "prompt_logprobs[0]" in str(first_difference(RECORDING, changed(floats={}), BITWISE))
    assert "top_logprobs[1]: 7 here, 6 there" in str(
        first_difference(RECORDING, changed(ids={"top_logprobs": [5, 6]}), BITWISE)
    )
    refused = Recording(case=RECORDING.case, error="no such dtype")
    assert first_difference(refused, refused, BITWISE) is None
    assert first_difference(RECORDING, refused, BITWISE) == "here: computed; there: no such dtype"
    assert first_difference(RECORDING, replace(RECORDING, code="torch"), BITWISE)


def test_a_golden_entry_changes_with_any_bit(tmp_path: Path) -> None:
    entry = golden.entry_of(RECORDING, "0" * 64)
    golden.write("key", {"m float32 c mixed": entry}, tmp_path)
    known = golden.read("key", tmp_path)
    assert known is not None and golden.difference(entry, known["m float32 c mixed"]) is None
    for other in (changed(tokens=[5, 9, 4]), changed(logprobs=[-1.5, -0.25, flipped(-3.0)]), changed(ids={})):
        assert "the digest differs" in str(golden.difference(golden.entry_of(other, "0" * 64), entry))
    first = changed(logprobs=[flipped(-1.5), -0.25, -3.0])
    assert golden.difference(golden.entry_of(first, "0" * 64), entry) == (
        "sample 0: token 0: 5 -0x1.7ffffffffffffp+0 here, 5 -0x1.8000000000000p+0 recorded"
    )
    assert "weights differ" in str(golden.difference(golden.entry_of(RECORDING, "1" * 64), entry))
    assert golden.read("another", tmp_path) is None


@pytest.mark.slow
def test_a_changed_constant_is_found(tmp_path: Path) -> None:
    """A copy of the tree with another epsilon: each path differs, with the token where it starts."""
    tree = tmp_path / "tree"
    shutil.copytree(ab.ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "web", "*.egg-info"))
    shutil.copytree(ab.ROOT / "tests" / "cuda", tree / "tests" / "cuda")
    rules = tree / "src" / "nano_inference" / "nanochat" / "checkpoint.py"
    text = rules.read_text()
    assert "FLOAT32_EPS = 1.1920929e-07" in text
    rules.write_text(text.replace("FLOAT32_EPS = 1.1920929e-07", "FLOAT32_EPS = 1e-03"))
    name = "nanochat-G1"
    files = {name: checkpoints.write(name, tmp_path)}
    cases = [case for case in cases_of(name) if case.dtype == "float32" and case.scenario in ("mixed", "all rows")]
    here, there = ab.record([ab.ROOT, tree], cases, files, "auto", tmp_path)
    outcomes = [ab.outcome(*three) for three in zip(cases, here, there, strict=True)]
    assert [one.case.path for one in outcomes] == ["c", "torch", "torch", "cuda"]
    for one in outcomes:
        assert one.here.error is not None or "token 0: id" in str(one.difference)
