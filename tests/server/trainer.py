"""Helpers of the trainer tests: a server with trainer routes, followed requests, weights, a blocked engine thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.server.config import ServerConfig
from nano_inference.types import Delta, EngineRequest
from tests.server.tiny import Running, running
from tests.weights.plain_trainer import Named, Trainer

LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
"""Greedy: K/V recomputed in other chunks may change a sampled token of this model."""
SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = (5, 9, 30, 2, 44)


@contextmanager
def serving(directory: Path, weights_dir: Path | None = None, **options: Any) -> Iterator[Running]:
    """Serve the tiny model with the trainer routes; `options` are fields of `ServerConfig` or of `EngineConfig`."""
    names = ServerConfig.__dataclass_fields__
    fields = {name: options.pop(name) for name in tuple(options) if name in names and name != "max_tokens_per_batch"}
    fields = {"enable_rl": True, "weights_dir": str(weights_dir) if weights_dir else None, **fields}
    config = ServerConfig(port=0, log_requests=False, **fields)
    with running(directory, config, **options) as server:
        yield server


def make_weights(tiny: Path, target: Path, seed: int) -> Path:
    """Write random weights of the tiny model's shapes."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(tiny)
    transformers.LlamaForCausalLM(config).save_pretrained(target)
    return target


SIZES = {"self_attn.q_proj": (32, 32), "self_attn.o_proj": (32, 32), "mlp.down_proj": (64, 32)}
"""Module of the tiny model's layers -> its inputs and outputs."""


def adapter_of(seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """Return the tensors of a LoRA of the tiny model that changes its answers."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for layer, (module, (num_inputs, num_outputs)) in product(range(2), SIZES.items()):
        name = f"base_model.model.model.layers.{layer}.{module}"
        found[f"{name}.lora_A.weight"] = torch.randn(rank, num_inputs, generator=random) * 0.3
        found[f"{name}.lora_B.weight"] = torch.randn(num_outputs, rank, generator=random) * 0.3
    return found


def adapter_config(rank: int = 4, **changes: Any) -> dict[str, Any]:
    """Return PEFT's configuration of it."""
    modules = [name.partition(".")[2] for name in SIZES]
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules, "bias": "none"} | changes


def make_adapter(target: Path, seed: int, rank: int = 4, **changes: Any) -> Path:
    """Write it as PEFT does."""
    target.mkdir(parents=True)
    (target / "adapter_config.json").write_text(json.dumps(adapter_config(rank, **changes)))
    save_file(adapter_of(seed, rank), target / "adapter_model.safetensors")
    return target


def fresh_tokens(tiny: Path, weights: Path, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    """Return the tokens that a new engine with these weights generates."""
    with InferenceEngine(EngineConfig(model_path=str(tiny), device="cpu", kv_cache_bytes=8 << 20)) as engine:
        engine.update_weights(weights_of(weights), blocking=True)
        return engine.generate([list(prompt)], params)[0].completion_tokens


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    model = transformers.LlamaForCausalLM.from_pretrained(directory)
    return {name: weight.detach() for name, weight in model.named_parameters()}


@dataclass
class Stream:
    """One request with one sample. A `LONG` one is held by the step blocker until `result` is called."""

    server: Running
    prompt: Sequence[int] = PROMPT
    params: SamplingParams = LONG
    names: Sequence[str] = ()
    deltas: list[Delta] = field(default_factory=list)
    has_started: threading.Event = field(default_factory=threading.Event)
    is_submitted: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if self.params.max_tokens == LONG.max_tokens:
            self.server.blocker.put_on()
        self.reading = asyncio.run_coroutine_threadsafe(self._read(), self.server.loop)

    async def _read(self) -> TrainingSample:
        request = EngineRequest(prompt=tuple(self.prompt), params=self.params)
        with self.server.link.submit([request], self.names) as outbox:
            self.is_submitted.set()
            while not outbox.is_done:
                self.deltas += [piece.delta for piece in await outbox.take(60)]
                if self.deltas:
                    self.has_started.set()
        sample = self.deltas[-1].sample
        assert sample is not None
        return sample

    def started(self) -> Stream:
        """Wait for the first token."""
        assert self.has_started.wait(60)
        return self

    def result(self) -> TrainingSample:
        """Release the step blocker and return the finished sample."""
        self.server.blocker.take_off()
        return self.reading.result(60)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids received so far."""
        return tuple(token for delta in self.deltas for token in delta.token_ids)


class Hold:
    """A command that blocks the engine thread between two steps until `release` is called."""

    def __init__(self, server: Running) -> None:
        self.is_active = threading.Event()
        self.released = threading.Event()
        self._done = asyncio.run_coroutine_threadsafe(server.link.engine.call(lambda _: self._hold()), server.loop)
        server.on_loop(lambda: None)  # the command is queued now

    def _hold(self) -> None:
        self.is_active.set()
        self.released.wait(60)

    def release(self) -> None:
        self.released.set()
        self._done.result(60)


@contextmanager
def held(server: Running) -> Iterator[None]:
    """Block the engine thread between two steps while the block runs."""
    hold = Hold(server)
    try:
        assert hold.is_active.wait(60)
        yield
    finally:
        hold.release()


@contextmanager
def posting(server: Running, path: str, body: Any) -> Iterator[Future[Any]]:
    """POST from a thread: the reply arrives only after the broadcast or rendezvous."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit(server.post, path, body)


def joined(server: Running, trainer: Trainer, path: str, body: Any, port: int, name: str, num_servers: int = 1) -> Any:
    """Return the reply to a request that joins a trainer's group, which listens at a port."""
    with posting(server, path, body) as reply:
        trainer.join(int(port), name, num_servers + 1)
        trainer.wait()
        return reply.result(60)


def broadcast(
    server: Running, trainer: Trainer, path: str, body: Any, names: Sequence[str], how: str = "send", *words: Any
) -> Any:
    """Announce tensors, broadcast them by an order of the trainer, and return the reply."""
    with posting(server, path, body) as reply:
        trainer.begin(how, list(names), *words)
        trainer.wait()
        return reply.result(60)


def good_names(named: Named) -> list[str]:
    return [name for name in named if name != "short"]


def until(server: Running, condition: Callable[[], object]) -> None:
    """Wait until a condition is true on the event loop."""
    deadline = time.monotonic() + 60
    while not server.on_loop(condition):
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.002)  # polling without a pause takes half of a core from what it waits for


def ok(response: Any) -> dict[str, Any]:
    """Return the JSON of a successful reply, which must have the weight version."""
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    assert isinstance(reply["weight_version"], str) and isinstance(reply["version"], int)
    return reply


def refused(response: Any, status: int, *parts: str) -> dict[str, Any]:
    """Return the error object of a reply with this status, whose message must contain `parts`."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert all(part in error["message"] for part in parts), error["message"]
    return error


def version_of(server: Running) -> int:
    return int(ok(server.client.get("/weight_info"))["version"])


def sampled(server: Running) -> tuple[int, ...]:
    return Stream(server, params=SHORT).result().completion_tokens
