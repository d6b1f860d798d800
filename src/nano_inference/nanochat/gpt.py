"""`GPT`: a nanochat model of any generation, with a plain forward pass.

The forward pass here is slow and simple: dense tensors, with or without a `KVCache`. It is upstream's interface to the
model, and the reference for `Engine`, which runs `program.py` on the same weights with an executor.

Shapes: B rows, T tokens, S keys, E embedding size, H heads, K kv heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, Self

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.build import pick_kernels
from nano_inference.config import Dtype, EngineConfig
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.devices import pick_device, pick_dtype
from nano_inference.executors.loading import load_weights
from nano_inference.executors.opening import ROUNDINGS, load_model
from nano_inference.executors.protocol import Executor
from nano_inference.executors.step import Sampler
from nano_inference.executors.step_input import ForwardInput
from nano_inference.executors.torch.attention import AttentionSpec, StepContext
from nano_inference.executors.torch.compiled import OPERATIONS, CompiledPart
from nano_inference.executors.torch.executor import TorchExecutor, new_store
from nano_inference.executors.torch.store import KVStore
from nano_inference.loading.checkpoint import OWN_FORMATS, open_checkpoint
from nano_inference.loading.formats import Checkpoint
from nano_inference.loading.sources import TensorSource, check_names, load_into
from nano_inference.models.config import LayerConfig, ModelConfig
from nano_inference.models.ops import Store
from nano_inference.models.rope import RotaryTable
from nano_inference.nanochat.cache import KVCache
from nano_inference.nanochat.checkpoint import NanochatTerms, terms_of
from nano_inference.nanochat.columns import candidates
from nano_inference.nanochat.format import FORMAT, model_config_of, named_sources, open_tensors
from nano_inference.nanochat.kinds import FAMILY
from nano_inference.nanochat.program import program
from nano_inference.types import ModelError

LossReduction = Literal["mean", "sum", "none"]
STRETCH = 10  # rotary positions reach this many times the trained length, as upstream's tables


@dataclass  # mutable, as upstream's; without slots: its scripts save config.__dict__
class GPTConfig:
    """Sizes of a model, with nanochat's names and default values."""

    sequence_len: int = 2048
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    window_pattern: str = "SSSL"


class GPT:
    """Owns a model's weights. For inference only."""

    def __init__(self, model: TorchExecutor, config: ModelConfig) -> None:
        """Wrap a loaded model; `config` is the checkpoint's, before `stretch`."""
        self.model = model
        self.terms = terms_of(model.config)
        self.config = GPTConfig(**{"window_pattern": "L", **model_config_of(config)})
        own = program(replace(model.config, terms=replace(self.terms, has_hf_names=False)))
        tensors, pairs = dict(model.weights.values()), zip(own.weights, model.program.weights, strict=True)
        # nanochat's names, whatever those of the checkpoint -> tensors in the model's memory
        self.weights: Mapping[str, Tensor] = MappingProxyType({one.name: tensors[spec.name] for one, spec in pairs})
        without_store = [op for op in model.program.body if not isinstance(op, Store)]
        self._body = CompiledPart(without_store, model.model.weights, {}, "x", OPERATIONS)
        self._no_store = new_store(model.program, 0, 1, model.dtype, model.device)
        self._ropes = tuple(RotaryTable(rope, model.device) for rope in model.program.ropes)
        self.version = 0  # number of `load_state_dict` calls; engines clear their caches when it changes

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, *, device: str = "auto", dtype: Dtype = "auto", overrides: Iterable[str] = ()
    ) -> Self:
        """Load a checkpoint: a model_*.pt file, one of nanochat's directories, or a directory of safetensors.

        Raises `ModelError` if the files cannot be used or contain another family's model.
        """
        checkpoint = open_checkpoint(path, overrides, {**OWN_FORMATS, "nanochat": FORMAT})
        if not isinstance(checkpoint.config.terms, NanochatTerms):
            raise ModelError(f"{path}: contains {checkpoint.config.architecture}, not a nanochat model")
        return cls.of(checkpoint, device=device, dtype=dtype)

    @classmethod
    def from_state_dict(
        cls,
        weights: Mapping[str, Tensor],
        model_config: Mapping[str, Any] | object,
        *,
        device: str = "auto",
        dtype: Dtype = "auto",
        overrides: Iterable[str] = (),
    ) -> Self:
        """Create a model from a copy of weights in memory, such as those of a model in training.

        `model_config` has the fields of meta files, as a mapping or as an object (the model's `config`).
        """
        named = model_config
        if not isinstance(named, Mapping):  # old versions lack some fields
            names = [field.name for field in fields(GPTConfig) if hasattr(model_config, field.name)]
            named = {name: getattr(model_config, name) for name in names}
        return cls.of(open_tensors(weights, named, overrides), device=device, dtype=dtype)

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, device: str = "auto", dtype: Dtype = "auto") -> Self:
        """Load an opened checkpoint."""
        where = pick_device(device)
        stretched = replace(checkpoint, config=stretch(checkpoint.config))
        families, max_len = {"nanochat": FAMILY}, stretched.config.max_positions
        model = load_model(stretched, where, pick_dtype(dtype, where), max_len, families=families)
        return cls(model, checkpoint.config)

    def get_device(self) -> torch.device:
        """Return the device of the weights."""
        return self.weights["transformer.wte.weight"].device

    def parameters(self) -> Iterator[Tensor]:
        """Iterate over the weights; projections of the same input are fused."""
        return iter(self.model.model.weights.stacks.values())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (nanochat's name, weight)."""
        return iter(self.weights.items())

    def state_dict(self) -> dict[str, Tensor]:
        """Return nanochat's names and the weights, not copied."""
        return dict(self.weights)

    def load_state_dict(self, weights: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> None:
        """Copy new values of all weights. Not during a call of `generate`.

        Copies also with `assign`. Raises `ValueError` for `strict=False`, and `ModelError` naming an unknown or missing
        weight or one of another shape, before anything is written.
        """
        if not strict:
            raise ValueError("strict=False: loading only some of the weights is not supported")
        named = named_sources(weights)
        check_names({name: tuple(weight.shape) for name, weight in self.weights.items()}, named)
        load_into(self.weights, named.items())
        self.version += 1

    def executor(self, config: EngineConfig, sampler: Sampler) -> Executor:
        """Return an executor for this model: CPU kernels if it is float32 or `config` asks for them, else torch.

        The torch executor shares this model's memory; the kernels have a packed copy (see `refresh`). Raises
        `ValueError` as `pick_kernels`.
        """
        can_pack = config.kernels not in ("auto", "off") or config.dtype != "auto" or self.model.dtype == torch.float32
        library = pick_kernels(config, self.get_device()) if can_pack else None
        if library is None:
            return self.model.on_same_weights(sampler)
        model, rounding = self.model.config, ROUNDINGS[config.dtype]
        packed = CpuExecutor(model, self.model.program, library, model.max_positions, rounding, sampler)
        self.refresh(packed)
        return packed

    def refresh(self, executor: Executor) -> None:
        """Update an executor of this model with the present weights."""
        if executor.code == self.model.code:
            self.model.lend_to(executor)
        else:
            load_weights(executor, {name: TensorSource(value) for name, value in self.model.weights.values()})

    def eval(self) -> Self:
        """Return self: the model is always in evaluation mode."""
        return self

    def setup_optimizer(self, *rates: float, **named_rates: float) -> NoReturn:
        """Raise `NotImplementedError`: this model does not train."""
        raise NotImplementedError("setup_optimizer: this GPT has no gradients; train with nanochat's own gpt.py")

    def num_matmul_params(self) -> int:
        """Return the number of weights in matrix products, without embedding tables and scalars."""
        tables = ("wte", "value_embeds", "bigram_embed")
        return sum(w.numel() for name, w in self.weights.items() if w.dim() == 2 and not any(t in name for t in tables))

    def estimate_decode_flops(self, context_len: int) -> int:
        """Return the operations of one token with `context_len` tokens of context, as upstream counts."""
        config = self.model.config  # 2 operations per weight, 4 per visible key and element of the queries
        return 2 * self.num_matmul_params() + 4 * config.num_heads * config.head_dim * sum(self._visible(context_len))

    def estimate_prefill_flops(self, num_tokens: int) -> int:
        """Return the operations of a prompt with logits of every token, as upstream counts."""
        config = self.model.config
        seen = sum(full * (full + 1) // 2 + (num_tokens - full) * full for full in self._visible(num_tokens))
        return 2 * self.num_matmul_params() * num_tokens + 4 * config.num_heads * config.head_dim * seen

    def kv_bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return self.model.config.kv_bytes_per_token(self.model.dtype.itemsize)

    def kv_read_bytes(self, context_len: int) -> int:
        """Return the bytes of keys and values read by one token with `context_len` tokens of context."""
        return self.kv_bytes_per_token() // self.config.n_layer * sum(self._visible(context_len))

    def _visible(self, num_context: int) -> list[int]:
        """Return the tokens to which one attends in each layer, as upstream counts: a window without its own key."""
        windows = (layer.window for layer in self.model.config.layers)
        return [num_context if window is None else min(num_context, window - 1) for window in windows]

    @torch.inference_mode()
    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        kv_cache: KVCache | None = None,
        loss_reduction: LossReduction = "mean",
    ) -> Tensor:
        """Return float32 logits (B, T, V) of the tokens `idx` (B, T), which follow those in `kv_cache` if given.

        With `targets` (B, T), return their cross-entropy without gradients: the mean or sum over targets that are not
        -1, or with "none" each one's, (B·T,). Raises `ValueError` for an empty input.
        """
        if idx.dim() != 2 or not idx.size(1):
            raise ValueError(f"ids must be (B, T) with at least one token, got {tuple(idx.shape)}")
        (num_rows, num_tokens), start, before_B1 = idx.shape, 0, None
        if kv_cache is not None:
            start, before_B1 = kv_cache.get_pos(), kv_cache.prev_token
        before_B1 = torch.full_like(idx[:, :1], -1) if before_B1 is None else before_B1
        position_N = torch.arange(start, start + num_tokens, device=idx.device).repeat(num_rows)
        windows = self.model.program.windows
        context = StepContext(
            step=ForwardInput(
                token_T=idx.flatten(),
                prev_T=torch.cat((before_B1, idx[:, :-1]), dim=1).flatten(),
                position_T=position_N,
                slot_T=position_N,
                spans=(),
            ),
            store=self._no_store,
            backend=_DenseAttention(num_rows, start, kv_cache),
            plans={one: None if start and self.terms.has_full_decode else one for one in windows},
            ropes=tuple(table.at(position_N, self.model.dtype) for table in self._ropes),
        )
        hidden_NE = self._body.run([], context)
        if kv_cache is not None:
            kv_cache.prev_token = idx[:, -1:].clone()
        logits_NV = self.model.logits(hidden_NE)
        if targets is None:
            return logits_NV.view(num_rows, num_tokens, -1)
        return functional.cross_entropy(logits_NV, targets.reshape(-1), ignore_index=-1, reduction=loss_reduction)

    def __call__(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        kv_cache: KVCache | None = None,
        loss_reduction: LossReduction = "mean",
    ) -> Tensor:
        return self.forward(idx, targets, kv_cache, loss_reduction)  # a subclass may have its own

    def generate(
        self,
        tokens: list[int],
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 42,
        top_p: float | None = None,
        stop_token: int | None = None,
    ) -> Iterator[int]:
        """Yield tokens, recomputing the whole sequence for each: no cache, no tools.

        A seed gives the tokens of upstream's naive loop, which differ from the engine's (`sample_over_vocabulary`).
        Stops after `max_tokens` tokens or after `stop_token`.
        """
        assert isinstance(tokens, list), "expecting list of ints"
        device = self.get_device()
        rng = torch.Generator(device=device).manual_seed(seed)
        ids_1T = torch.tensor([tokens], dtype=torch.long, device=device)
        for _ in range(max_tokens):
            token_11 = sample_over_vocabulary(self.forward(ids_1T)[:, -1], rng, temperature, top_k, top_p)
            ids_1T = torch.cat((ids_1T, token_11), dim=1)
            token = int(token_11)
            yield token
            if token == stop_token:
                return


class _DenseAttention:
    """Attention of B rows over a `KVCache`, or over the tokens of the call alone; a `Backend` that needs no store."""

    def __init__(self, num_rows: int, start: int, cache: KVCache | None) -> None:
        self._num_rows, self._start, self._cache = num_rows, start, cache

    def plan(self, step: ForwardInput, block_size: int, window: int | None) -> int | None:
        """Return the window."""
        return window

    def attend(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, store: KVStore, layer: int, spec: AttentionSpec, plan: Any
    ) -> Tensor:
        """Append keys and values to the cache; return causal softmax(scale q·k) v over at most `plan` keys."""
        q, k, v = (x.view(self._num_rows, -1, *x.shape[1:]).transpose(1, 2) for x in (q_THD, k_TKD, v_TKD))
        if self._cache is not None:
            k, v = self._cache.insert_kv(layer, k, v)
        num_queries, num_keys = q.size(2), k.size(2)
        is_plain, mask_TS = self._start == 0 and (plan is None or plan >= num_keys), None
        if not is_plain and (num_queries > 1 or (plan is not None and plan < num_keys)):
            query_T1 = torch.arange(self._start, self._start + num_queries, device=q.device)[:, None]
            key_S = torch.arange(num_keys, device=q.device)
            mask_TS = (key_S <= query_T1) & (key_S > query_T1 - (plan or num_keys + 1))
        is_causal, has_groups = is_plain and num_queries > 1, q.size(1) != k.size(1)
        out_BHTD = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_TS, is_causal=is_causal, scale=spec.scale, enable_gqa=has_groups
        )
        return out_BHTD.transpose(1, 2).flatten(0, 1)


def stretch(config: ModelConfig) -> ModelConfig:
    """Return the configuration for positions up to `STRETCH` times the trained length, as upstream.

    From G1 on, layers without a short window get one of `sequence_len` tokens, which matters beyond the trained length.
    """
    long = terms_of(config).long_window
    layers = tuple(LayerConfig(window=long if layer.window is None else layer.window) for layer in config.layers)
    return replace(config, layers=layers, max_positions=STRETCH * config.max_positions)


def sample_over_vocabulary(
    logits_BV: Tensor,
    rng: torch.Generator | None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Sample one token per row from logits [B, V]; return [B, 1] int64. A temperature of 0 or below is argmax.

    `top_k` of 0 or below is no filter. Raises `RuntimeError` for an infinite temperature with `top_k`, as upstream.
    """
    if top_k is not None and top_k > 0:
        kth_B1 = logits_BV.topk(min(top_k, logits_BV.size(-1)), dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    if not temperature > 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    p_BV, _ = candidates(logits_BV, temperature, None, top_p)
    return torch.multinomial(p_BV, num_samples=1, generator=rng)
