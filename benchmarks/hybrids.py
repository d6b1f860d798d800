"""Measure the gated delta rule on the CPU kernels: what it costs, and Qwen3.5 beside Transformers and llama.cpp.

    python benchmarks/hybrids.py [--shape 0.8B] [--layers 8] [--rounds 9] [--threads 2] [--alone]

Random weights and ids, in the shape of a Qwen3.5 with fewer layers and as many ids fewer. First one step of the program
beside the same with the rule replaced by a copy of the values: a token of 1 and of 16 sequences, and a prompt of 256
tokens. Sequences of decode steps have states of their own, in turn; the state of one is 1 MiB (0.8B) or 2 MiB (4B) a
layer. Then, unless --alone, the same in Transformers and, if `xllamacpp` is installed, in llama.cpp's server, all in
float32; there a decode step is 1/32 of what 33 tokens cost more than one. Medians in ms, of CPU time with one thread;
the contenders take turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

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
"""What is measured; a step that returns a number has measured itself, in ms."""


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
                found = work()
                return found if isinstance(found, float) else (clock() - start) * 1e3 / repeats

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


def write_gguf(path: Path, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
    """Write a float32 file for llama.cpp; its value heads are in another order if there are more than key heads."""
    import gguf

    assert isinstance(config.terms, DeltaTerms)
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.ropes[0].rotary_dim)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_rope_freq_base(config.ropes[0].theta)
    writer.add_full_attention_interval(4)
    writer.add_ssm_conv_kernel(config.terms.taps)
    writer.add_ssm_state_size(config.terms.k_dim)
    writer.add_ssm_group_count(config.terms.num_k_heads)
    writer.add_ssm_time_step_rank(config.terms.num_v_heads)
    writer.add_ssm_inner_size(config.terms.num_v_heads * config.terms.v_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{token}" for token in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["t 1"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, config.num_layers)
    for name, value in weights.items():
        value = -value.exp() if name.endswith("A_log") else value
        value = value + 1 if name.endswith("norm.weight") and "linear_attn" not in name else value
        own = names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        if name != "lm_head.weight":  # tied
            writer.add_tensor(own, value.float().squeeze().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_llama_cpp(path: Path, ids: list[int], num_threads: int, clock: Callable[[], float]) -> Steps:
    """Return the steps in llama.cpp's server, in this process; they measure themselves."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.model.path, given.n_parallel, given.n_ctx = str(path), 16, 16 * 512
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = num_threads
    given.cache_type_k = given.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    given.cache_ram_mib, given.n_gpu_layers = 0, 0
    server, pool = xllamacpp.Server(given), ThreadPoolExecutor(16)

    def request(prompt: list[int], count: int) -> None:
        body = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        found = server.handle_completions(body)
        assert found["timings"]["predicted_n"] == count and found["timings"]["prompt_n"] == len(prompt), found

    def timed(num_rows: int, count: int) -> float:
        start = clock()
        list(pool.map(request, [ids[: PROMPT // num_rows]] * num_rows, [count] * num_rows))
        return (clock() - start) * 1e3

    return {
        "1 row": lambda: (timed(1, 33) - timed(1, 1)) / 32,
        "16 rows": lambda: (timed(16, 33) - timed(16, 1)) / 32,
        "prompt": lambda: timed(1, 1),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.8B")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--alone", action="store_true", help="without Transformers and llama.cpp")
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
        contenders = {"ours": steps_of(opened(config, of, library, float_weights), ids), "Transformers": theirs}
        with tempfile.TemporaryDirectory() as directory:
            if find_spec("xllamacpp") is not None:
                path = Path(directory, "model.gguf")
                write_gguf(path, config, float_weights)
                contenders["llama.cpp"] = of_llama_cpp(path, ids, library.num_threads, clock)
            print("float32")
            measured(contenders, 3, clock)


if __name__ == "__main__":
    main()
