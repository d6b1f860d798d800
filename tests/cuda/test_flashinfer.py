"""The comparison of `benchmarks/cuda.py` with FlashInfer, with a stand-in for its wrapper."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from torch import Tensor

from benchmarks.cuda_parts.kernels import compare_decode, flashinfer
from benchmarks.cuda_parts.report import Sink, open_bench

MODEL = "Qwen2.5-0.5B"


class Pipe:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.found: list[dict[str, object]] = []

    def send(self, figure: dict[str, object]) -> None:
        self.found.append(figure)


class Wrapper:
    """FlashInfer's wrapper of decode attention as far as the benchmark uses it, in float64."""

    factor = 1.0

    def __init__(self, workspace: Tensor, layout: str, *, use_tensor_cores: bool) -> None:
        assert (workspace.dtype, layout, use_tensor_cores) == (torch.uint8, "NHD", True)

    def plan(self, starts: Tensor, pages: Tensor, filled: Tensor, *sizes: int, **dtypes: torch.dtype) -> None:
        """Keep where the keys of each row are."""
        assert set(dtypes) == {"q_data_type", "kv_data_type"} and starts[-1] == len(pages)
        num_heads, num_kv_heads, self.head_dim, page_size = sizes
        self.ratio = num_heads // num_kv_heads
        self.lengths = ((starts.diff() - 1) * page_size + filled).tolist()
        self.rows = pages.split(starts.diff().tolist())

    def run(self, q_RHD: Tensor, pages: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Write the attention output of each row."""
        for row, (places, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            k_KHD, v_KHD = (
                one[places.long()].flatten(0, 1)[:length].double().repeat_interleave(self.ratio, 1) for one in pages
            )
            score_HK = torch.einsum("hd,khd->hk", q_RHD[row].double(), k_KHD) * self.head_dim**-0.5
            out[row] = self.factor * torch.einsum("hk,khd->hd", score_HK.softmax(-1), v_KHD)


class WrongWrapper(Wrapper):
    """Scales its results."""

    factor = 1.1


def test_flashinfer_is_measured_beside_our_kernels() -> None:
    pipe = Pipe()
    sink = Sink("flashinfer", pipe, {"bytes": 1e9}, 0.0)  # type: ignore[arg-type]
    compare_decode(open_bench(is_dry=True), sink, MODEL, Wrapper)
    (figure,) = pipe.found
    assert figure["name"] == "decode attention of FlashInfer, Qwen2.5-0.5B" and figure["unit"] == "µs"
    assert all(figure[key] > 0 for key in ("value", "ours", "of copy"))  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"^its results differ by 0\.1 of the largest from ours$"):
        compare_decode(open_bench(is_dry=True), sink, MODEL, WrongWrapper)


@pytest.mark.parametrize(
    ("is_dry", "reason"), [(True, "it needs a GPU"), (False, "FlashInfer is not installed")], ids=["dry", "absent"]
)
def test_flashinfer_is_optional(is_dry: bool, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    pipe = Pipe()
    bench = dataclasses.replace(open_bench(is_dry=True), is_dry=is_dry)
    flashinfer(bench, Sink("flashinfer", pipe, {}, 0.0), MODEL)  # type: ignore[arg-type]
    assert [one["value"] for one in pipe.found] == [f"not run: {reason}"]
