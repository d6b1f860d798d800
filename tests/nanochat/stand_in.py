"""Stand-ins for upstream's scripts: what each imports from `nanochat` and calls, in a few lines. A process runs them.

Argument: names of stand-ins. Prints their results as JSON. `nanochat` is the package that the caller put on the path.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

IMPORTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "chat_cli": {
        "common": ("autodetect_device_type", "compute_init"),
        "engine": ("Engine",),
        "checkpoint_manager": ("load_model",),
    },
    "chat_web": {
        "common": ("autodetect_device_type", "compute_init"),
        "engine": ("Engine",),
        "checkpoint_manager": ("load_model",),
    },
    "chat_eval": {
        "common": ("autodetect_device_type", "compute_cleanup", "compute_init", "get_dist_info", "print0"),
        "engine": ("Engine",),
        "checkpoint_manager": ("load_model",),
    },
    "chat_rl": {
        "common": (
            *("DummyWandb", "autodetect_device_type", "compute_cleanup", "compute_init", "get_base_dir", "print0"),
        ),
        "engine": ("Engine",),
        "checkpoint_manager": ("load_model", "save_checkpoint"),
    },
    "infer_bench": {
        "common": (
            *("autodetect_device_type", "compute_cleanup", "compute_init", "get_peak_bandwidth", "get_peak_flops"),
        ),
        "engine": ("Engine",),
        "checkpoint_manager": ("load_model",),
    },
    "tests": {"engine": ("Engine", "KVCache", "RowState", "sample_next_token", "use_calculator")},
    "base_eval": {
        "common": (
            *("autodetect_device_type", "compute_cleanup", "compute_init", "download_file_with_lock"),
            *("get_base_dir", "print0"),
        ),
        "tokenizer": ("get_token_bytes",),
    },
    "upstreams modules": {
        "common": (
            *("COMPUTE_DTYPE", "COMPUTE_DTYPE_REASON", "get_peak_flops", "is_ddp_initialized", "print_banner"),
            "setup_default_logging",
        ),
        "checkpoint_manager": ("load_optimizer_state",),
        "tokenizer": ("SPECIAL_TOKENS",),
    },
    "training": {
        "checkpoint_manager": ("build_model", "find_largest_model", "find_last_step", "load_checkpoint"),
        "tokenizer": ("RustBPETokenizer", "get_token_bytes", "get_tokenizer"),
        "gpt": ("GPT", "GPTConfig"),
    },
}
"""Script of upstream -> module of nanochat -> names that it imports (commit 92d63d4; chat_web: parent of da32e1d)."""


def imported(script: str) -> dict[str, Any]:
    """Import a script's names from `nanochat`."""
    modules = {name: importlib.import_module(f"nanochat.{name}") for name in IMPORTS[script]}
    return {one: getattr(modules[name], one) for name, names in IMPORTS[script].items() for one in names}


def started(names: Mapping[str, Any], source: str = "sft") -> tuple[Any, Any, Any, Any]:
    """Begin as every script does; return (engine, model, tokenizer, meta)."""
    device_type = names["autodetect_device_type"]()
    *_, device = names["compute_init"](device_type if device_type == "cpu" else "cpu")
    model, tokenizer, meta = names["load_model"](source, device, phase="eval", model_tag=None, step=None)
    return names["Engine"](model, tokenizer), model, tokenizer, meta


def chat(script: str) -> Any:
    """Answer one message from hand-built tokens, until an end token."""
    engine, _, tokenizer, _ = started(imported(script))
    special = {name: tokenizer.encode_special(f"<|{name}|>") for name in ("user_start", "user_end", "assistant_start")}
    prompt = [tokenizer.get_bos_token_id(), special["user_start"], *tokenizer.encode("hello"), special["user_end"]]
    prompt.append(special["assistant_start"])
    options = {"num_samples": 1, "max_tokens": 16, "temperature": 0.6, "top_k": 50}
    tokens = [column[0] for column, _ in engine.generate(prompt, **options)]
    return {"tokens": tokens, "text": "".join(tokenizer.decode([token]) for token in tokens)}


def chat_eval(script: str) -> Any:
    """Sample answers of a problem, and score letters by the logits of a padded batch."""
    names = imported(script)
    engine, model, tokenizer, _ = started(names)
    _, rank, _, world_size = names["get_dist_info"]()
    talk = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    prompt = tokenizer.render_for_completion(talk)
    rows, _ = engine.generate_batch(prompt, num_samples=2, max_tokens=8, temperature=0.0, top_k=50)
    padded = torch.tensor([prompt, [*prompt[:-1], tokenizer.get_bos_token_id()]], device=model.get_device())
    with torch.no_grad():
        logits = model(padded)
    names["print0"](f"\r{rank}/{world_size}", end="")
    names["compute_cleanup"]()
    return {"rows": rows, "shape": list(logits.shape), "letter": tokenizer.encode("A")}


def chat_rl(script: str) -> Any:
    """Sample rollouts with seeds, log, and save a checkpoint of the weights."""
    names = imported(script)
    engine, model, tokenizer, meta = started(names)
    run = names["DummyWandb"]()
    talk = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    options = {"num_samples": 3, "max_tokens": 8, "temperature": 1.0, "top_k": 50, "seed": hash((1, 2)) & 0x7FFFFFFF}
    rows, masks = engine.generate_batch(tokenizer.render_for_completion(talk), **options)
    run.log({"step": 0, "reward": 1.0}, step=0)
    directory = str(Path(names["get_base_dir"]()) / "chatrl_checkpoints" / "d4")
    config = model.config.__dict__ if hasattr(model.config, "__dict__") else meta["model_config"]
    names["save_checkpoint"](directory, 3, model.state_dict(), None, {"model_config": config})
    run.finish()
    names["compute_cleanup"]()
    return {"lengths": [len(row) for row in rows], "masks": [len(mask) for mask in masks]}


def infer_bench(script: str) -> Any:
    """Compute what the benchmark prints before it measures, then time a prefill and a few steps without a GPU."""
    names = imported(script)
    engine, model, tokenizer, meta = started(names)
    config = model.config
    generated = engine.generate(
        tokenizer.encode("a" * 8, prepend="<|bos|>"), num_samples=2, max_tokens=4, temperature=0
    )
    num_steps = len([next(generated), *generated])
    return {
        "step": meta["step"],
        "depth": [config.n_layer, config.n_embd, config.n_head, config.n_kv_head, config.sequence_len],
        "weights": sum(part.numel() * part.element_size() for part in model.parameters()),
        "bytes": [model.kv_bytes_per_token(), model.kv_read_bytes(72)],
        "flops": [model.estimate_decode_flops(72), model.estimate_prefill_flops(64)],
        "peaks": [
            names["get_peak_flops"]("NVIDIA H100 80GB HBM3"),
            names["get_peak_bandwidth"]("NVIDIA H100 80GB HBM3"),
        ],
        "steps": num_steps,
    }


def only_imports(script: str) -> Any:
    """Import the names."""
    return sorted(imported(script))


RUN: Mapping[str, Callable[[str], Any]] = {
    "chat_cli": chat,
    "chat_web": chat,
    "chat_eval": chat_eval,
    "chat_rl": chat_rl,
    "infer_bench": infer_bench,
    "tests": only_imports,
    "base_eval": only_imports,
    "upstreams modules": only_imports,
    "training": only_imports,
}

if __name__ == "__main__":
    print(json.dumps({script: RUN[script](script) for script in sys.argv[1:]}))
