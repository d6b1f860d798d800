"""benchmarks/ab.py: what counts as a difference, and that a changed constant is found between two trees."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)

import ab  # noqa: E402
from recording import checkpoints, record  # noqa: E402
from recording.cases import BITWISE, RELATIVE, SCENARIOS, Case, cases_of, requests  # noqa: E402
from recording.streams import Recording, Stream, first_difference  # noqa: E402

STREAM = Stream(
    label="request 0, sample 0",
    ids={"top_logprobs": [5, 7], "tokens": [5, 9, 3]},
    floats={"top_logprobs": [-1.5, -2.0], "prompt_logprobs": [-700.0], "logprobs": [-1.5, -0.25, -3.0]},
    finish="length None",
)
RECORDING = Recording(case="m float32 c mixed", streams=[STREAM], code="avx2")
CASE = Case(model="m", dtype="float32", path="c", scenario="mixed")


def changed(name: str, *values: float) -> Recording:
    """Return the recording with other tokens or other floats of a name."""
    if name == "tokens" or isinstance(values[0], int):
        return replace(RECORDING, streams=[replace(STREAM, ids={**STREAM.ids, name: list(values)})])
    return replace(RECORDING, streams=[replace(STREAM, floats={**STREAM.floats, name: list(values)})])


def flipped(value: float) -> float:
    """The next float: one bit of the significand."""
    return math.nextafter(value, math.inf)


def test_equal_recordings_have_no_difference() -> None:
    again = Recording.from_dict(asdict(RECORDING))
    assert first_difference(RECORDING, again, BITWISE) is None
    nan = changed("logprobs", math.nan, -0.25, -3.0)
    assert first_difference(nan, nan, BITWISE) is None


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (changed("logprobs", -1.5, flipped(-0.25), -3.0), "logprobs[1]: -0x1.0000000000000p-2 here, -0x1.ffff"),
        (changed("top_logprobs", -1.5, flipped(-2.0)), "top_logprobs[1]: -0x1.0000000000000p+1 here"),
        (changed("logprobs", -1.5, -0.25, math.nan), "logprobs[2]: -0x1.8000000000000p+1 here, nan there"),
        (changed("tokens", 5, 8, 3), "tokens[1]: 9 here, 8 there"),
        (changed("tokens", 5, 9), "tokens[2]: 3 here, None there"),
        (changed("top_logprobs", 5, 6), "top_logprobs[1]: 7 here, 6 there"),
        (replace(RECORDING, streams=[]), "1 streams here, 0 there"),
        (replace(RECORDING, streams=[replace(STREAM, finish="abort None")]), "ended with length None here, abort None"),
        (Recording(case=RECORDING.case, error="no such dtype"), "here: computed; there: no such dtype"),
        (replace(RECORDING, code="torch"), "computed by avx2 here, by torch there"),
    ],
)
def test_a_difference_is_named_with_its_place(other: Recording, text: str) -> None:
    assert text in str(first_difference(RECORDING, other, BITWISE))


def test_the_first_place_of_tokens_and_logprobs_is_named() -> None:
    both = changed("tokens", 5, 9, 4).streams[0]
    other = replace(both, floats={**STREAM.floats, "logprobs": [-1.5, -0.5, -3.0]}, finish="abort None")
    assert "logprobs[1]" in str(first_difference(RECORDING, replace(RECORDING, streams=[other]), BITWISE))


def test_the_tolerance_is_relative_to_the_lists_largest_number() -> None:
    assert first_difference(RECORDING, changed("logprobs", -1.5, -0.25 - 2.9e-5, -3.0), RELATIVE) is None
    assert first_difference(RECORDING, changed("logprobs", -1.5, -0.25 - 3.1e-5, -3.0), RELATIVE)
    assert first_difference(RECORDING, changed("logprobs", -1.5, math.nan, -3.0), RELATIVE)
    assert first_difference(RECORDING, changed("tokens", 5, 8, 3), RELATIVE)
    assert first_difference(RECORDING, changed("top_logprobs", 5, 6), RELATIVE) is None


def test_requests_are_ragged_and_the_same_each_time() -> None:
    made = requests(160, 330)
    assert made == requests(160, 330)
    lengths = {len(one.prompt) for one in made}
    assert min(lengths) == 1 and max(lengths) == 300 and len(lengths) > 12
    assert any(one.num_samples > 1 for one in made)
    used = {case.scenario for name in ("llama", "gguf-Q4_0") for case in cases_of(name)}
    assert used == set(SCENARIOS)


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
    assert [case.path for case in cases] == ["c", "torch", "torch", "cuda"]
    for case, mine, other in zip(cases, here, there, strict=True):
        assert mine.error or "[0]: " in str(first_difference(mine, other, case.tolerance))


def repository() -> str | None:
    """Why there is no commit to compare with, or None."""
    if shutil.which("git") is None:
        return "git is not installed"
    command = ["git", "-C", str(ab.ROOT), "rev-parse", "--show-toplevel", "--verify", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or Path(done.stdout.splitlines()[0]).resolve() != ab.ROOT:
        return "this tree is no git repository of its own"
    return None


def test_the_script_compares_with_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every sixth case. Uncommitted changes under src may change numbers; then the script has to report them."""
    reason = repository()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(ab, "cases_of", lambda name: cases_of(name)[::6])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    status = ab.main(["--against", "HEAD", "--only", "nanochat-G0"])
    printed = capsys.readouterr()
    is_clean = not ab.git(ab.ROOT, "status", "--porcelain", "src").strip()
    assert status == 0 if is_clean else status in (0, ab.DIFFERENT), printed.err
    assert "3 cases, " in printed.out
    assert str(tmp_path) not in ab.git(ab.ROOT, "worktree", "list")


def test_unknown_models_and_commits_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert ab.main(["--only", "nanochat-G9"]) == ab.IMPOSSIBLE
    assert "--only: no model's name begins with nanochat-G9; there are nanochat-G0" in capsys.readouterr().err
    if repository() is None:
        assert ab.main(["--only", "nanochat-G0", "--against", "no-such-commit"]) == ab.IMPOSSIBLE
        assert "no-such-commit" in capsys.readouterr().err


def test_a_recording_of_another_tree_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree whose package is not the one imported would be compared with itself."""
    monkeypatch.setattr(sys, "argv", ["record", str(tmp_path), "plan", "out"])
    with pytest.raises(SystemExit, match="was imported from"):
        record.main()
