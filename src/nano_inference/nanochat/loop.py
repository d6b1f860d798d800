"""nanochat's generation loop: a dense cache, one column of tokens for all rows at a time.

For models that are not `GPT`, and the reference in tests.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nano_inference.nanochat.cache import KVCache
from nano_inference.nanochat.calculator import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START, PythonTool
from nano_inference.nanochat.columns import sample_next_token
from nano_inference.nanochat.dialogue import ASSISTANT_END
from nano_inference.nanochat.files import UnknownName

Column = tuple[list[int], list[int]]  # one token per row, and its mask: 1 if sampled, 0 if forced


class ChatTokenizer(Protocol):
    """The tokenizer's methods used by the loop; upstream's tokenizer has them too."""

    def encode_special(self, text: str) -> int: ...

    def get_bos_token_id(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...  # without special tokens

    def decode(self, ids: list[int]) -> str: ...  # with the text of special tokens


class Call(NamedTuple):
    """Arguments of one `generate`, and the special tokens of its tokenizer."""

    tokens: list[int]
    num_samples: int
    limit: int  # maximal number of columns
    temperature: float
    top_k: int | None
    seed: int
    top_p: float | None
    tool: PythonTool
    terminals: frozenset[int]  # assistant_end and bos, which end a row


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


def find_specials(tokenizer: ChatTokenizer) -> tuple[PythonTool, frozenset[int]]:
    """Return the tokenizer's calculator and terminals. Raises `UnknownName` naming a token it does not have."""

    def special(text: str) -> int:
        try:
            return tokenizer.encode_special(text)
        except KeyError:
            raise UnknownName(f"tokenizer: has no special token {text}, which nanochat's engine needs") from None

    start, end, out, out_end = (special(text) for text in (PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END))
    tool = PythonTool(start, end, out, out_end, lambda tokens: tokenizer.decode(list(tokens)), tokenizer.encode)
    return tool, frozenset((special(ASSISTANT_END), tokenizer.get_bos_token_id()))


def plain_columns(model: Any, call: Call, dtype: torch.dtype | None = None) -> Iterator[Column]:
    """Yield the columns of nanochat's loop on any model with `config`, `get_device` and `forward(ids, kv_cache=…)`.

    As upstream, samples finished rows until all rows have finished: ignore a row's tokens after its first terminal.
    `dtype` is the precision of the cache; default: that in which the model computes.
    """
    config, device = model.config, torch.device(model.get_device())
    rng = torch.Generator(device=device).manual_seed(call.seed)
    sizes = (config.n_embd // config.n_head, config.n_layer, device, dtype or _dtype_of(model, device))
    prompt = KVCache(1, config.n_kv_head, len(call.tokens), *sizes)
    with torch.inference_mode():
        ids_1T = torch.tensor([call.tokens], dtype=torch.long, device=device)
        logits_BV = model.forward(ids_1T, kv_cache=prompt)[:, -1, :].expand(call.num_samples, -1)
        cache = KVCache(call.num_samples, config.n_kv_head, len(call.tokens) + call.limit, *sizes)
        cache.prefill(prompt)
    states = [RowState(call.tokens.copy()) for _ in range(call.num_samples)]
    for column in range(call.limit):
        if all(state.completed for state in states):
            return
        if column:
            ids_B1 = torch.tensor([[state.current_tokens[-1]] for state in states], device=device)
            with torch.inference_mode():
                logits_BV = model.forward(ids_B1, kv_cache=cache)[:, -1, :]
        sampled = sample_next_token(logits_BV, rng, call.temperature, call.top_k, call.top_p)[:, 0].tolist()
        masks = [0 if state.forced_tokens else 1 for state in states]
        yield [_take(state, token, call) for state, token in zip(states, sampled, strict=True)], masks


def _take(state: RowState, sampled: int, call: Call) -> int:
    """Append a row's next token and return it: a pending forced one if there is any, else `sampled`.

    The tool processes every token, including forced ones.
    """
    token = state.forced_tokens.popleft() if state.forced_tokens else sampled
    state.current_tokens.append(token)
    state.completed = state.completed or token in call.terminals
    block, forced = call.tool.step(tuple(state.python_expr_tokens) if state.in_python_block else None, token)
    state.in_python_block = isinstance(block, tuple)
    state.python_expr_tokens = list(block) if isinstance(block, tuple) else []
    state.forced_tokens.extend(forced)
    return token


def _dtype_of(model: Any, device: torch.device) -> torch.dtype:
    """Return the precision in which a model computes: COMPUTE_DTYPE, else that of the embedding or first parameter.

    COMPUTE_DTYPE is a global in upstream's nanochat/gpt.py, whose weights may have another precision; a model wrapped
    by torch.compile has it in a submodule. Fallback: upstream's old default.
    """
    parts = list(model.modules()) if isinstance(model, nn.Module) else [model]
    for part in parts:
        for place in (part, *(sys.modules.get(owner.__module__) for owner in type(part).__mro__)):
            found = getattr(place, "COMPUTE_DTYPE", None)
            if isinstance(found, torch.dtype):
                return found
    first = next((part.weight for part in parts if isinstance(part, nn.Embedding)), None)
    if first is None and hasattr(model, "parameters"):
        first = next(iter(model.parameters()), None)
    if isinstance(first, Tensor):
        return first.dtype
    return torch.bfloat16 if device.type == "cuda" else torch.float32
