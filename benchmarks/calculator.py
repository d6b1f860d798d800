"""Measure the accuracy of the packaged nanochat model on questions outside its training set.

    python benchmarks/calculator.py [--questions 500] [--model DIR]

Runs with the tool and without; without it the model must write the result itself, for which it was not trained. Greedy.
An answer is right if its last number (or the refusal) equals the calculator's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.nanochat.builtin import CALCULATOR
from nano_inference.text.dialogue import load_dialogue, require
from nano_inference.text.tokenizer import load_tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from calculator_data import held_out, is_right


def answers(engine: InferenceEngine, questions: list[str], *, with_tool: bool) -> tuple[list[str], dict[str, Any]]:
    """Ask all questions at once; return the replies behind the last tool result, and what was counted."""
    assert engine.parts.checkpoint is not None
    source = engine.parts.checkpoint.tokenizer
    tokenizer = load_tokenizer(source)
    dialogue = require(load_dialogue(source, tokenizer))
    prompts = [dialogue.encode([{"role": "user", "content": question}]) for question in questions]
    started = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=96)
    samples = engine.generate(prompts, params, program=dialogue.tool if with_tool else None)
    seconds = time.perf_counter() - started
    texts = [tokenizer.decode(sample.completion_tokens, skip_special=False) for sample in samples]
    replies = [text.rpartition("<|output_end|>")[2].replace("<|assistant_end|>", "") for text in texts]
    forced = sum(mask == 0 for sample in samples for mask in sample.mask)
    num_tokens = sum(len(sample.mask) for sample in samples)
    return replies, {"forced_tokens": forced, "tokens": num_tokens, "seconds": round(seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=str(CALCULATOR.directory))
    wish = parser.parse_args()
    asked = held_out(wish.questions, wish.seed)
    rows = []
    with InferenceEngine(EngineConfig(model_path=wish.model)) as engine:
        for with_tool in (True, False):
            replies, counted = answers(engine, [question for question, _ in asked], with_tool=with_tool)
            right = sum(is_right(reply, answer) for reply, (_, answer) in zip(replies, asked, strict=True))
            rows.append({"tool": with_tool, "right": right, "questions": len(asked), **counted})
    for row in rows:
        name = "with the tool" if row["tool"] else "without the tool"
        print(
            f"{name:18}{row['right']:5} of {row['questions']} right, {row['tokens']} tokens, "
            f"{row['forced_tokens']} of them forced (mask 0), {row['seconds']} s"
        )
    print(json.dumps({"model": Path(wish.model).name, "rows": rows}))


if __name__ == "__main__":
    main()
