"""nanochat's generation loop: a dense cache, one column of tokens for all rows at a time.

Used for models that are not `GPT`, and as the reference in tests. Also upstream's `RowState`: forced tokens and end of
one row.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nano_inference.nanochat.cache import KVCache
from nano_inference.nanochat.columns import sample_next_token
from nano_inference.nanochat.names import ASSISTANT_END, UnknownName
from nano_inference.nanochat.tool import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START, PythonTool

Column = tuple[list[int], list[int]]  # one token per row, and its mask: 1 if sampled, 0 if forced


class ChatTokenizer(Protocol):
    """The tokenizer's methods used by the loop; upstream's tokenizer has them too."""

    def encode_special(self, text: str) -> int:
        """Return the id of a special token."""

    def get_bos_token_id(self) -> int:
        """Return the id of <|bos|>."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, including that of special tokens."""


class Specials(NamedTuple):
    """The special tokens of the loop."""

    tool: PythonTool
    terminals: frozenset[int]  # assistant_end and bos, which end a row


class Call(NamedTuple):
    """Arguments of one `generate`."""

    tokens: list[int]
    num_samples: int
    limit: int  # maximal number of columns
    temperature: float
    top_k: int | None
    seed: int
    top_p: float | None


@dataclass  # without slots: as upstream's, it takes further attributes
class RowState:
    """State of a row during generation, with upstream's names."""

    current_tokens: list[int] = field(default_factory=list)
    forced_tokens: deque[int] = field(default_factory=deque)
    in_python_block: bool = False
    python_expr_tokens: list[int] = field(default_factory=list)
    completed: bool = False

    def __post_init__(self) -> None:
        self.current_tokens = self.current_tokens or []


def find_specials(tokenizer: ChatTokenizer) -> Specials:
    """Return the tokenizer's special tokens and its calculator. Raises `ModelError` naming a token it does not have."""
    ids = [_special(tokenizer, text) for text in (PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END)]

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode(list(tokens))

    tool = PythonTool(ids[0], ids[1], ids[2], ids[3], decode, tokenizer.encode)
    return Specials(tool, frozenset((_special(tokenizer, ASSISTANT_END), tokenizer.get_bos_token_id())))


def _special(tokenizer: ChatTokenizer, text: str) -> int:
    try:
        return tokenizer.encode_special(text)
    except KeyError:
        raise UnknownName(f"tokenizer: has no special token {text}, which nanochat's engine needs") from None


def take_token(state: RowState, sampled: int, specials: Specials) -> tuple[int, int]:
    """Append a row's next token, forced if any is pending, else `sampled`; return it and its mask.

    `sampled` is discarded while forced tokens are pending. The tool processes every token, including forced ones.
    """
    is_forced = bool(state.forced_tokens)
    token = state.forced_tokens.popleft() if is_forced else sampled
    state.current_tokens.append(token)
    if token in specials.terminals:
        state.completed = True
    block = tuple(state.python_expr_tokens) if state.in_python_block else None
    block_after, forced = specials.tool.step(block, token)
    state.in_python_block = isinstance(block_after, tuple)
    state.python_expr_tokens = list(block_after) if isinstance(block_after, tuple) else []
    state.forced_tokens.extend(forced)
    return token, 0 if is_forced else 1


def plain_columns(model: Any, specials: Specials, call: Call, dtype: torch.dtype | None = None) -> Iterator[Column]:
    """Yield the columns of nanochat's loop on any model with `config`, `get_device` and `forward(ids, kv_cache=…)`.

    As upstream, samples finished rows until all rows have finished: ignore a row's tokens after its first terminal.
    `dtype` is the precision of the cache; default: that in which the model computes.
    """
    device = torch.device(model.get_device())
    rng = torch.Generator(device=device).manual_seed(call.seed)
    logits_BV, cache = _prefill(model, call, device, dtype)
    states = [RowState(call.tokens.copy()) for _ in range(call.num_samples)]
    num_columns = 0
    while num_columns < call.limit and not all(state.completed for state in states):
        if num_columns:
            column_B1 = torch.tensor([[state.current_tokens[-1]] for state in states], device=device)
            with torch.inference_mode():
                logits_BV = model.forward(column_B1, kv_cache=cache)[:, -1, :]
        sampled = sample_next_token(logits_BV, rng, call.temperature, call.top_k, call.top_p)[:, 0].tolist()
        taken = [take_token(state, token, specials) for state, token in zip(states, sampled, strict=True)]
        yield [token for token, _ in taken], [mask for _, mask in taken]
        num_columns += 1


def _prefill(model: Any, call: Call, device: torch.device, dtype: torch.dtype | None) -> tuple[Tensor, KVCache]:
    """Compute the prompt once; return its last logits and a cache with the prompt, for all rows."""
    config = model.config
    dtype = dtype or _dtype_of(model, device)

    def cache_of(num_rows: int, length: int) -> KVCache:
        head_dim = config.n_embd // config.n_head
        return KVCache(num_rows, config.n_kv_head, length, head_dim, config.n_layer, device, dtype)

    prompt = cache_of(1, len(call.tokens))
    with torch.inference_mode():
        ids_1T = torch.tensor([call.tokens], dtype=torch.long, device=device)
        logits_1V = model.forward(ids_1T, kv_cache=prompt)[:, -1, :]
        cache = cache_of(call.num_samples, len(call.tokens) + call.limit)
        cache.prefill(prompt)
    return logits_1V.expand(call.num_samples, -1), cache


def _dtype_of(model: Any, device: torch.device) -> torch.dtype:
    """Return the precision in which a model computes: COMPUTE_DTYPE, else that of the embedding or first parameter.

    Upstream's weights may have another one (NANOCHAT_DTYPE). Fallback: upstream's old default.
    """
    computed = _compute_dtype(model)
    if computed is not None:
        return computed
    modules = model.modules() if isinstance(model, nn.Module) else iter(())
    table = next((part.weight for part in modules if isinstance(part, nn.Embedding)), None)
    first = next(iter(model.parameters()), None) if table is None and hasattr(model, "parameters") else table
    if isinstance(first, Tensor):
        return first.dtype
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _compute_dtype(model: Any) -> torch.dtype | None:
    """Return COMPUTE_DTYPE of a model, its submodules, or the Python modules that define their classes.

    It is a global in upstream's nanochat/gpt.py; submodules are searched for wrapped models (torch.compile).
    """
    for part in model.modules() if isinstance(model, nn.Module) else (model,):
        homes = (sys.modules.get(owner.__module__) for owner in type(part).__mro__)
        for place in (part, *homes):
            found = getattr(place, "COMPUTE_DTYPE", None)
            if isinstance(found, torch.dtype):
                return found
    return None
