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
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.loading.checkpoint import OWN_FORMATS, open_checkpoint
from nano_inference.loading.opened import Checkpoint
from nano_inference.loading.sources import TensorSource, check_names, load_into
from nano_inference.models.config import LayerConfig, ModelConfig
from nano_inference.nanochat.cache import KVCache
from nano_inference.nanochat.columns import candidates
from nano_inference.nanochat.configs import model_config_of
from nano_inference.nanochat.costs import Costs, costs_of
from nano_inference.nanochat.format import FORMAT
from nano_inference.nanochat.kinds import FAMILY
from nano_inference.nanochat.opening import named_sources, open_tensors
from nano_inference.nanochat.program import program
from nano_inference.nanochat.terms import NanochatTerms, terms_of
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
        self.weights: Mapping[str, Tensor] = MappingProxyType(own_names(model))
        """nanochat's name -> tensor in the model's memory."""
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
        named = model_config if isinstance(model_config, Mapping) else _fields_of(model_config)
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
        """Return an executor for this model: CPU kernels if `config` selects them, else torch.

        The torch executor shares this model's memory; the kernels have a packed copy (see `refresh`). Raises
        `ValueError` as `pick_kernels`.
        """
        library = pick_kernels(config, self.get_device()) if self._can_pack(config) else None
        if library is None:
            return self.model.on_same_weights(sampler)
        model, rounding = self.model.config, ROUNDINGS[config.dtype]
        packed = CpuExecutor(model, self.model.program, library, model.max_positions, rounding, sampler)
        self.refresh(packed)
        return packed

    def _can_pack(self, config: EngineConfig) -> bool:
        """Return whether the kernels can be used: the model is float32, or `config` requests kernels or a dtype."""
        is_asked = config.kernels not in ("auto", "off") or config.dtype != "auto"
        return is_asked or self.model.dtype == torch.float32

    def refresh(self, executor: Executor) -> None:
        """Update an executor of this model with the present weights."""
        if executor.code == self.model.code:
            self.model.lend_to(executor)
        else:
            load_weights(executor, {name: TensorSource(value) for name, value in self.model.weight_values()})

    def eval(self) -> Self:
        """Return self: the model is always in evaluation mode."""
        return self

    def __call__(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        kv_cache: KVCache | None = None,
        loss_reduction: LossReduction = "mean",
    ) -> Tensor:
        """Return what `forward` does."""
        return self.forward(idx, targets, kv_cache, loss_reduction)

    def setup_optimizer(self, *rates: float, **named_rates: float) -> NoReturn:
        """Raise `NotImplementedError`: this model does not train."""
        raise NotImplementedError("setup_optimizer: this GPT has no gradients; train with nanochat's own gpt.py")

    def num_matmul_params(self) -> int:
        """Return the number of weights in matrix products, without embedding tables and scalars."""
        tables = ("wte", "value_embeds", "bigram_embed")
        return sum(w.numel() for name, w in self.weights.items() if w.dim() == 2 and not any(t in name for t in tables))

    def estimate_decode_flops(self, context_len: int) -> int:
        """Return the operations of one token with `context_len` tokens of context, as upstream counts."""
        return self._costs().decode_flops(context_len)

    def estimate_prefill_flops(self, num_tokens: int) -> int:
        """Return the operations of a prompt with logits of every token, as upstream counts."""
        return self._costs().prefill_flops(num_tokens)

    def kv_bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return self._costs().kv_layer_bytes * self.config.n_layer

    def kv_read_bytes(self, context_len: int) -> int:
        """Return the bytes of keys and values read by one token with `context_len` tokens of context."""
        return self._costs().kv_read_bytes(context_len)

    def _costs(self) -> Costs:
        return costs_of(self.model.config, self.num_matmul_params(), self.model.dtype.itemsize)

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
        logits_BTV = self._logits(idx, kv_cache)
        if targets is None:
            return logits_BTV
        return functional.cross_entropy(
            logits_BTV.flatten(0, 1), targets.reshape(-1), ignore_index=-1, reduction=loss_reduction
        )

    def _logits(self, ids_BT: Tensor, kv_cache: KVCache | None) -> Tensor:
        if ids_BT.dim() != 2 or not ids_BT.size(1):
            raise ValueError(f"ids must be (B, T) with at least one token, got {tuple(ids_BT.shape)}")
        before_B1 = torch.full_like(ids_BT[:, :1], -1)
        if kv_cache is not None and kv_cache.prev_token is not None:
            before_B1 = kv_cache.prev_token
        prev_BT = torch.cat((before_B1, ids_BT[:, :-1]), dim=1)
        x_BTE = start_BTE = self._embed(ids_BT, prev_BT)
        middle_BTE = x_BTE
        rope = self._rotation(kv_cache.get_pos() if kv_cache is not None else 0, ids_BT.size(1), x_BTE.dtype)
        for index, layer in enumerate(self.model.config.layers):
            x_BTE = self._mixed(x_BTE, start_BTE, ids_BT, prev_BT, index)
            x_BTE = x_BTE + self._attend(self._norm(x_BTE), ids_BT, index, layer, rope, kv_cache)
            x_BTE = x_BTE + self._mlp(self._norm(x_BTE), index)
            if index == self.config.n_layer // 2:
                middle_BTE = x_BTE
        if self.terms.has_backout:
            x_BTE = x_BTE - self.weights["backout_lambda"][0] * middle_BTE
        if kv_cache is not None:
            kv_cache.prev_token = ids_BT[:, -1:].clone()
        logits_BTV = (self._norm(x_BTE) @ self.weights["lm_head.weight"][: self.config.vocab_size].T).float()
        cap = self.model.config.logits_softcap
        return logits_BTV if cap is None else cap * torch.tanh(logits_BTV / cap)

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

    # ---- the formulas -----------------------------------------------------------------------------------------------

    def _norm(self, x: Tensor) -> Tensor:
        """Return x · rsqrt(mean(x²) + ε)."""
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.model.config.norm_eps)).to(x.dtype)

    def _embed(self, ids_BT: Tensor, prev_BT: Tensor) -> Tensor:
        """Return norm(wte[id]), plus λ·σ(w·e[:24]) times that of the predecessor from the second token on (G4)."""
        table_VE = self.weights["transformer.wte.weight"]
        e_BTE = self._norm(table_VE[ids_BT])
        if not self.terms.smear_columns:
            return e_BTE
        gate_BT1 = torch.sigmoid(e_BTE[..., : self.terms.smear_columns] @ self.weights["smear_gate.weight"].T)
        smeared_BTE = e_BTE + self.weights["smear_lambda"][0] * gate_BT1 * self._norm(table_VE[prev_BT.clamp(min=0)])
        return torch.where(prev_BT[..., None] < 0, e_BTE, smeared_BTE)

    def _mixed(self, x_BTE: Tensor, start_BTE: Tensor, ids_BT: Tensor, prev_BT: Tensor, index: int) -> Tensor:
        """Return r·x + z·x0 (from G1), plus b times the hashed pair's embedding (G2e)."""
        if not self.terms.has_lambdas:
            return x_BTE
        x_BTE = self.weights["resid_lambdas"][index] * x_BTE + self.weights["x0_lambdas"][index] * start_BTE
        if not self.terms.bigram_rows:
            return x_BTE
        last = self.terms.bigram_rows - 1
        row_BT = torch.where(prev_BT < 0, last, ((36313 * ids_BT) ^ (27191 * prev_BT)) % last)
        pair_BTE = self.weights["bigram_embed.embed.weight"][row_BT]
        return x_BTE + self.weights["bigram_lambdas"][index] * pair_BTE

    def _rotation(self, start: int, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin (1, T, 1, D/2) of position · base^(-2j/D), rounded to `rope.table_dtype`."""
        head_dim, rope = self.model.config.head_dim, self.model.config.ropes[0]
        device = self.get_device()
        theta_D = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
        position_T = torch.arange(start, start + num_tokens, dtype=torch.float32, device=device)
        angle_TD = torch.outer(position_T, theta_D)[None, :, None]
        rounded = torch.bfloat16 if rope.table_dtype == "bfloat16" else torch.float32
        return angle_TD.cos().to(rounded).to(dtype), angle_TD.sin().to(rounded).to(dtype)

    def _attend(
        self,
        a_BTE: Tensor,
        ids_BT: Tensor,
        index: int,
        layer: LayerConfig,
        rope: tuple[Tensor, Tensor],
        kv_cache: KVCache | None,
    ) -> Tensor:
        """Return one layer's attention: q and k rotated, normed and scaled; v plus gated value embedding (from G2)."""
        q_BTHD, k_BTKD, v_BTKD = (self._heads(a_BTE, index, part) for part in ("c_q", "c_k", "c_v"))
        gate = self.weights.get(f"transformer.h.{index}.attn.ve_gate.weight")
        if gate is not None:
            value_BTKD = self.weights[f"value_embeds.{index}.weight"][ids_BT].view_as(v_BTKD)
            gate_BTK = self.terms.gate_scale * torch.sigmoid(a_BTE[..., : self.terms.gate_columns] @ gate.T)
            v_BTKD = v_BTKD + gate_BTK[..., None] * value_BTKD
        q_BTHD, k_BTKD = (self.terms.qk_scale * self._norm(_rotated(x, *rope)) for x in (q_BTHD, k_BTKD))
        start = 0
        if kv_cache is not None:
            start = kv_cache.get_pos()
            all_BKSD = kv_cache.insert_kv(index, k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2))
            k_BTKD, v_BTKD = (x_BKSD.transpose(1, 2) for x_BKSD in all_BKSD)
        window = None if start and self.terms.has_full_decode else layer.window
        out_BTHD = _attention(q_BTHD, k_BTKD, v_BTKD, start, window)
        return out_BTHD.flatten(2) @ self.weights[f"transformer.h.{index}.attn.c_proj.weight"].T

    def _heads(self, a_BTE: Tensor, index: int, part: str) -> Tensor:
        """Return a projection split into heads, (B, T, H or K, D)."""
        x = a_BTE @ self.weights[f"transformer.h.{index}.attn.{part}.weight"].T
        return x.view(*x.shape[:-1], -1, self.model.config.head_dim)

    def _mlp(self, a_BTE: Tensor, index: int) -> Tensor:
        """Return W2 · relu(W1 · a)²."""
        inner = functional.relu(a_BTE @ self.weights[f"transformer.h.{index}.mlp.c_fc.weight"].T).square()
        return inner @ self.weights[f"transformer.h.{index}.mlp.c_proj.weight"].T


def own_names(model: TorchExecutor) -> dict[str, Tensor]:
    """Return a model's weights by nanochat's names, whatever names its checkpoint has."""
    own = program(replace(model.config, terms=replace(terms_of(model.config), has_hf_names=False)))
    tensors = dict(model.weight_values())
    return {one.name: tensors[spec.name] for one, spec in zip(own.weights, model.program.weights, strict=True)}


def _fields_of(config: object) -> dict[str, Any]:
    """Return the fields of `GPTConfig` that an object has; old versions lack some."""
    names = (field.name for field in fields(GPTConfig))
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def stretch(config: ModelConfig) -> ModelConfig:
    """Return the configuration for positions up to `STRETCH` times the trained length, as upstream.

    From G1 on, layers without a short window get one of `sequence_len` tokens, which matters beyond the trained length.
    """
    long = terms_of(config).long_window
    layers = tuple(LayerConfig(window=long if layer.window is None else layer.window) for layer in config.layers)
    return replace(config, layers=layers, max_positions=STRETCH * config.max_positions)


def _rotated(x_BTHD: Tensor, cos_1T1D: Tensor, sin_1T1D: Tensor) -> Tensor:
    """Rotate the pairs (j, j + D/2) by minus the angle."""
    first, second = x_BTHD.chunk(2, dim=-1)
    turned = (first * cos_1T1D + second * sin_1T1D, -first * sin_1T1D + second * cos_1T1D)
    return torch.cat(turned, dim=-1)


def _attention(q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, start: int, window: int | None) -> Tensor:
    """Return causal softmax(q·k / sqrt(D))·v over at most `window` keys, (B, T, H, D)."""
    num_queries, num_keys = q_BTHD.size(1), k_BSKD.size(1)
    is_plain = start == 0 and (window is None or window >= num_keys)
    mask_TS = None
    if not is_plain and (num_queries > 1 or (window is not None and window < num_keys)):
        query_T = torch.arange(start, start + num_queries, device=q_BTHD.device)[:, None]
        key_S = torch.arange(num_keys, device=q_BTHD.device)
        mask_TS = (key_S <= query_T) & (key_S > query_T - (window or num_keys + 1))
    out_BHTD = functional.scaled_dot_product_attention(
        q_BTHD.transpose(1, 2),
        k_BSKD.transpose(1, 2),
        v_BSKD.transpose(1, 2),
        attn_mask=mask_TS,
        is_causal=is_plain and num_queries > 1,
        enable_gqa=q_BTHD.size(2) != k_BSKD.size(2),
    )
    return out_BHTD.transpose(1, 2)


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
