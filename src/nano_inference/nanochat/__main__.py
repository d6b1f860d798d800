"""`python -m nano_inference.nanochat`: compare the cached engine with the naive forward pass, token by token.

Like upstream's `python -m nanochat.engine`, but without CUDA or a checkpoint of the user.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from nano_inference.nanochat.builtin import CALCULATOR
from nano_inference.nanochat.checkpoint_manager import load_from
from nano_inference.nanochat.common import base_path
from nano_inference.nanochat.engine import Engine
from nano_inference.nanochat.files import SOURCES
from nano_inference.types import SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Print both times and whether all tokens match; return 0 if they do, 1 if not, 2 for wrong arguments or files."""
    wish = _parser().parse_args(argv)
    try:
        is_named = any(value is not None for value in (wish.path, wish.source, wish.model_tag, wish.step))
        root, device = base_path(wish.path) if is_named else CALCULATOR.directory, wish.device
        model, tokenizer, _ = load_from(
            root, device, source=wish.source, model_tag=wish.model_tag, step=wish.step, out=sys.stdout
        )
        prompt = tokenizer.encode(wish.prompt, prepend=tokenizer.get_bos_token_id())
        if wish.chat:
            messages = [{"role": "user", "content": wish.prompt}, {"role": "assistant", "content": ""}]
            prompt = tokenizer.render_for_completion(messages)
        length, room = model.config.sequence_len, model.config.sequence_len - len(prompt)
        if room <= 0:
            raise ValueError(
                f"--prompt has {len(prompt)} tokens; it must be shorter than the model's length of {length}"
            )
        if not 1 <= wish.max_tokens <= room:
            raise ValueError(f"--max-tokens must be in [1, {room}] for this prompt, got {wish.max_tokens}")
    except ValueError as error:
        print(f"nano_inference.nanochat: {error}", file=sys.stderr)
        return 2
    print(f"prompt  {tokenizer.decode(prompt)!r}; tools are off, and end tokens do not end the answer")
    start = time.perf_counter()
    naive = list(model.generate(prompt, wish.max_tokens, temperature=0.0))
    naive_seconds = time.perf_counter() - start
    core = Engine(model, tokenizer).core
    start = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=wish.max_tokens, ignore_eos=True)
    cached = list(core.generate([prompt], params)[0].completion_tokens)
    cached_seconds = time.perf_counter() - start
    for name, tokens, seconds in (("naive", naive, naive_seconds), ("cached", cached, cached_seconds)):
        print(f"{name:6}  {seconds:8.3f} s   {tokenizer.decode(tokens)!r}")
    for place, pair in enumerate(zip(naive, cached, strict=True)):
        if pair[0] != pair[1]:
            print(f"Mismatch at token {place}: {pair[0]} != {pair[1]}")
            break
    print(f"Match: {naive == cached}, {naive_seconds / cached_seconds:.1f}x as fast, {len(naive)} tokens")
    return int(naive != cached)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nano_inference.nanochat", description=__doc__)
    parser.add_argument("path", nargs="?", help="a checkpoint; the packaged model if no checkpoint option is given")
    parser.add_argument("-i", "--source", choices=SOURCES, help="stage of a checkpoint in nanochat's base directory")
    parser.add_argument("-g", "--model-tag")
    parser.add_argument("-s", "--step", type=int)
    parser.add_argument("--prompt", default="The chemical formula of water is")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--device", default="auto")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
