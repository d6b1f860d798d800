"""Records what one tree's engine gives: `python -m recording.record TREE PLAN OUT`, with TREE/src and TREE on the path.

Uses only public interfaces that earlier commits have too. PLAN is a JSON list of cases with the path of each model's
files; OUT gets one JSON line for each case. A line on stderr names the case that is under way, so that a crash has a
name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nano_inference
from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from recording.cases import MAX_LEN, SCENARIOS, Case, Request, Scenario, requests
from recording.streams import Recording, Stream
from tests.cuda.engines import open_cuda

ROOMY_BYTES, DEFAULT_MODEL_BYTES = 16 << 20, 64 << 20
"""KV caches in which everything finds room."""
SHORT = 7
"""Requests that the default model is asked, which takes 1,000 times as long as a tiny one."""


def main() -> None:
    """Record every case of the plan."""
    tree, plan, out = (Path(text) for text in sys.argv[1:4])
    if not Path(nano_inference.__file__).resolve().is_relative_to(tree.resolve()):
        sys.exit(f"nano_inference was imported from {nano_inference.__file__}, not from {tree}")
    with out.open("w") as file:
        for entry in json.loads(plan.read_text()):
            case = Case(**entry["case"])
            print(f"{case.name}", file=sys.stderr, flush=True)
            file.write(json.dumps(asdict(record(case, entry["files"], entry["kernels"]))) + "\n")


def record(case: Case, files: str, kernels: str) -> Recording:
    """Run one case. A refusal is part of what is recorded."""
    scenario = SCENARIOS[case.scenario]
    options: dict[str, Any] = {
        "model_path": files,
        "device": "cpu",
        "dtype": case.dtype,
        "kernels": kernels if case.path == "c" else "off",
        "kv_cache_bytes": DEFAULT_MODEL_BYTES if case.model == "default" else ROOMY_BYTES,
        "max_model_len": MAX_LEN,
        "num_threads": 1,
    }
    options |= scenario.options
    try:
        if scenario.spare_blocks is not None:
            options["kv_cache_bytes"] = tight_cache(options, scenario.spare_blocks)
        config = EngineConfig(**options)
        with open_cuda(Path(files), config) if case.path == "cuda" else InferenceEngine(config) as engine:
            if case.path == "c" and engine.parts.code == "torch":
                raise ValueError("the C kernels could not be compiled")
            samples = list(drawn(engine, scenario, asked(engine, case)))
            streams = [*map(stream_of, samples), *read(engine, scenario, asked(engine, case))]
            code = engine.parts.code
    except ValueError as error:
        return Recording(case=case.name, error=str(error))
    num_preemptions = sum(sample.num_preemptions for sample in samples)
    return Recording(case=case.name, streams=streams, code=code, num_preemptions=num_preemptions)


def asked(engine: InferenceEngine, case: Case) -> list[Request]:
    """Return the case's requests."""
    limits = engine.limits
    found = requests(limits.vocab_size, limits.max_model_len, ask_all_rows=SCENARIOS[case.scenario].asks_all_rows)
    return found[:SHORT] if case.model == "default" else found


def tight_cache(options: dict[str, Any], spare_blocks: int) -> int:
    """Return the bytes of a KV cache of the longest request and a few blocks.

    What a block takes follows from the number of blocks that an engine makes of many bytes.
    """
    with InferenceEngine(EngineConfig(**options | {"max_batch_size": 65536})) as engine:
        limits = engine.limits
    num_blocks = -(-limits.max_model_len // limits.block_size) + spare_blocks
    return num_blocks * (int(options["kv_cache_bytes"]) // limits.num_blocks)


def drawn(engine: InferenceEngine, scenario: Scenario, wanted: Sequence[Request]) -> Iterator[TrainingSample]:
    """Yield the samples of all requests, computed together, and then of those that are asked again."""
    for wave in (wanted, wanted[: scenario.num_repeated]):
        ids = []
        for prompt, params, num_samples in wave:
            ids.append(engine.add_request(prompt, SamplingParams(**params), num_samples, claim=True))
            if scenario.staggered:
                engine.tick()
        while engine.has_pending():
            engine.tick()
        for request_id in ids:
            yield from engine.collect(request_id)


def read(engine: InferenceEngine, scenario: Scenario, wanted: Sequence[Request]) -> Iterator[Stream]:
    """Yield scores and embeddings; where all rows are asked, only the embeddings that add up all of them."""
    texts = [request.prompt for request in wanted if len(request.prompt) > 1]
    if not scenario.asks_all_rows:
        engine.flush_cache()
        yield from _floats("score", engine.score(texts, temperature=0.8))
        yield from _floats("score of the end", engine.score(texts, [len(text) // 2 for text in texts]))
        yield from _floats("last embedding", engine.embed(texts[:6], "last"))
    engine.flush_cache()
    yield from _floats("mean embedding", engine.embed(texts[:6], "mean", normalize=True))


def _floats(name: str, lists: Iterable[Any]) -> Iterator[Stream]:
    for index, values in enumerate(lists):
        yield Stream(label=f"{name} {index}", ids={"tokens": []}, floats={"values": list(values), "logprobs": []})


def stream_of(sample: TrainingSample) -> Stream:
    """Return a sample's tokens and numbers."""
    ids: dict[str, list[int]] = {"prompt_ranks": list(sample.prompt_ranks or ())}
    floats = {name: list(getattr(sample, name) or ()) for name in ("raw_logprobs", "prompt_logprobs")}
    for name in ("top_logprobs", "prompt_top_logprobs"):
        alternatives = [one for position in getattr(sample, name) or () for one in position]
        ids[name], floats[name] = [one.token for one in alternatives], [one.logprob for one in alternatives]
    ids["sampling_masks"] = [
        token for mask in sample.sampling_masks or () for token in (len(mask or ()), *(mask or ()))
    ]
    return Stream(
        label=f"request {sample.request_id}, sample {sample.sample_index}",
        ids={name: values for name, values in ids.items() if values} | {"tokens": list(sample.completion_tokens)},
        floats={name: values for name, values in floats.items() if values} | {"logprobs": list(sample.logprobs)},
        finish=f"{sample.finish_reason} {sample.stop_reason}",
    )


if __name__ == "__main__":
    main()
