"""`common`: what upstream's scripts use of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from nano_inference.nanochat.common import (
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    download_file_with_lock,
    get_base_dir,
    get_dist_info,
    get_peak_bandwidth,
    get_peak_flops,
    is_ddp_initialized,
    is_ddp_requested,
    print0,
)

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]


def torchrun(monkeypatch: Patch, rank: int, local_rank: int, world_size: int) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", world_size)):
        monkeypatch.setenv(name, str(value))


def test_file_is_downloaded_once(tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "new"))
    (tmp_path / "bundle").write_bytes(b"data")
    seen: list[str] = []
    for _ in range(2):
        path = download_file_with_lock((tmp_path / "bundle").as_uri(), "bundle.zip", postprocess_fn=seen.append)
        assert path == f"{get_base_dir()}/bundle.zip" and Path(path).read_bytes() == b"data"
    assert seen == [path] and capsys.readouterr().out.count("Downloading") == 1
    with pytest.raises(OSError):
        download_file_with_lock((tmp_path / "absent").as_uri(), "other")
    assert {path.name for path in (tmp_path / "new").iterdir()}.isdisjoint({"other", "other.partial"})


def test_ranks_are_those_of_torchrun(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert get_dist_info() == (False, 0, 0, 1) and not is_ddp_requested()
    torchrun(monkeypatch, 5, 1, 8)
    assert get_dist_info() == (True, 5, 1, 8) and is_ddp_requested()
    with torch.random.fork_rng(devices=[]):
        assert compute_init("cpu") == (True, 5, 1, 8, torch.device("cpu"))
    assert not is_ddp_initialized(), "on a CPU no process group is created, as upstream"
    print0("not rank 0")
    monkeypatch.setenv("RANK", "0")
    print0("rank 0", flush=True)
    assert capsys.readouterr().out == "rank 0\n"
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE must be a number from 0, got 'two'"):
        get_dist_info()


def test_peaks_of_gpus(caplog: pytest.LogCaptureFixture) -> None:
    assert get_peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and get_peak_bandwidth("NVIDIA H100 PCIe") == 2e12
    assert get_peak_flops("NVIDIA H200 NVL") == 836e12 and get_peak_bandwidth("NVIDIA L40S") == 864e9
    assert not caplog.records
    assert get_peak_flops("Voodoo 2") == math.inf == get_peak_bandwidth("Voodoo 2")
    assert "'Voodoo 2' is not known" in caplog.text


def test_base_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "~/runs")
    assert get_base_dir() == str(tmp_path / "runs")
    for unset in (True, False):
        monkeypatch.delenv("NANOCHAT_BASE_DIR") if unset else monkeypatch.setenv("NANOCHAT_BASE_DIR", "")
        assert get_base_dir() == str(tmp_path / ".cache" / "nanochat")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", ".cache"}, "created, as upstream's"


def test_compute_init_returns_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there, name in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        assert autodetect_device_type() == name


def test_compute_init_describes_one_process(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    with torch.random.fork_rng(devices=[]):
        assert compute_init("cpu") == (False, 0, 0, 1, torch.device("cpu"))
        drawn = torch.rand(3)
        assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(42)))
    compute_cleanup()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device 'cuda': torch sees 0 CUDA devices"):
        compute_init()
    with pytest.raises(ValueError, match="device 'mps': torch sees no Apple GPU"):
        compute_init("mps")
    print0("said", end="!")
    assert capsys.readouterr().out == "said!"
