"""Weight updates through files: a directory of safetensors that is written atomically, or of torch.save's files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from nano_inference.loading.listing import weight_files
from nano_inference.loading.pieces import FileRange
from nano_inference.loading.pt_file import read_pt
from nano_inference.loading.safetensors_file import INDEX_NAME, SINGLE_NAME, open_weights, shards_of
from nano_inference.support.files import exists, is_present, path_of, sync
from nano_inference.types import WeightError

MARKER = "STABLE"  # name of the file that marks a complete directory, as in prime-rl
_TORCH_NAME, _TORCH_INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"


def save_weights(named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], directory: str | Path) -> Path:
    """Write weights for `weights_in`: to a hidden sibling directory that is then renamed to `directory`.

    A tensor with two names (a tied head) is written once. Raises `WeightError` if the directory exists.
    """
    target = path_of(directory, "directory")
    if exists(target):
        raise WeightError(f"{target}: exists already; write each version to a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        plain: dict[str, Tensor] = {}  # on the CPU, contiguous, without aliases, as safetensors requires
        seen: set[tuple[object, ...]] = set()
        for name, tensor in dict(named).items():
            identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if identity not in seen or not tensor.numel():
                plain[name] = tensor.detach().cpu().contiguous()
            seen.add(identity)
        save_file(plain, hidden / SINGLE_NAME)
        sync(hidden / SINGLE_NAME)
        (hidden / MARKER).touch()
        hidden.chmod(0o755)
        hidden.rename(target)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return target


def weights_in(directory: str | Path, marker: str | None = MARKER) -> Iterator[tuple[str, FileRange | Tensor]]:
    """Yield (name, file range) of every weight in a safetensors directory, sharded or not.

    Without safetensors, `pytorch_model.bin` is read, sharded or not: tensors only, nothing in it is executed. The
    directory must contain a file called `marker` (unless None), which its writer creates last; `save_weights` renames a
    complete directory. Raises `WeightError` or `ModelError` naming the file, also if files change meanwhile.
    """
    path = path_of(directory, "weights")
    if not path.is_dir():
        raise WeightError(f"{path}: no such directory")
    if marker is not None and not is_present(path / marker):
        raise WeightError(f"{path}: has no file {marker}, so it is not complete (marker=None skips this check)")
    before = _signature(path)
    yield from _weights(path)
    if _signature(path) != before:
        raise WeightError(f"{path}: its files changed while they were read")


def _weights(path: Path) -> Iterator[tuple[str, FileRange | Tensor]]:
    has_safetensors = any(is_present(path / name) for name in (SINGLE_NAME, INDEX_NAME))
    if not has_safetensors and is_present(path / _TORCH_NAME):
        yield from read_pt(path / _TORCH_NAME, is_mapped=False).items()
    elif not has_safetensors and is_present(path / _TORCH_INDEX_NAME):
        shard_of = shards_of(path / _TORCH_INDEX_NAME, ".bin")
        for file in dict.fromkeys(shard_of.values()):
            named = read_pt(path / file, is_mapped=False)
            yield from ((name, tensor) for name, tensor in named.items() if shard_of.get(name) == file)
    else:
        yield from open_weights(path).items()


def _signature(directory: Path) -> dict[str, tuple[int, int, int]]:
    stats = {file.name: file.stat() for file in weight_files(directory)}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
