"""Measure the gated delta rule on the CPU kernels: what it costs, and Qwen3.5 beside Transformers.

    python benchmarks/hybrids.py [--shape 0.8B] [--layers 8] [--rounds 9] [--threads 2] [--alone]

Random weights and ids, in the shape of a Qwen3.5 with fewer layers and as many ids fewer. First one step of the program
beside the same with the rule replaced by a copy of the values: a token of 1 and of 16 sequences, and a prompt of 256
tokens. Sequences of decode steps have states of their own, in turn; the state of one is 1 MiB (0.8B) or 2 MiB (4B) a
layer. Then, unless --alone, the same in Transformers, float32 both. Medians in ms, of CPU time with one thread; the
contenders take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import torch
from harness import alternate, options, print_row, processor

from nano_inference.build import pick_kernels
from nano_inference.config import EngineConfig
from nano_inference.core.step import Row, RowState
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.loading import load_weights
from nano_inference.executors.protocol import CacheSize
from nano_inference.loading.sources import TensorSource
from nano_inference.models.config import LayerConfig, ModelConfig, RopeConfig
from nano_inference.models.ops import GatedDelta, Unzip
from nano_inference.models.program import Program
from nano_inference.models.qwen35 import DeltaTerms, program
from nano_inference.types import SamplingParams

SHAPES = {  # hidden size, inner size, heads, kv heads, value heads, layers of the whole model
    "0.8B": (1024, 3584, 8, 2, 16, 24),
    "4B": (2560, 9216, 16, 4, 32, 32),
}
VOCABULARY, PROMPT, STATES, BLOCK = 248_320, 256, 32, 16
Steps = dict[str, Callable[[], object]]


def config_of(shape: str, num_layers: int) -> ModelConfig:
    """Return the first layers of a model and its share of the vocabulary."""
    hidden, inner, heads, kv_heads, v_heads, whole = SHAPES[shape]
    layers = [LayerConfig(attends=i % 4 == 3, rope=0 if i % 4 == 3 else None) for i in range(num_layers)]
    return ModelConfig(
        architecture="Qwen3_5ForCausalLM",
        family="qwen35",
        vocab_size=VOCABULARY * num_layers // whole,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=256,
        layers=tuple(layers),
        ropes=(RopeConfig(theta=1e7, rotary_dim=64),),
        max_positions=4096,
        qk_norm=True,
        tie_embeddings=True,
        terms=DeltaTerms(num_k_heads=16, num_v_heads=v_heads, k_dim=128, v_dim=128, taps=4),
    )


def with_copies(of: Program) -> Program:
    """Return a program that copies values where the rule was."""
    found = []
    for op in of.body:
        if isinstance(op, GatedDelta):
            op = Unzip(x=op.v, out=(op.out,), widths=(op.num_v_heads * op.v_dim,))
        elif hasattr(op, "state"):
            op = replace(op, state=op.state // 2)
        found.append(op)
    return replace(of, body=tuple(found))


def opened(config: ModelConfig, of: Program, library: Library, weights: dict[str, torch.Tensor]) -> CpuExecutor:
    executor = CpuExecutor(config, of, library, 4096)
    load_weights(executor, {spec.name: TensorSource(weights[spec.name]) for spec in of.weights})
    num_blocks = STATES * (PROMPT // BLOCK + 2)
    executor.cache.allocate(CacheSize(num_blocks=num_blocks, block_size=BLOCK, num_states=STATES, eager=True))
    assert executor.store.cache.slots_ZF is not None
    executor.store.cache.slots_ZF.normal_(std=0.01)  # not every sequence's prompt is computed
    return executor


def steps_of(executor: CpuExecutor, ids: list[int]) -> Steps:
    """Return the steps that are measured."""
    per_row = PROMPT // BLOCK + 2
    place = iter(range(10**9))

    def row(state: int, tokens: list[int], start: int) -> Row:
        blocks = tuple(range(state * per_row, (state + 1) * per_row))
        return Row(
            id=state, tokens=tuple(tokens), prev_token=1, start=start, blocks=blocks, num_sampled=1,
            params=SamplingParams(), logprobs_mode="raw", seed=0, sample_index=0, state=RowState(state, state),
        )  # fmt: skip

    def run(*rows: Row) -> None:
        ends = list(accumulate(len(one.tokens) for one in rows))
        executor.step_logits(rows, [end - 1 for end in ends])

    def decode(count: int) -> None:
        first = next(place) * count
        run(*(row((first + i) % STATES, [ids[i]], PROMPT) for i in range(count)))

    return {
        "1 row": lambda: [decode(1) for _ in range(8)],
        "16 rows": lambda: [decode(16) for _ in range(2)],
        "prompt": lambda: run(row(0, ids, 0)),
    }


def measured(contenders: dict[str, Steps], rounds: int, clock: Callable[[], float]) -> None:
    """Print each contender's medians in ms, and the ratio of the first to the others."""
    names = list(contenders)
    print_row("ms", *names, *(f"/ {name}" for name in names[1:]))
    for step, repeats in (("1 row", 8), ("16 rows", 2), ("prompt", 1)):
        if any(step not in steps for steps in contenders.values()):
            continue

        def timed(work: Callable[[], object], repeats: int = repeats) -> Callable[[int], float]:
            def measure(_: int) -> float:
                start = clock()
                work()
                return (clock() - start) * 1e3 / repeats

            return measure

        times = alternate({name: timed(steps[step]) for name, steps in contenders.items()}, rounds)
        first, *others = (statistics.median(times[name]) for name in names)
        print_row(step, first, *others, *(first / other for other in others))


def of_transformers(config: ModelConfig, ids: list[int]) -> tuple[dict[str, torch.Tensor], Steps]:
    """Return a random model's weights, and its steps with Transformers' cache."""
    import transformers

    assert isinstance(config.terms, DeltaTerms)
    plain = transformers.Qwen3_5TextConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        linear_num_value_heads=config.terms.num_v_heads,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen3_5ForCausalLM(plain).eval()
    prompt_BT = torch.tensor([ids])

    def decoding(count: int) -> Callable[[], object]:
        with torch.inference_mode():
            cache = model(prompt_BT.expand(count, -1), use_cache=True, logits_to_keep=1).past_key_values

        def decode() -> None:
            for _ in range(8 if count == 1 else 2):
                model(prompt_BT[:, :1].expand(count, -1), past_key_values=cache, use_cache=True)

        return decode

    def guarded(work: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            with torch.inference_mode():
                work()

        return run

    steps = {"1 row": decoding(1), "16 rows": decoding(16), "prompt": lambda: model(prompt_BT, logits_to_keep=1)}
    return dict(model.state_dict()), {name: guarded(work) for name, work in steps.items()}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.8B")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--alone", action="store_true", help="without Transformers")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(given.threads or torch.get_num_threads())
    library = pick_kernels(
        EngineConfig(model_path="none", device="cpu", num_threads=given.threads), torch.device("cpu")
    )
    assert library is not None, "this needs a C compiler"
    config = config_of(given.shape, given.layers)
    of = program(config)
    clock = time.process_time if library.num_threads == 1 else time.perf_counter
    ids = torch.randint(0, config.vocab_size, (PROMPT,)).tolist()
    weights = {spec.name: torch.randn(spec.shape).mul_(0.02).bfloat16() for spec in of.weights}
    print(f"{given.shape}, {given.layers} layers, {processor()}, {library.num_threads} threads; bfloat16")
    ours, copies = (opened(config, one, library, weights) for one in (of, with_copies(of)))
    measured({"rule": steps_of(ours, ids), "copy": steps_of(copies, ids)}, given.rounds, clock)
    del ours, copies, weights
    if not given.alone:
        float_weights, theirs = of_transformers(config, ids)
        print("float32")
        measured({"ours": steps_of(opened(config, of, library, float_weights), ids), "Transformers": theirs}, 3, clock)


if __name__ == "__main__":
    main()
