"""A Llama whose weights are set so that it writes a given call of a function, and a given text after the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from tests.server.tiny import make_tiny

_CALL, _ANSWER = "<|call|>", "<|answer|>"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\nanswer as <tool_call>{...}</tool_call>{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    f"{{% if tools and messages[-1].role != 'tool' %}}{_CALL}{{% else %}}{_ANSWER}{{% endif %}}{{% endif %}}"
)
"""Marks at the end of the prompt what the model writes next."""
_STRENGTH = 100.0
"""Weight of the only likely token: it is sampled at every temperature of the API."""


def make_scripted(directory: Path, name: str, arguments: dict[str, Any], answer: str, positions: int = 4096) -> Path:
    """Write a model that calls the function `name` if there are tools and no result yet, and else writes `answer`.

    Call and answer are one token each.
    """
    call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    followers = {_CALL: call, _ANSWER: answer, call: "<|im_end|>", answer: "<|im_end|>"}
    return make_following(directory, TEMPLATE, (_CALL, _ANSWER), followers, positions)


def make_following(
    directory: Path, template: str, special: tuple[str, ...], followers: dict[str, str], positions: int = 4096
) -> Path:
    """Write a model in which each text of `followers` is one token, after which the model writes the other one.

    `special` are those that are marks of the template. No layer changes its input, so the next token depends on the
    last one alone.
    """
    make_tiny(directory, positions, template=template, special=special)
    path = str(directory / "tokenizer.json")
    core = tokenizers.Tokenizer.from_file(path)
    known = {*special, "<|im_end|>"}
    texts = [text for text in dict.fromkeys([*followers, *followers.values()]) if text not in known]
    core.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts])
    core.save(path)
    config = transformers.AutoConfig.from_pretrained(directory, vocab_size=core.get_vocab_size(), num_hidden_layers=1)
    model = transformers.LlamaForCausalLM(config)
    ids = {text: core.token_to_id(text) for text in (*followers, *followers.values())}
    with torch.no_grad():
        layer = model.model.layers[0]
        for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj, model.model.embed_tokens, model.lm_head):
            matrix.weight.zero_()
        model.model.embed_tokens.weight[:, -1] = 1.0
        for place, (text, follower) in enumerate(followers.items()):
            model.model.embed_tokens.weight[ids[text], place] = _STRENGTH
            model.lm_head.weight[ids[follower], place] = _STRENGTH
    model.save_pretrained(directory)
    return directory
