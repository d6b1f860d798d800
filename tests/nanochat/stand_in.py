"""Stand-ins for upstream's scripts at 92d63d4: what each imports from the package `nanochat`, and calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

IMPORTED: Mapping[str, str] = {
    "common": (
        "autodetect_device_type compute_cleanup compute_init get_dist_info print0 DummyWandb get_base_dir "
        "get_peak_bandwidth get_peak_flops download_file_with_lock COMPUTE_DTYPE COMPUTE_DTYPE_REASON "
        "is_ddp_initialized print_banner setup_default_logging"
    ),
    "engine": "Engine KVCache RowState sample_next_token use_calculator",
    "checkpoint_manager": (
        "load_model save_checkpoint load_optimizer_state build_model find_largest_model find_last_step load_checkpoint"
    ),
    "tokenizer": "get_token_bytes SPECIAL_TOKENS RustBPETokenizer get_tokenizer",
    "gpt": "GPT GPTConfig",
}
"""Module -> names that upstream's scripts, tests and modules import from it."""


def only_imports() -> Any:
    """Import every name."""
    for module, names in IMPORTED.items():
        for name in names.split():
            getattr(importlib.import_module(f"nanochat.{module}"), name)
    return True


def started() -> tuple[Any, Any, Any, Any, Any]:
    """Start as every script does; return (common, engine, model, tokenizer, meta)."""
    common, engine, manager = (
        importlib.import_module(f"nanochat.{name}") for name in ("common", "engine", "checkpoint_manager")
    )
    device_type = common.autodetect_device_type()
    *_, device = common.compute_init(device_type if device_type == "cpu" else "cpu")
    model, tokenizer, meta = manager.load_model("sft", device, phase="eval", model_tag=None, step=None)
    return common, engine.Engine(model, tokenizer), model, tokenizer, meta


def chat_cli() -> Any:
    """Answer one message from hand-built tokens, until an end token."""
    _, engine, _, tokenizer, _ = started()
    special = {name: tokenizer.encode_special(f"<|{name}|>") for name in ("user_start", "user_end", "assistant_start")}
    prompt = [tokenizer.get_bos_token_id(), special["user_start"], *tokenizer.encode("hello"), special["user_end"]]
    prompt.append(special["assistant_start"])
    columns = engine.generate(prompt, num_samples=1, max_tokens=16, temperature=0.6, top_k=50)
    return [column[0] for column, _ in columns]


def chat_eval() -> Any:
    """Sample answers of a problem, and score letters by the logits of a padded batch."""
    common, engine, model, tokenizer, _ = started()
    _, rank, _, world_size = common.get_dist_info()
    talk = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    prompt = tokenizer.render_for_completion(talk)
    engine.generate_batch(prompt, num_samples=2, max_tokens=8, temperature=0.0, top_k=50)
    padded = torch.tensor([prompt, [*prompt[:-1], tokenizer.get_bos_token_id()]], device=model.get_device())
    with torch.no_grad():
        logits = model(padded)
    common.print0(f"\r{rank}/{world_size}", end="")
    common.compute_cleanup()
    return list(logits.shape)


def chat_rl() -> Any:
    """Sample rollouts with seeds, log, and save a checkpoint of the weights."""
    common, engine, model, tokenizer, meta = started()
    run = common.DummyWandb()
    talk = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    options = {"num_samples": 3, "max_tokens": 8, "temperature": 1.0, "top_k": 50, "seed": hash((1, 2)) & 0x7FFFFFFF}
    rows, masks = engine.generate_batch(tokenizer.render_for_completion(talk), **options)
    run.log({"step": 0, "reward": 1.0}, step=0)
    directory = str(Path(common.get_base_dir()) / "chatrl_checkpoints" / "d4")
    config = model.config.__dict__ if hasattr(model.config, "__dict__") else meta["model_config"]
    save = importlib.import_module("nanochat.checkpoint_manager").save_checkpoint
    save(directory, 3, model.state_dict(), None, {"model_config": config})
    run.finish()
    common.compute_cleanup()
    return [len(row) for row in rows], [len(mask) for mask in masks]


def infer_bench() -> Any:
    """Compute what the benchmark prints before it measures, then time a prefill and a few steps without a GPU."""
    common, engine, model, tokenizer, meta = started()
    config = model.config
    generated = engine.generate(
        tokenizer.encode("a" * 8, prepend="<|bos|>"), num_samples=2, max_tokens=4, temperature=0
    )
    return {
        "step": meta["step"],
        "depth": [config.n_layer, config.n_embd, config.n_head, config.n_kv_head, config.sequence_len],
        "weights": sum(part.numel() * part.element_size() for part in model.parameters()),
        "bytes": [model.kv_bytes_per_token(), model.kv_read_bytes(72)],
        "flops": [model.estimate_decode_flops(72), model.estimate_prefill_flops(64)],
        "peaks": [common.get_peak_flops("NVIDIA H100 80GB"), common.get_peak_bandwidth("NVIDIA H100 80GB")],
        "steps": len([next(generated), *generated]),
    }


RUN: Mapping[str, Callable[[], Any]] = {
    one.__name__: one for one in (only_imports, chat_cli, chat_eval, chat_rl, infer_bench)
}
