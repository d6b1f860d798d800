"""Writes a model whose weights are set: it reasons and answers, or calls a function if there are any."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.server.reasoner import make_reasoner

CALL = '<tool_call>\n{"name": "get_current_weather", "arguments": {"location": "New York"}}\n</tool_call>'
_ENDS = ('"', "}", "]")
"""Tokens that end a part of JSON, preferred wherever a grammar excludes what the model would write."""


def write_agent(directory: Path) -> Path:
    """Write the model; return its directory."""
    make_reasoner(directory, call=CALL, positions=8192)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for text in _ENDS:
            # the last channel of every embedding is 1
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(text), -1] = 50.0
    model.save_pretrained(directory)
    return directory
