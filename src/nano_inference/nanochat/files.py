"""Find a nanochat checkpoint in any of its layouts. No torch; opens no pickle.

Layouts (karpathy/nanochat, checkpoint_manager.py and its history): `model_000650.pt` beside `meta_000650.json`; a flat
directory as published on the Hub; the base directory with a directory of tags per source; `experiments/<name>/<tag>/
<source>`; a tag's directory with those of its sources (`d20/chatsft_checkpoints/`).
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nano_inference.loading.fields import read_json, shown
from nano_inference.support.files import is_present, path_of, status_of
from nano_inference.types import MissingFile, ModelError

FILE_NAME = "tokenizer.pkl"
TOKENIZER_FILES = (FILE_NAME, "tokenizer.json")
SOURCES = ("sft", "rl", "mid", "base")  # stages of training, the preferred one for chats first

_DIRECTORIES: Mapping[str, str] = {
    "base_checkpoints": "base",
    "mid_checkpoints": "mid",
    "chatsft_checkpoints": "sft",
    "chatrl_checkpoints": "rl",
}
_MODEL = re.compile(r"model_([0-9]+)\.pt")
_DEPTH = re.compile(r"d([0-9]+)")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_SHOWN_NAMES = 10
_Tags = dict[str, Path]  # model tag -> directory with checkpoints
_TagsBySource = dict[str | None, _Tags]  # the tags of each source; the key None if the layout does not name the source


class UnknownName(ModelError, KeyError):
    """A source of checkpoints or a special token does not exist."""

    __str__ = Exception.__str__  # KeyError's quotes the message


@dataclass(frozen=True, slots=True, kw_only=True)
class NanochatFiles:
    """The files of one checkpoint."""

    weights: Path  # `…/model_000650.pt`
    meta: Path  # `…/meta_000650.json` beside it
    step: int
    tokenizer: Path | None  # the directory of tokenizer.pkl or tokenizer.json; None if there is neither
    source: str | None  # one of `SOURCES`, None if the layout does not name it
    git_commit: str | None  # nanochat's in training, from the experiment's meta.json or the checkpoint's meta file


def nanochat_home(environ: Mapping[str, str]) -> Path:
    """Return nanochat's base directory: `NANOCHAT_BASE_DIR`, else ~/.cache/nanochat."""
    named = environ.get("NANOCHAT_BASE_DIR")
    return path_of(named, "NANOCHAT_BASE_DIR") if named else Path.home() / ".cache" / "nanochat"


def find_files(
    path: Path, *, source: str | None = None, model_tag: str | None = None, step: int | None = None
) -> NanochatFiles | None:
    """Return the checkpoint at `path`, None if there is none.

    Defaults: the source "sft" if there is one, else the only one; the tag with the largest number after "d" ("d24_test"
    counts as 24; of equals the first by name), else the directory modified last; the highest step. Ignores directories
    without a checkpoint. Raises `ModelError` with the path and the choices if the selection fails or is ambiguous.
    """
    if source is not None and source not in SOURCES:
        raise UnknownName(f"{path}: the source must be one of {', '.join(SOURCES)}, got {shown(source)}")
    if model_tag is not None and (model_tag in ("", ".", "..") or any(c in model_tag for c in "/\\\0")):
        raise ModelError(f"{path}: the model tag must be a plain directory name, got {shown(model_tag)}")
    if not _is_file(path):
        sources = _tags_by_source(path)
        if not sources:
            return None
        found = _choose_source(path, sources, source)
        directory = sources[found][_choose_tag(path, sources[found], model_tag)]
        steps = _steps(directory)
        number = max(steps, default=0) if step is None else step
        if number not in steps:
            raise MissingFile(f"{directory}: has no step {shown(number)}; there is {_listed(sorted(steps))}")
        return _files(found, steps[number])
    match = _MODEL.fullmatch(path.name)
    if match is None:
        return None
    sources = _leaf(path.parent)
    found = _choose_source(path, sources, source)
    _choose_tag(path, sources[found], model_tag)
    if step not in (None, int(match[1])):
        raise ModelError(f"{path}: is step {int(match[1])}, but step {step} was requested")
    return _files(found, path)


def find_largest_model(checkpoints_dir: str | Path) -> str:
    """Return the tag with the largest number, else the one modified last. Raises `FileNotFoundError`.

    Ignores directories without a checkpoint.
    """
    tags = _tags(Path(checkpoints_dir))
    if not tags:
        raise FileNotFoundError(f"{checkpoints_dir}: contains no nanochat checkpoints")
    return _choose_tag(Path(checkpoints_dir), tags, None)


def find_last_step(checkpoint_dir: str | Path) -> int:
    """Return the highest step among a directory's model files. Raises `FileNotFoundError`."""
    steps = _steps(Path(checkpoint_dir))
    if not steps:
        raise FileNotFoundError(f"{checkpoint_dir}: contains no model_*.pt")
    return max(steps)


def _files(source: str | None, weights: Path) -> NanochatFiles:
    """Return a checkpoint with its meta file, tokenizer and commit.

    The tokenizer is beside the weights, else in `tokenizer/` there or up to three levels above, else one of these
    levels has a tokenizer.pkl itself. The commit is in an experiment's meta.json, else in the checkpoint's meta file.
    Raises `ModelError` naming a tokenizer file that is a directory or a FIFO.
    """
    digits = weights.name.removeprefix("model_").removesuffix(".pt")
    meta, whole = weights.parent / f"meta_{digits}.json", _whole(weights.parent)
    if not is_present(meta):
        raise MissingFile(f"{weights}: its meta file {meta.name} is missing")
    levels = (whole, *whole.parents[:3])
    places = (place for place in (whole, *(level / "tokenizer" for level in levels)) if has_tokenizer(place))
    bare = (level for level in levels if is_present(level / FILE_NAME))
    experiment = whole.parent.parent / "meta.json"
    metas = (experiment, meta) if _in_experiment(whole) and _is_file(experiment) else (meta,)
    commits = (read_json(one).get("git_commit") for one in metas)
    return NanochatFiles(
        weights=weights,
        meta=meta,
        step=int(digits),
        tokenizer=next(places, None) or next(bare, None),
        source=source,
        git_commit=next((one for one in commits if isinstance(one, str) and _COMMIT.fullmatch(one)), None),
    )


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory has a file of `TOKENIZER_FILES`. Raises `ModelError` if that is no regular file."""
    return any(is_present(directory / name) for name in TOKENIZER_FILES)


def _whole(directory: Path) -> Path:
    """Return the absolute path; symbolic links are resolved only if it contains ".."."""
    return directory.resolve() if ".." in directory.parts else directory.absolute()


def _in_experiment(whole: Path) -> bool:
    """Return whether this is `<experiment>/<tag>/<source>`: an experiment has a meta.json or a tokenizer/."""
    above = whole.parent.parent
    return whole.name in SOURCES and (_is_file(above / "meta.json") or (above / "tokenizer").is_dir())


def _tags_by_source(path: Path) -> _TagsBySource:
    """Return all tags of all sources at a path, in any layout; empty if there is no checkpoint.

    Raises `ModelError` if nanochat's directories have none, or if there is an experiments/ beside them.
    """
    if _steps(path):
        return _leaf(path)
    present = [directory for directory in _directories(path) if directory.name in _DIRECTORIES]
    base: _TagsBySource = {}
    for directory in sorted(present, key=lambda one: list(_DIRECTORIES).index(one.name)):
        tags = _tags(directory) | ({_whole(path).name: directory} if _steps(directory) else {})
        if tags:
            base[_DIRECTORIES[directory.name]] = tags
    if present and not base:
        names = ", ".join(f"{name}/" for name in _DIRECTORIES if path / name in present)
        raise MissingFile(f"{path}: there is no <tag>/model_*.pt in {names}")
    experiment = _experiment(path / "experiments")
    if base and experiment:
        names = ", ".join(f"{name}/" for name in _DIRECTORIES)
        raise ModelError(f"{path}: contains both experiments/ and {names}: name one of these directories")
    if base or experiment:
        return base or experiment
    tags = _tags(path)
    if tags and set(tags) <= set(SOURCES):
        return {source: {_whole(path).name: directory} for source, directory in tags.items()}
    if tags:
        return {_DIRECTORIES.get(_whole(path).name): tags}
    return _by_source(path) or _experiment(path)


def _leaf(directory: Path) -> _TagsBySource:
    """Return source and tag of a checkpoint's directory, from its name and that of the one above."""
    whole = _whole(directory)
    if _in_experiment(whole):
        return {whole.name: {whole.parent.name: directory}}
    if whole.name in _DIRECTORIES:
        return {_DIRECTORIES[whole.name]: {whole.parent.name: directory}}
    return {_DIRECTORIES.get(whole.parent.name): {whole.name: directory}}


def _tags(path: Path) -> _Tags:
    return {child.name: child for child in _directories(path) if _steps(child)}


def _by_source(experiment: Path) -> _TagsBySource:
    """Return the tags in `<experiment>/<tag>/<source>`, also with a source's long name and a tag below it."""
    sources: _TagsBySource = {}
    for tag in _directories(experiment):
        for source in SOURCES:
            if _steps(tag / source):
                sources.setdefault(source, {})[tag.name] = tag / source
        for name, source in _DIRECTORIES.items():
            for path in (tag / name, *_directories(tag / name)):
                if _steps(path):
                    sources.setdefault(source, {})[tag.name if path.name == name else path.name] = path
    return sources


def _experiment(path: Path) -> _TagsBySource:
    """Return the tags of the only experiment in a directory, or of the one named "default"."""
    found = {child.name: sources for child in _directories(path) if (sources := _by_source(child))}
    if len(found) > 1 and "default" not in found:
        raise ModelError(f"{path}: contains several experiments; name the directory of one: {_listed(found)}")
    return found.get("default") or next(iter(found.values()), {})


def _choose_source(path: Path, sources: _TagsBySource, wanted: str | None) -> str | None:
    """Return a key of `sources`; None, if the layout does not name the source, matches any `wanted`."""
    if wanted is None and len(sources) == 1:
        return next(iter(sources))
    if wanted is None and "sft" not in sources:
        raise ModelError(f"{path}: ambiguous: name the source, one of {_listed(sources)}")
    for source in (wanted or "sft", None):
        if source in sources:
            return source
    raise MissingFile(f"{path}: has no checkpoint of the source {wanted}; there is {_listed(sources)}")


def _choose_tag(path: Path, tags: _Tags, wanted: str | None) -> str:
    if wanted is not None:
        if wanted not in tags:
            raise MissingFile(f"{path}: has no model tag {shown(wanted)}; there is {_listed(tags)}")
        return wanted
    names = sorted(tags)
    depths = {name: int(match[1]) for name in names if (match := _DEPTH.match(name))}
    if depths:
        return max(depths, key=lambda name: depths[name])
    return max(names, key=lambda name: _changed(tags[name]))


def _changed(directory: Path) -> int:
    try:
        return directory.stat().st_mtime_ns
    except OSError:  # it has vanished
        return 0


def _steps(directory: Path) -> dict[int, Path]:
    """Return the model files of a directory by step; of equal steps the first by name."""
    found: dict[int, Path] = {}
    for path in _entries(directory):
        match = _MODEL.fullmatch(path.name)
        if match and not path.is_dir() and is_present(path):
            found.setdefault(int(match[1]), path)
    return found


def _directories(path: Path) -> list[Path]:
    return [entry for entry in _entries(path) if entry.is_dir()]


def _entries(directory: Path) -> list[Path]:
    """Return a directory's entries, sorted by name; empty if it cannot be listed."""
    try:
        return sorted(directory.iterdir())
    except (OSError, ValueError):
        return []


def _is_file(path: Path) -> bool:
    found = status_of(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def _listed(values: Iterable[object]) -> str:
    names = [str(value) for value in values]
    rest = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + rest
