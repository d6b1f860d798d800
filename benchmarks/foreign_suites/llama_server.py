"""Stand-in for llama.cpp's `llama-server`: starts `nano-inference serve` with the counterparts of its options.

The environment has NANO_MODEL, a GGUF file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

DEFAULTS = (
    *("--any-model", "--insecure", "--no-log-requests", "--prefill-assistant", "--allow-long-context"),
    "--template-dates",
)
"""What llama-server does without being asked."""
_RENAMED = {
    **{name: name for name in ("--port", "--n-predict", "--chat-template", "--chat-template-file")},
    "--temp": "--temp",
    "--seed": "--default-seed",
    "--batch-size": "--max-tokens-per-batch",
}
_SWITCHES = {"--no-ui": "--no-pages"}
_LISTS = {"--api-key": "--api-key", "--alias": "--served-model-name", "--cors-origins": "--cors-origin"}


def options(given: Sequence[str]) -> list[str]:
    """Return `serve`'s options for llama-server's; those without a counterpart are left out."""
    named = dict(_named(given))
    out = [word for name, value in named.items() for word in _mapped(name, value)]
    if not {"--chat-template", "--chat-template-file"} & set(named):
        out += ["--chat-template", "chatml"]  # its default for a file without a template
    if "--cors-origins" not in named:
        out += ["--cors-origin", "*"]
    slots = int(named.get("--parallel", 1))
    context = int(named.get("--ctx-size", 4096)) // (1 if "--kv-unified" in named else slots)
    host = named.get("--host", "127.0.0.1")
    where = ["--uds", host] if host.endswith(".sock") else ["--host", host.partition(",")[0]]
    return [*out, "--max-model-len", str(context), "--max-batch-size", str(slots), *where]


def _mapped(name: str, value: str) -> list[str]:
    if name in _SWITCHES:
        return [_SWITCHES[name]]
    if name in _LISTS:
        return [word for one in value.split(",") for word in (_LISTS[name], one)]
    if name == "--spec-type":
        return ["--speculation", "ngram"]
    if name == "--reasoning":
        return ["--chat-template-kwargs", f'{{"enable_thinking": {str(value != "off").lower()}}}']
    if name == "--pooling" and value != "none":
        return ["--pooling", value]
    if name in _RENAMED and not (name == "--n-predict" and int(value) < 0):
        return [_RENAMED[name], value]
    return []


def _named(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value, "" for a switch."""
    for word, following in zip(given, [*given[1:], "--"], strict=True):
        if word.startswith("-") and not word.lstrip("-").isdigit():
            is_value = not following.startswith("-") or following.lstrip("-").isdigit()
            yield word, following if is_value else ""


if __name__ == "__main__":
    command = [sys.executable, "-m", "nano_inference", "serve", "--model", os.environ["NANO_MODEL"]]
    os.execv(command[0], [*command, *DEFAULTS, *options(sys.argv[1:])])
