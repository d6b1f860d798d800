"""Decides whether a chat's reply has the model's reasoning apart from its content. Pure.

One mechanism for all dialects: the text is split at the marks `<think>` and `</think>` (`text.reasoning`), and each
dialect returns reasoning in its own form. Operators choose with `--reasoning-format`, clients with llama.cpp's
`reasoning_format`, SGLang's `separate_reasoning` and vLLM's `include_reasoning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import visible_bytes
from nano_inference.server.generation import Generation, ReasoningStart
from nano_inference.server.schema import ChatBody
from nano_inference.server.structured import Structure
from nano_inference.text.reasoning import CLOSE_MARK, OPEN_MARK
from nano_inference.text.tokenizer import Tokenizer

_PROMPT_END = 16  # tokens of a prompt that are searched for the mark that opens reasoning


def with_reasoning(
    generation: Generation,
    body: ChatBody,
    config: ServerConfig,
    prompt: Sequence[int],
    last_text: str,
    structure: Structure | None,
) -> Generation:
    """Return the generation with reasoning apart, unless server or client want it in the text.

    `prompt` are the rendered messages, `last_text` is the text of the last one. A `structure` of the whole answer
    begins with its first token: there is no reasoning before it unless it has the closing mark.
    """
    is_off = body.separate_reasoning is False or body.reasoning_format == "none"
    is_on = bool(body.separate_reasoning or body.reasoning_format) or config.reasoning_format == "auto"
    if generation.tool is not None or is_off or not is_on:
        return generation
    tokenizer = generation.tokenizer
    can_reason = structure is None or CLOSE_MARK in structure.grammar.text
    is_inside = can_reason and opens_reasoning(prompt, tokenizer)
    marks = {token for mark in (OPEN_MARK, CLOSE_MARK) for token in _special(mark, tokenizer)}
    prefix = last_text if body.continue_final_message else ""
    if generation.prefix_ids:
        data = [visible_bytes(token, tokenizer, token not in marks) for token in generation.prefix_ids]
        prefix = b"".join(data).decode("utf-8", "ignore")
    start = ReasoningStart(is_inside, prefix, is_hidden=body.include_reasoning is False)
    return replace(generation, reasoning=start, markers=generation.markers | marks)


def _special(mark: str, tokenizer: Tokenizer) -> Sequence[int]:
    """Return the special token that a mark is, if any."""
    ids = tokenizer.encode(mark, add_special=False, parse_special=True)
    return ids if len(ids) == 1 and ids[0] in tokenizer.special_ids else ()


def opens_reasoning(prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Return True if a prompt ends with the mark that opens reasoning."""
    end = [token for token in prompt[-_PROMPT_END:] if token < tokenizer.vocab_size]
    return tokenizer.decode(end, skip_special=False).rstrip().endswith(OPEN_MARK)
