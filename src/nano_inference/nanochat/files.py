"""Finds a nanochat checkpoint in every layout it was ever kept in. No torch; nothing here opens a pickle.

Layouts (karpathy/nanochat, checkpoint_manager.py and its history): one `model_000650.pt` with `meta_000650.json` beside
it, a flat directory as published on the Hub, the base directory with one directory of tags for each source, and the
coming `experiments/<name>/<tag>/<source>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from nano_inference.files import is_present, path_of
from nano_inference.loader.fields import read_json, shown
from nano_inference.types import ModelError

SOURCES = ("sft", "rl", "mid", "base")
"""The stages of training that leave a checkpoint; the first is the one to chat with."""
TOKENIZER_FILES = ("tokenizer.pkl", "tokenizer.json")

_DIRECTORIES: Mapping[str, str] = MappingProxyType(
    {
        "base_checkpoints": "base",
        "mid_checkpoints": "mid",
        "chatsft_checkpoints": "sft",
        "chatrl_checkpoints": "rl",
    }
)
_DIRECTORIES_TEXT = ", ".join(f"{name}/" for name in _DIRECTORIES)
_MODEL = re.compile(r"model_([0-9]+)\.pt")
_DEPTH = re.compile(r"d([0-9]+)")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_DEFAULT_EXPERIMENT = "default"
_SHOWN_NAMES = 10

_Tags = dict[str, Path]
"""The directories that hold checkpoints, by their model tag."""
_Shelves = dict[str | None, _Tags]
"""The tags of each source; None where the layout does not say which source it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NanochatFiles:
    """The files of one checkpoint."""

    weights: Path
    """`…/model_000650.pt`."""
    meta: Path
    """`…/meta_000650.json` beside it."""
    step: int
    tokenizer: Path | None
    """The directory that holds tokenizer.pkl or tokenizer.json; None when there is none."""
    source: str | None
    """One of `SOURCES` when the layout says so."""
    git_commit: str | None
    """The commit that trained it, which the experiments layout notes down."""


def nanochat_home(environ: Mapping[str, str]) -> Path:
    """Return nanochat's base directory: `NANOCHAT_BASE_DIR`, else ~/.cache/nanochat."""
    named = environ.get("NANOCHAT_BASE_DIR")
    return path_of(named, "NANOCHAT_BASE_DIR") if named else Path.home() / ".cache" / "nanochat"


def find_files(
    path: Path, *, source: str | None = None, model_tag: str | None = None, step: int | None = None
) -> NanochatFiles | None:
    """Return the checkpoint that `path` means, None when there is nothing of nanochat's.

    Unless named: the source is "sft" when there is one, else the only one; the tag is the directory with the largest
    number after "d" ("d24_test" counts as 24; of equals the first by name), else the one changed last; the step is the
    highest. Directories without a checkpoint do not count. Raises `ModelError` that names the path and what is there.
    """
    _check_names(path, source, model_tag)
    if _is_file(path):
        return _named_file(path, source, model_tag, step)
    shelves = _shelves(path)
    if not shelves:
        return None
    found = _choose_source(path, shelves, source)
    directory = shelves[found][_choose_tag(path, shelves[found], model_tag)]
    return _files(found, _choose_step(directory, step))


def _check_names(path: Path, source: str | None, model_tag: str | None) -> None:
    if source is not None and source not in SOURCES:
        raise ModelError(f"{path}: the source must be one of {', '.join(SOURCES)}, got {shown(source)}")
    if model_tag is not None and (model_tag in ("", ".", "..") or any(c in model_tag for c in "/\\\0")):
        raise ModelError(f"{path}: the model tag must be a plain directory name, got {shown(model_tag)}")


def _named_file(path: Path, source: str | None, model_tag: str | None, step: int | None) -> NanochatFiles | None:
    """Return the checkpoint of one file; what else is named must agree with it."""
    match = _MODEL.fullmatch(path.name)
    if match is None:
        return None
    shelves = _leaf(path.parent)
    found = _choose_source(path, shelves, source)
    _choose_tag(path, shelves[found], model_tag)
    if step not in (None, int(match[1])):
        raise ModelError(f"{path}: is step {int(match[1])}, step {step} was asked for")
    return _files(found, path)


def _files(source: str | None, weights: Path) -> NanochatFiles:
    """Return a checkpoint with all that lies around it."""
    directory = weights.parent
    digits = weights.name.removeprefix("model_").removesuffix(".pt")
    meta = directory / f"meta_{digits}.json"
    if not is_present(meta):
        raise ModelError(f"{weights}: the file {meta.name} that belongs to it is missing")
    return NanochatFiles(
        weights=weights,
        meta=meta,
        step=int(digits),
        tokenizer=_tokenizer(directory),
        source=source,
        git_commit=_git_commit(directory),
    )


def _tokenizer(directory: Path) -> Path | None:
    """Return where the tokenizer lies: beside the weights, else in `tokenizer/` there or up to three levels above."""
    whole = _whole(directory)
    for place in (whole, *(parent / "tokenizer" for parent in (whole, *whole.parents[:3]))):
        if any(_is_file(place / name) for name in TOKENIZER_FILES):
            return place
    return None


def _git_commit(directory: Path) -> str | None:
    """Return the commit in an experiment's meta.json, None when there is none."""
    whole = _whole(directory)
    meta = whole.parent.parent / "meta.json"
    if not _in_experiment(whole) or not _is_file(meta):
        return None
    commit = read_json(meta).text("git_commit", "")
    return commit if _COMMIT.fullmatch(commit) else None


def _whole(directory: Path) -> Path:
    """Return the directory with all its parents, keeping symbolic links unless ".." makes that ambiguous."""
    return directory.resolve() if ".." in directory.parts else directory.absolute()


def _in_experiment(whole: Path) -> bool:
    """Whether this is the `sft` of `<experiment>/<tag>/sft`: an experiment has a meta.json or its own tokenizer."""
    above = whole.parent.parent
    return whole.name in SOURCES and (_is_file(above / "meta.json") or (above / "tokenizer").is_dir())


def _source_and_tag(directory: Path) -> tuple[str | None, str]:
    """Return what the names above a checkpoint's directory say about it."""
    whole = _whole(directory)
    if _in_experiment(whole):
        return whole.name, whole.parent.name
    return _DIRECTORIES.get(whole.parent.name), whole.name


def _shelves(path: Path) -> _Shelves:
    """Return every tag of every source that lies here, whatever the layout; empty when there is no checkpoint."""
    if _steps(path):
        return _leaf(path)
    base = _base_directory(path)
    experiment = _experiment(path / "experiments")
    if base and experiment:
        raise ModelError(f"{path}: holds both experiments/ and {_DIRECTORIES_TEXT}: name the directory that is meant")
    if base or experiment:
        return base or experiment
    tags = {child.name: child for child in _directories(path) if _steps(child)}
    if tags and set(tags) <= set(SOURCES):
        return {source: {_whole(path).name: directory} for source, directory in tags.items()}
    if tags:
        return {_DIRECTORIES.get(_whole(path).name): tags}
    return _by_source(path) or _experiment(path)


def _leaf(directory: Path) -> _Shelves:
    source, tag = _source_and_tag(directory)
    return {source: {tag: directory}}


def _base_directory(path: Path) -> _Shelves:
    """Return what nanochat's base directory holds; directories of that name without any checkpoint are an error."""
    names = {child.name for child in _directories(path)}
    present = {name: source for name, source in _DIRECTORIES.items() if name in names}
    shelves: _Shelves = {}
    for name, source in present.items():
        tags = {child.name: child for child in _directories(path / name) if _steps(child)}
        if tags:
            shelves[source] = tags
    if present and not shelves:
        raise ModelError(f"{path}: there is no <tag>/model_*.pt in {', '.join(f'{name}/' for name in present)}")
    return shelves


def _by_source(experiment: Path) -> _Shelves:
    """Return what `<experiment>/<tag>/<source>` holds."""
    shelves: _Shelves = {}
    for tag in _directories(experiment):
        for source in SOURCES:
            if _steps(tag / source):
                shelves.setdefault(source, {})[tag.name] = tag / source
    return shelves


def _experiment(path: Path) -> _Shelves:
    """Return the only experiment below a directory, or the one called "default"."""
    found = {child.name: shelves for child in _directories(path) if (shelves := _by_source(child))}
    if len(found) > 1 and _DEFAULT_EXPERIMENT not in found:
        raise ModelError(f"{path}: holds several experiments, name the directory of one: {_listed(found)}")
    return found.get(_DEFAULT_EXPERIMENT) or next(iter(found.values()), {})


def _choose_source(path: Path, shelves: _Shelves, wanted: str | None) -> str | None:
    """Return a key of `shelves`; where the layout does not name the source, any is taken at its word."""
    if wanted is None and len(shelves) == 1:
        return next(iter(shelves))
    if wanted is None and "sft" not in shelves:
        raise ModelError(f"{path}: ambiguous: name the source, one of {_listed(shelves)}")
    for source in (wanted or "sft", None):
        if source in shelves:
            return source
    raise ModelError(f"{path}: has no checkpoint of the source {wanted}; there is {_listed(shelves)}")


def _choose_tag(path: Path, tags: _Tags, wanted: str | None) -> str:
    if wanted is not None:
        if wanted not in tags:
            raise ModelError(f"{path}: has no model tag {shown(wanted)}; there is {_listed(tags)}")
        return wanted
    names = sorted(tags)
    depths = {name: int(match[1]) for name in names if (match := _DEPTH.match(name))}
    if depths:
        return max(depths, key=lambda name: depths[name])
    return max(names, key=lambda name: _changed(tags[name]))


def _choose_step(directory: Path, wanted: int | None) -> Path:
    steps = _steps(directory)
    number = max(steps) if wanted is None else wanted
    if number not in steps:
        raise ModelError(f"{directory}: has no step {shown(number)}; there is {_listed(sorted(steps))}")
    return steps[number]


def _steps(directory: Path) -> dict[int, Path]:
    """Return the model files of a directory by their step; of two spellings of a number the first by name."""
    found: dict[int, Path] = {}
    for path in _entries(directory):
        match = _MODEL.fullmatch(path.name)
        if match and not path.is_dir() and is_present(path):
            found.setdefault(int(match[1]), path)
    return found


def _directories(path: Path) -> list[Path]:
    return [entry for entry in _entries(path) if entry.is_dir()]


def _entries(directory: Path) -> list[Path]:
    """Return what lies in a directory, sorted by name; nothing when it cannot be listed."""
    try:
        return sorted(directory.iterdir())
    except (OSError, ValueError):
        return []


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _changed(directory: Path) -> int:
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return 0


def _listed(values: Iterable[object]) -> str:
    names = [str(value) for value in values]
    rest = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + rest
