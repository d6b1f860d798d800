"""Weights from a trainer's CUDA memory: through handles (one GPU), and through NCCL by vLLM's rendezvous (two GPUs)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="NO TRANSFORMERS: pip install transformers")
pytest.importorskip("tiktoken", reason="NO TIKTOKEN: pip install tiktoken")

from nano_inference import EngineConfig, InferenceEngine, weights_checksum
from nano_inference.weights.member import Place, plain_specs
from nano_inference.weights.nccl import find_library, stateless_group
from nano_inference.weights.shared_tensors import shared_weights
from nano_inference.weights.state_dicts import state_dicts
from tests.cuda.models import wide_heads
from tests.weights.pairs import Pair, make_pair
from tests.weights.plain_trainer import dtypes_and_shapes
from tests.weights.shared_trainer import shared_trainer
from tests.weights.test_group import free_port
from tests.weights.vllm_trainer import vllm_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; torch sees no device"),
]
FAMILY = "llama-ratio1-untied"


def pair_of(directory: Path) -> Pair:
    """Return a model whose heads the Triton kernels support."""
    return make_pair(FAMILY, directory, wide_heads(FAMILY))


def open_engine(directory: Path, device: str) -> InferenceEngine:
    return InferenceEngine(
        EngineConfig(model_path=str(directory), device=device, dtype="float32", kv_cache_bytes=16 << 20)
    )


@pytest.mark.parametrize("form", ["list", "local", "bytes", "values"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engine_updates_from_cuda_handles(form: str, device: str, tmp_path: Path) -> None:
    pair = pair_of(tmp_path)
    sent = pair.named()
    with shared_trainer(sent, tmp_path, device="cuda") as trainer, open_engine(tmp_path, device) as engine:
        assert (engine.parts.code == "cuda") == (device == "cuda")
        for version in (1, 2):
            text = trainer.serialize(form)
            source = shared_weights(text, is_bucket=form in ("bytes", "values"), field="serialized_named_tensors")
            assert engine.update_weights(source, blocking=True) == version
            trainer.drop()
            assert engine.weights_checksum() == weights_checksum(sent.items())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a device per rank")
@pytest.mark.parametrize("form", ["alone", "packed", "dicts"])
def test_engine_updates_through_nccl(form: str, tmp_path: Path) -> None:
    pair = pair_of(tmp_path)
    sent = pair.named()
    specs = plain_specs(list(sent), *dtypes_and_shapes(sent, list(sent)))
    with vllm_trainer(sent, tmp_path, find_library()) as trainer, open_engine(tmp_path, "cuda") as engine:
        port = free_port()
        trainer.host(port, device="cuda:1")
        group = stateless_group(Place("127.0.0.1", port, 1, 2, 60), torch.device("cuda:0"))
        trainer.wait()
        if form == "alone":
            trainer.send(list(sent))
            source = group.receive(specs)
        elif form == "packed":
            trainer.pack(list(sent), 10_000)
            source = group.receive(specs, bucket_bytes=10_000)
        else:
            trainer.send_dicts(list(sent))
            source = state_dicts(group, {name: tuple(one.shape) for name, one in sent.items()})
        assert engine.update_weights(source, blocking=True) == 1
        trainer.wait()
        assert engine.weights_checksum() == weights_checksum(sent.items())
        group.close()
