"""Write a model whose weights are set: it reasons and answers, or calls a function if there are any.

    python benchmarks/foreign_suites/agent_model.py OUT --function get_weather [--without-reasoning]
    nano-inference serve --model OUT --served-model-name agent

For suites whose cases need a model that reasons or calls functions. Whatever the function's parameters, the call has
one argument, `location`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.server.reasoner import make_reasoner
from tests.server.scripted import make_scripted

_ARGUMENTS = {"location": "New York"}
_ENDS = ('"', "}", "]")
"""Tokens that end a part of JSON, preferred wherever a grammar excludes what the model would write."""


def main() -> None:
    """Write the model that the options name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--function", required=True, help="name of the function that it calls")
    parser.add_argument("--without-reasoning", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.without_reasoning:
        make_scripted(given.out, given.function, _ARGUMENTS, "Hello there, friend.")
    else:
        write_agent(given.out, given.function)


def write_agent(directory: Path, function: str) -> Path:
    """Write the model; return its directory."""
    call = json.dumps({"name": function, "arguments": _ARGUMENTS})
    make_reasoner(directory, call=f"<tool_call>\n{call}\n</tool_call>", positions=8192)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for text in _ENDS:
            # the last channel of every embedding is 1
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(text), -1] = 50.0
    model.save_pretrained(directory)
    return directory


if __name__ == "__main__":
    main()
