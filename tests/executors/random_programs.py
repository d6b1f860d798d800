"""Random decoders composed of all operations, in unusual shapes, and random steps for them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from nano_inference.core.step import Row, RowState
from nano_inference.executors.batch import in_step_order
from nano_inference.models.config import LayerConfig, ModelConfig, RopeConfig
from nano_inference.models.ops import (
    Activate,
    Activation,
    Add,
    Attend,
    Convolve,
    Copy,
    Embed,
    Gate,
    GatedDelta,
    GatedNorm,
    GateValues,
    HeadNorm,
    Keep,
    Linear,
    Mix,
    Norm,
    Number,
    Op,
    Rotate,
    Smear,
    Softcap,
    Store,
    Unzip,
    WeightSpec,
    Widen,
)
from nano_inference.models.program import Program
from tests.rows import make_row

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "relu_squared")
MAX_LEN = 96
NUM_STATES = 24


@dataclass
class Writer:
    """Generates a random decoder; every operation can occur, sizes are small and often odd."""

    rng: random.Random
    most_head_norms: int = 2

    def __post_init__(self) -> None:
        rng = self.rng
        self.size = 2 * rng.randint(4, 20)
        self.head_dim = 2 * rng.randint(2, 8)
        self.num_kv = rng.choice((1, 2, 3))
        self.num_heads = self.num_kv * rng.choice((1, 2, 3))
        self.vocab_size = rng.randint(20, 70)
        self.padded = self.vocab_size + rng.choice((0, 0, 5))
        self.num_layers = rng.randint(1, 3)
        some = {i for i in range(self.num_layers) if self.chance()}
        self.attends = sorted({*some, rng.randrange(self.num_layers)})
        self.ropes = tuple(
            RopeConfig(
                rotary_dim=rng.choice((self.head_dim, 2)), theta=rng.choice((50.0, 1e4)), reverse=rng.random() < 0.3
            )
            for _ in range(rng.randint(1, 2))
        )
        self.num_named = 0

    def chance(self, share: float = 0.5) -> bool:
        """Return True with probability `share`."""
        return self.rng.random() < share

    def matrix(self, num_out: int, num_in: int) -> WeightSpec:
        """Return a matrix with a new name."""
        self.num_named += 1
        return WeightSpec(f"m{self.num_named}", (num_out, num_in))

    def vector(self, size: int) -> WeightSpec:
        """Return a vector with a new name."""
        self.num_named += 1
        return WeightSpec(f"v{self.num_named}", (size,), "vector")

    def number(self) -> Number:
        """Return one entry of a weight of numbers."""
        self.num_named += 1
        count = self.rng.randint(1, 3)
        return Number(WeightSpec(f"n{self.num_named}", (count,), "number"), self.rng.randrange(count))

    def norm(self, x: str, out: str) -> Norm:
        """Return a norm with random options."""
        weight = self.vector(self.size) if self.chance(0.7) else None
        return Norm(x=x, out=out, weight=weight, eps=1e-5, offset=float(weight is not None and self.chance(0.3)))

    def linear(self, x: str, num_in: int, outs: dict[str, int]) -> Linear:
        """Return projections, with or without biases."""
        biases = tuple(self.vector(rows) for rows in outs.values()) if self.chance(0.3) else ()
        return Linear(
            x=x, out=tuple(outs), matrices=tuple(self.matrix(n, num_in) for n in outs.values()), biases=biases
        )

    def start(self) -> list[Op]:
        """Return embeddings, optionally smeared, copied, or with a table of pairs."""
        table = self.matrix(self.padded, self.size)
        ops: list[Op] = [Embed(out="x", table=table, scale=self.rng.choice((1.0, 2.5)))]
        if self.chance():
            ops.append(self.norm("x", "x"))
        if self.chance(0.4):
            ops += [
                Embed(out="before", table=table, rows="previous"),
                self.linear("x", self.rng.randint(1, self.size), {"gate": 1}),
                Smear(x="x", gate="gate", before="before", share=self.number()),
            ]
        ops.append(Copy(x="x", out="start"))
        pairs = self.matrix(self.rng.randint(3, 40), self.size)
        return [*ops, Embed(out="pair", table=pairs, rows="pair")]

    def residual(self, part: str) -> list[Op]:
        """Add a buffer to the residual, optionally normalised, once or twice."""
        added = [Add(x="x", y=part, out="x")] * (2 if self.chance(0.2) else 1)
        return [*([self.norm(part, part)] if self.chance(0.3) else []), *added]

    def layer(self, index: int) -> list[Op]:
        """Return attention and an MLP with optional terms."""
        ops: list[Op] = []
        if self.chance(0.4):
            ops.append(Mix(x="x", y=self.rng.choice(("start", "pair")), out="x", a=self.number(), b=self.number()))
        if self.chance(0.3):
            ops.append(Mix(x="x", y="start", out="x", a=None, b=self.number(), sign=-1))
        keep = [Keep()] if index == self.num_layers - 1 else []
        mixer = self.attention(self.attends.index(index), keep) if index in self.attends else self.delta(index, keep)
        ops += [self.norm("x", "n"), *mixer, *self.residual("y")]
        if self.chance(0.2):
            ops += [self.linear("x", self.size, {"y": self.size}), Add(x="x", y="y", out="x")]
        return [*ops, self.norm("x", "n"), *self.mlp(), *self.residual("y")]

    def delta(self, index: int, keep: list[Op]) -> list[Op]:
        """Return the gated delta rule with its projections, from several matrices or grouped by key head."""
        rng, state = self.rng, 2 * sum(one not in self.attends for one in range(index))
        num_k, each, k_dim, v_dim = (
            rng.randint(1, 2),
            rng.randint(1, 3),
            rng.randint(1, 20),
            rng.choice((3, 16, 32, 70)),
        )
        keys, num_v, values = num_k * k_dim, num_k * each, num_k * each * v_dim
        if is_grouped := self.chance():
            widths = (k_dim, k_dim, each * v_dim, each * v_dim)
            ops: list[Op] = [
                self.linear("n", self.size, {"qkvz": num_k * sum(widths)}),
                Unzip(x="qkvz", out=("q", "k", "v", "z"), widths=widths),
                self.linear("n", self.size, {"ba": 2 * num_v}),
                Unzip(x="ba", out=("b", "a"), widths=(each, each)),
            ]
        else:
            ops = [self.linear("n", self.size, {"qkv": 2 * keys + values, "z": values, "b": num_v, "a": num_v})]
        self.num_named += 1
        weight = WeightSpec(f"v{self.num_named}", (2 * keys + values, 1, rng.randint(2, 5)), "vector")
        numbers = [WeightSpec(f"n{self.num_named}{name}", (num_v,), "number") for name in "ab"]
        gated = GatedNorm(x="y", gate="z", out="y", weight=self.vector(v_dim), eps=1e-6, head_dim=v_dim)
        return [
            *ops,
            Convolve(
                x=("q", "k", "v") if is_grouped else ("qkv",), out=("q", "k", "v"), widths=(keys, keys, values),
                weight=weight, state=state,
            ),
            GatedDelta(
                q="q", k="k", v="v", a="a", b="b", out="y", a_log=numbers[0], dt_bias=numbers[1], num_k_heads=num_k,
                num_v_heads=num_v, k_dim=k_dim, v_dim=v_dim, state=state + 1,
            ),
            *keep,
            gated if self.chance(0.7) else Gate(x="y", gate="z", out="y"),
            self.linear("y", values, {"y": self.size}),
        ]  # fmt: skip

    def attention(self, index: int, keep: list[Op]) -> list[Op]:
        """Return attention: heads normalised and rotated in any order, values and heads optionally gated."""
        dim, num_kv, num_q = self.head_dim, self.num_kv * self.head_dim, self.num_heads * self.head_dim
        is_gated = self.chance(0.4)
        queries = {"qg": 2 * num_q} if is_gated else {"q": num_q}
        ops: list[Op] = [self.linear("n", self.size, queries | {"k": num_kv, "v": num_kv})]
        ops += [Unzip(x="qg", out=("q", "og"), widths=(dim, dim))] if is_gated else []
        if self.chance(0.4):
            table = self.matrix(self.padded, num_kv)
            ops += [
                self.linear("n", self.rng.randint(1, self.size), {"share": self.num_kv}),
                Embed(out="values", table=table),
                GateValues(v="v", gate="share", more="values", head_dim=dim, scale=1.5),
            ]
        steps: list[Op] = []
        if self.chance(0.7):
            steps.append(Rotate(x=("q", "k"), head_dim=dim, rope=self.rng.randrange(len(self.ropes))))
        for _ in range(min(self.rng.choice((0, 1, 1, 2)), self.most_head_norms)):
            norms = (self.vector(dim), self.vector(dim)) if self.chance() else ()
            steps.append(HeadNorm(x=("q", "k"), norms=norms, head_dim=dim, eps=1e-6, offset=float(bool(norms))))
        self.rng.shuffle(steps)
        attend = Attend(
            q="q", k="k", v="v", out="att", layer=index, num_heads=self.num_heads, num_kv_heads=self.num_kv,
            head_dim=dim, scale=self.rng.choice((0.2, 1 / dim)), window=self.rng.choice((None, None, 1, 9)),
            softcap=self.rng.choice((None, None, 3.0)),
        )  # fmt: skip
        gate = [Gate(x="att", gate="og", out="att")] if is_gated else []
        return [
            *(*ops, *steps, Store(k="k", v="v", layer=index, head_dim=dim), attend, *keep, *gate),
            self.linear("att", num_q, {"y": self.size}),
        ]

    def mlp(self) -> list[Op]:
        """Return a gated MLP, or one with relu²."""
        kind, inner = self.rng.choice(ACTIVATIONS), self.rng.randint(3, 50)
        is_gated = kind != "relu_squared"
        outs = {"gate": inner, "up": inner} if is_gated else {"gate": inner}
        return [
            self.linear("n", self.size, outs),
            Activate(gate="gate", up="up" if is_gated else None, out="act", kind=kind),
            self.linear("act", inner, {"y": self.size}),
        ]

    def program(self) -> Program:
        """Return the decoder."""
        body = [*self.start(), *(op for index in range(self.num_layers) for op in self.layer(index))]
        if self.chance(0.3):
            body.append(Mix(x="x", y="start", out="x", a=None, b=self.number(), sign=-1))
        head = Linear(x="h", out=("logits",), matrices=(self.matrix(self.padded, self.size),), num_rows=self.vocab_size)
        cap: tuple[Op, ...] = (Softcap(x="logits", cap=5.0),) if self.chance() else ()
        return Program(
            body=tuple(body),
            final=(self.norm("x", "h"),),
            head=(head, Widen(x="logits", out="logits"), *cap),
            vocab_size=self.vocab_size,
            hidden_size=self.size,
            ropes=self.ropes,
        )

    def config(self) -> ModelConfig:
        """Return a configuration of these sizes."""
        return ModelConfig(
            architecture="Random", family="dense", vocab_size=self.vocab_size, hidden_size=self.size,
            intermediate_size=8, num_heads=self.num_heads, num_kv_heads=self.num_kv, head_dim=self.head_dim,
            layers=(LayerConfig(),) * self.num_layers, ropes=self.ropes, max_positions=MAX_LEN,
        )  # fmt: skip


def random_weights(program: Program, generator: torch.Generator) -> dict[str, Tensor]:
    """Return weights with a scale that keeps activations near 1."""
    found = {}
    for spec in program.weights:
        values = torch.randn(spec.shape, generator=generator)
        found[spec.name] = values / spec.shape[-1] ** 0.5 if spec.kind == "matrix" else 0.5 + 0.2 * values
    return found


def random_steps(
    rng: random.Random, vocab_size: int, block_size: int
) -> tuple[list[tuple[tuple[Row, ...], list[int]]], int]:
    """Return ragged steps of several sequences over shuffled blocks, with the kept rows, and the number of blocks.

    A sequence's state moves between `NUM_STATES` slots, and some rows continue from a snapshot of it.
    """
    num_texts = rng.randint(1, 5)
    texts = [[rng.randrange(vocab_size) for _ in range(MAX_LEN)] for _ in range(num_texts)]
    per_text = -(-MAX_LEN // block_size)
    blocks = list(range(num_texts * per_text))
    rng.shuffle(blocks)
    ends, steps, slots = [0] * num_texts, [], list(range(num_texts))
    snapshots: dict[int, tuple[int, int]] = {}  # a text's position, and the slot of its state there
    for _ in range(rng.randint(2, 4)):
        rows = []
        free = list({*range(NUM_STATES)} - {*slots} - {slot for _, slot in snapshots.values()})
        rng.shuffle(free)
        for i in range(num_texts):
            source = slots[i]
            if i in snapshots and rng.random() < 0.4:
                ends[i], source = snapshots[i]
            start, end = ends[i], min(MAX_LEN, ends[i] + rng.choice((0, 1, 1, 2, 7, 30)))
            if start < end:
                if source != slots[i] or rng.random() < 0.3:
                    slots[i] = free.pop()
                saves: list[tuple[int, int]] = []
                if i not in snapshots and rng.random() < 0.5:
                    snapshots[i] = (rng.randint(start + 1, end), free.pop())
                    saves = [snapshots[i]]
                ends[i] = end
                table = tuple(blocks[i * per_text : i * per_text + -(-end // block_size)])
                state = RowState(slots[i], source, tuple(saves))
                previous = texts[i][start - 1] if start else -1
                fields = {"prev_token": previous, "start": start, "blocks": table, "state": state}
                rows.append(make_row(i, tuple(texts[i][start:end]), **fields))
        if rows:
            ordered = in_step_order(tuple(rows))
            places = range(sum(len(row.tokens) for row in ordered))
            kept = sorted(rng.sample(places, rng.randint(1, len(places)))) if rng.random() < 0.7 else list(places)
            steps.append((ordered, kept))
    return steps, len(blocks)
