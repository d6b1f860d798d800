"""What test_packages.py does with the engine in a process where packages are hidden, and in one where none is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.loading.catalog import resolve
from nano_inference.support.packages import MissingPackage
from nano_inference.text.grammar import Grammar, Grammars
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import BadRequest

PROMPT = "What is 12 + 30?"


def exercise(directory: str, kernels: str) -> dict[str, Any]:
    """Return what the engine makes of one prompt: samples with and without stop strings, a stream, scores."""
    tokenizer = load_tokenizer(TokenizerSource(directory))
    prompt = tokenizer.encode(PROMPT)
    free = SamplingParams(max_tokens=48, seed=7, ignore_eos=True)
    config: Any = {"kernels": kernels, "device": "cpu", "num_threads": 1, "kv_cache_bytes": 4 << 20}
    with InferenceEngine(EngineConfig(model_path=directory, **config)) as engine:
        (whole,) = engine.generate([prompt], free)
        text = tokenizer.decode(whole.completion_tokens)
        stop = next(char for char in text[8:] if char.isascii())
        (cut,) = engine.generate([prompt], SamplingParams(max_tokens=48, seed=7, ignore_eos=True, stop=(stop,)))
        streamed = [token for delta in engine.stream(prompt, free) for token in delta.token_ids]
        scores = engine.score([*prompt, *whole.completion_tokens])
        code = engine.parts.code
    return {
        "code": code,
        "tokens": list(whole.completion_tokens),
        "text": text,
        "stop": stop,
        "stopped": [list(cut.completion_tokens), cut.finish_reason, cut.stop_reason],
        "streamed": streamed,
        "scores": scores,
    }


def refusals(directory: str, gguf_file: str, ranks: str) -> dict[str, list[str]]:
    """Return the type and the text of the error of each feature that needs a package which is hidden."""
    tokenizer = load_tokenizer(TokenizerSource(directory))
    features: dict[str, Callable[[], object]] = {
        "gguf": lambda: InferenceEngine(EngineConfig(model_path=gguf_file)),
        "nanochat": lambda: InferenceEngine(EngineConfig(model_path="calculator")),
        "tiktoken": lambda: load_tokenizer(TokenizerSource(ranks)),
        "hub": lambda: resolve("org/name", Path(directory)),
        "grammar": lambda: _grammar(tokenizer),
    }
    return {name: _error_of(feature) for name, feature in features.items()}


def _grammar(tokenizer: Tokenizer) -> object:
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids).matcher(Grammar("regex", "[0-9]+"))


def _error_of(feature: Callable[[], object]) -> list[str]:
    try:
        feature()
    except (MissingPackage, BadRequest) as error:
        return [type(error).__name__, str(error)]
    return []
