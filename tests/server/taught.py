"""A tiny model that answers one prompt with a given text: random models call no functions by themselves."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.server.tiny import TEMPLATE, make_tiny

TOOL_TEMPLATE = "{% if tools %}<tool_call>{% endif %}" + TEMPLATE
"""A chat template with support for tools in the Hermes format, whose prompts are short."""
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def make_caller(directory: Path) -> Path:
    """Write a model that answers the message "hello", in a request with tools, with a call of `f`."""
    make_tiny(directory, template=TOOL_TEMPLATE)
    prompt = "<tool_call><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    return teach(directory, prompt, f"{CALL}<|im_end|>")


def teach(directory: Path, prompt: str, answer: str) -> Path:
    """Train a directory's model until its most likely answer to the prompt is `answer`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.LlamaForCausalLM.from_pretrained(directory)
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    after = tokenizer(answer, add_special_tokens=False)["input_ids"]
    inputs, wanted = torch.tensor([before + after]), torch.tensor(after)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(1000):
        logits = model(inputs).logits[0, len(before) - 1 : -1]
        if bool((logits.detach().log_softmax(-1)[range(len(after)), wanted] > -0.1).all()):
            model.save_pretrained(directory)
            return directory
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, wanted).backward()
        optimizer.step()
    raise AssertionError("the model did not learn its answer")
