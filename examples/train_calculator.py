"""Train a very small nanochat model from scratch on a CPU, which calculates and counts letters by calling a tool.

The model has nanochat's current architecture (smear, value embeddings, backout, windows), its tokens are bytes, and the
files have nanochat's checkpoint format:

    alias train="python examples/train_calculator.py --threads 1"
    train --out first
    train --out second --start first/model_003400.pt --seed 1 --steps 1000
    train --out calculator --start second/model_001000.pt --seed 2 --steps 1000

With one thread, these commands gave the packaged model bit for bit when they were repeated.
Stages after the first have half the learning rate, and more of what is learned slowly: chats, numbers in words, two
steps. At the end the model answers held-out questions, with the tool and without. It learns to copy the tool's result,
so without the tool it fails. benchmarks/calculator.py measures each skill.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import calculator_data as data
import tiktoken
import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1.1920929e-07
ROPE_BASE, QK_SCALE, SOFTCAP = 100_000.0, 1.2, 15.0
SMEAR_COLUMNS, GATE_COLUMNS = 24, 12
WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
"""nanochat's split pattern; it has no effect if every byte is a token."""
VOCABULARY = 256 + len(data.SPECIALS)
FAST_BFLOAT16 = any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16"))
PADDED = -(-VOCABULARY // 64) * 64
CONFIG: Mapping[str, int | str] = MappingProxyType(
    {
        "sequence_len": data.CONTEXT,
        "vocab_size": VOCABULARY,
        "n_layer": 5,
        "n_head": 5,
        "n_kv_head": 5,
        "n_embd": 160,
        "window_pattern": "SSSL",
    }
)


def norm(x: Tensor) -> Tensor:
    """Return `x` scaled to a root mean square of one over the last dimension."""
    return functional.rms_norm(x, (x.shape[-1],), eps=EPSILON)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (j, j + half) of each head by their negative angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


class Matrix(nn.Linear):
    """A linear layer without bias; training uses bfloat16 if the processor supports it (three times as fast)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product in float32."""
        if self.training and FAST_BFLOAT16:
            return functional.linear(x.bfloat16(), self.weight.bfloat16()).float()
        return functional.linear(x, self.weight)


class Attention(nn.Module):
    """Causal attention over a window; every other layer adds value embeddings to V."""

    def __init__(self, width: int, heads: int, kv_heads: int, gated: bool) -> None:
        super().__init__()
        self.size = width // heads
        self.c_q, self.c_proj = Matrix(width, width), Matrix(width, width)
        self.c_k, self.c_v = (Matrix(width, kv_heads * self.size) for _ in range(2))
        if gated:
            self.ve_gate = Matrix(GATE_COLUMNS, kv_heads)

    def heads(self, x: Tensor) -> Tensor:
        """Return [B, T, H * D] as [B, H, T, D]."""
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(self, x: Tensor, own: Tensor | None, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention output [B, T, C]; `own` is the tokens' value embeddings, if the layer has them."""
        q, k, v = self.heads(self.c_q(x)), self.heads(self.c_k(x)), self.heads(self.c_v(x))
        if own is not None:
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., :GATE_COLUMNS]))
            v = v + gate.transpose(1, 2).unsqueeze(-1) * self.heads(own)
        q, k = (QK_SCALE * norm(rotate(part, cos, sin)) for part in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two matrices with squared ReLU between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Matrix(width, 4 * width), Matrix(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [B, T, C]."""
        hidden = self.c_fc(x).relu()
        return self.c_proj(hidden * hidden)


class Model(nn.Module):
    """nanochat's model as of March 2026, with the parameter names of its checkpoints."""

    def __init__(self, config: Mapping[str, int | str]) -> None:
        super().__init__()
        n, width, heads, kv_heads = (int(config[name]) for name in ("n_layer", "n_embd", "n_head", "n_kv_head"))
        blocks = [
            nn.ModuleDict({"attn": Attention(width, heads, kv_heads, i % 2 == (n - 1) % 2), "mlp": Mlp(width)})
            for i in range(n)
        ]
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(PADDED, width), "h": nn.ModuleList(blocks)})
        self.lm_head = Matrix(width, PADDED)
        kv_width = kv_heads * width // heads
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(PADDED, kv_width) for i in range((n - 1) % 2, n, 2)})
        self.resid_lambdas, self.x0_lambdas = nn.Parameter(torch.ones(n)), nn.Parameter(torch.full((n,), 0.1))
        self.smear_gate, self.smear_lambda = Matrix(SMEAR_COLUMNS, 1), nn.Parameter(torch.ones(1))
        self.backout_lambda = nn.Parameter(torch.full((1,), 0.2))
        short = -(-int(config["sequence_len"]) // 4 // 128) * 128
        pattern = str(config["window_pattern"]).upper()
        self.windows = [short if i < n - 1 and pattern[i % len(pattern)] == "S" else 0 for i in range(n)]
        self.angles = ROPE_BASE ** (-torch.arange(0, width // heads, 2) * heads / width)
        self.start(width)

    def start(self, width: int) -> None:
        """Initialize the matrices; projections into the residual stream are zero."""
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            if name.endswith("c_proj.weight") or "gate" in name:
                nn.init.zeros_(weight)
            elif "wte" in name:
                nn.init.normal_(weight)
            else:
                bound = 0.01 if "lm_head" in name else math.sqrt(3 / width)
                nn.init.uniform_(weight, -bound, bound)

    def masks(self, length: int) -> list[Tensor | None]:
        """Return each layer's attention mask [T, T]; None for full causal attention."""
        past = torch.arange(length)[:, None] - torch.arange(length)
        return [(past >= 0) & (past <= window) if 0 < window < length - 1 else None for window in self.windows]

    def forward(self, ids: Tensor, last: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V], or [B, V] at position `last[b]` of each row."""
        e = norm(self.transformer["wte"](ids))
        smear = self.smear_lambda * torch.sigmoid(self.smear_gate(e[:, 1:, :SMEAR_COLUMNS]))
        x = x0 = kept = torch.cat((e[:, :1], e[:, 1:] + smear * e[:, :-1]), dim=1)
        angles = torch.arange(ids.shape[1])[:, None] * self.angles
        cos, sin, masks = angles.cos(), angles.sin(), self.masks(ids.shape[1])
        for i, block in enumerate(self.transformer["h"]):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            own = self.value_embeds[str(i)](ids) if str(i) in self.value_embeds else None
            x = x + block["attn"](norm(x), own, cos, sin, masks[i])
            x = x + block["mlp"](norm(x))
            kept = x if i == len(masks) // 2 else kept
        x = x - self.backout_lambda * kept
        x = x if last is None else x[torch.arange(len(x)), last]
        logits = self.lm_head(norm(x))[..., :VOCABULARY]
        return SOFTCAP * torch.tanh(logits / SOFTCAP)


def batches(seed: int, tokens: int, second: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids and targets (-100: ignored) of a stage, without end; a batch has conversations of similar length."""
    rng = random.Random(seed)
    while True:
        rows = (data.render(data.conversation(rng, second), data.CONTEXT) for _ in range(1024))
        pool = sorted(rows, key=lambda row: len(row[0]))
        packs: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in pool:
            if (len(packs[-1]) + 1) * len(row[0]) > tokens:
                packs.append([])
            packs[-1].append(row)
        rng.shuffle(packs)
        for pack in packs:
            ids, mask = (
                nn.utils.rnn.pad_sequence([torch.tensor(row[part]) for row in pack], batch_first=True)
                for part in (0, 1)
            )
            yield ids[:, :-1], ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)


def optimizers(model: Model, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the blocks' matrices and AdamW for embeddings, head and scalars."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if ".h." in name and "gate" not in name]
    tables = [p for name, p in named if "wte" in name or "value_embeds" in name]
    rest = [p for name, p in named if all(p is not one for one in matrices + tables)]
    groups = [{"params": tables, "lr": 10 * rate}, {"params": rest, "lr": 2 * rate}]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def schedule(step: int, steps: int) -> float:
    """Return the learning rate's factor: linear warm-up, constant, linear decay to zero."""
    return min(1.0, (step + 1) / 50, (steps - step) / (0.6 * steps))


def train(model: Model, args: argparse.Namespace) -> None:
    """Train for the given steps."""
    parts = optimizers(model, args.rate / 2 if args.start else args.rate)
    groups = [(group, group["lr"]) for part in parts for group in part.param_groups]
    started, stream, mean = time.perf_counter(), batches(args.seed, args.tokens, bool(args.start)), 0.0
    for step in range(args.steps):
        for group, rate in groups:
            group["lr"] = rate * schedule(step, args.steps)
        ids, targets = next(stream)
        loss = functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        for part in parts:
            part.step()
            part.zero_grad()
        mean += (loss.item() - mean) / min(step + 1, 50)
        if step % 100 == 99 or step == args.steps - 1:
            print(f"step {step + 1:5}  loss {mean:.4f}  {time.perf_counter() - started:.0f} s", flush=True)


@torch.inference_mode()
def validation_loss(model: Model, seed: int, count: int, second: bool) -> float:
    """Return the mean loss on batches from another seed."""
    pairs = [pair for pair, _ in zip(batches(seed, 4096, second), range(count), strict=False)]
    losses = [functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten()) for ids, targets in pairs]
    return sum(loss.item() for loss in losses) / count


def tool_output(row: list[int]) -> list[int]:
    """Return the tokens that the calculator adds to a row; empty if the row does not end a call."""
    if row[-1] != data.PYTHON_END or data.PYTHON not in row:
        return []
    begin = len(row) - row[::-1].index(data.PYTHON)
    result = data.result_text(bytes(token for token in row[begin:] if token < 256).decode("utf-8", "replace"))
    return [] if result is None else [data.OUTPUT, *result.encode(), data.OUTPUT_END]


@torch.inference_mode()
def replies(model: Model, questions: list[str], tool: bool) -> list[str]:
    """Return the last part of each greedy reply, with or without the calculator. There is no KV cache."""
    rows = [[data.BOS, *data.question_ids(question)] for question in questions]
    unfinished, limit = list(rows), data.CONTEXT
    while unfinished:
        unfinished.sort(key=len)
        for some in (unfinished[first : first + 64] for first in range(0, len(unfinished), 64)):
            ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in some], batch_first=True)
            last = torch.tensor([len(row) - 1 for row in some])
            for row, token in zip(some, model(ids, last).argmax(-1).tolist(), strict=True):
                row.append(token)
                row.extend(tool_output(row) if tool else [])
        unfinished = [row for row in unfinished if row[-1] not in (data.ASSISTANT_END, data.BOS) and len(row) < limit]
    return [last_part(row) for row in rows]


def last_part(row: list[int]) -> str:
    """Return the text after the last special token, not counting one that ends the row."""
    row = row[:-1] if row[-1] >= 256 else row
    begin = max(i for i, token in enumerate(row) if token >= 256) + 1
    return bytes(row[begin:]).decode("utf-8", "replace")


def examine(model: Model, seed: int, count: int = 250) -> None:
    """Print how many held-out questions of each kind are answered correctly, with and without the tool."""
    for tool in (True, False):
        right = {}
        for kind in ("arithmetic", "letters"):
            asked = data.held_out(count, seed, kind)
            texts = replies(model, [question for question, _ in asked], tool)
            right[kind] = sum(data.is_right(text, answer) for text, (_, answer) in zip(texts, asked, strict=True))
        shares = ", ".join(f"{kind} {number / count:.1%}" for kind, number in right.items())
        total = sum(right.values())
        print(f"{'with the tool' if tool else 'without the tool'}: {total} of {2 * count} right ({shares})", flush=True)


def write(model: Model, out: Path, args: argparse.Namespace, loss: float) -> None:
    """Write the checkpoint and tokenizer into one directory, in nanochat's format."""
    out.mkdir(parents=True, exist_ok=True)
    state = {name: weight.bfloat16() if weight.dim() > 1 else weight for name, weight in model.state_dict().items()}
    torch.save(state, out / f"model_{args.steps:06}.pt")
    settings = {"seed": args.seed, "steps": args.steps, "tokens": args.tokens, "rate": args.rate}
    meta = {"step": args.steps, "val_loss": loss, "model_config": dict(CONFIG), "user_config": settings}
    (out / f"meta_{args.steps:06}.json").write_text(json.dumps(meta, indent=2) + "\n")
    ranks = {bytes([value]): value for value in range(256)}
    specials = {name: 256 + i for i, name in enumerate(data.SPECIALS)}
    encoding = tiktoken.Encoding("rustbpe", pat_str=WORDS, mergeable_ranks=ranks, special_tokens=specials)
    (out / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    torch.save(torch.tensor([1] * 256 + [0] * len(specials), dtype=torch.int32), out / "token_bytes.pt")


def main() -> None:
    """Train, round the matrices to bfloat16 (the stored dtype), write the checkpoint, and evaluate it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoint")
    parser.add_argument("--start", type=Path, help="model_*.pt of the stage before")
    parser.add_argument("--steps", type=int, default=3400)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per batch")
    parser.add_argument("--rate", type=float, default=0.004, help="learning rate of the matrices in the first stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--validation", type=int, default=8, help="batches of the validation loss")
    parser.add_argument("--examples", type=int, default=250, help="held-out questions of each kind, 0 for none")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(args.seed)
    model = Model(CONFIG)
    if args.start:
        model.load_state_dict(torch.load(args.start, weights_only=True))
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters", flush=True)
    train(model, args)
    model.eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16() if weight.dim() > 1 else weight)
    loss = round(validation_loss(model, args.seed + 1, args.validation, bool(args.start)), 5)
    write(model, args.out, args, loss)
    print(f"validation loss {loss}, {time.process_time():.0f} s of processor time", flush=True)
    if args.examples:
        examine(model, args.seed, args.examples)


if __name__ == "__main__":
    main()
