"""/tokenize, /detokenize, /tokenizer_info and /apply-template: conversion between text and token ids. Pure.

vLLM and llama.cpp use these paths with different bodies and replies; both forms are accepted.
"""

from __future__ import annotations

from functools import cache

from nano_inference.server.detokenizer import token_text
from nano_inference.server.dialect import Converting, Describing, Dialect, Occupancy
from nano_inference.server.errors import ApiError, refused
from nano_inference.server.generation import JSON
from nano_inference.server.model import ServedModel
from nano_inference.server.prompts import api_errors, read_messages, require_dialogue, with_prefill
from nano_inference.server.schema import ApplyTemplateBody, CountBody, DetokenizeBody, RenderingFields, TokenizeBody
from nano_inference.server.tools import requested_tools
from nano_inference.text.dialogue import TemplateDialogue
from nano_inference.types import BadRequest


def tokenize(body: TokenizeBody, model: ServedModel) -> JSON:
    """Return {tokens, count, max_model_len} (vLLM), or {tokens} for a body with `content` (llama.cpp)."""
    model.name_for(body.model)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ApiError(400, "exactly one of prompt, messages and content must be given", param="prompt")
    if body.messages is not None:
        ids = _rendered(body, model)
    else:
        text = body.prompt if body.content is None else body.content
        add_special = bool(body.add_special) if body.prompt is None else body.add_special_tokens is not False
        with api_errors():
            ids = model.tokenizer.encode(text or "", add_special=add_special)
    if body.content is not None:
        if not body.with_pieces:
            return {"tokens": ids}
        piece = cache(lambda token: token_text(token, model.tokenizer))
        return {"tokens": [{"id": token, "piece": piece(token)} for token in ids]}
    reply: JSON = {"tokens": ids, "count": len(ids), "max_model_len": model.limits.max_model_len, "token_strs": None}
    if body.return_token_strs:
        reply["token_strs"] = [model.tokenizer.token_text(token) for token in ids]
    return reply


def count_chat(body: CountBody, model: ServedModel) -> JSON:
    """Return llama.cpp's {object, input_tokens}: the number of tokens of a chat's prompt."""
    model.name_for(body.model)
    return {"object": "response.input_tokens", "input_tokens": len(_rendered(body, model))}


def detokenize(body: DetokenizeBody, model: ServedModel) -> JSON:
    """Return {prompt} for a body with `model` (vLLM), else {content, prompt} (llama.cpp)."""
    model.name_for(body.model)
    try:
        text = model.tokenizer.decode(body.tokens, skip_special=False)
    except BadRequest as error:
        raise refused("tokens", str(error)) from None
    return {"prompt": text} if body.model is not None else {"content": text, "prompt": text}


def apply_template(body: ApplyTemplateBody, model: ServedModel) -> JSON:
    """Return {prompt}: the messages rendered with the model's chat template.

    Without a BOS that the tokenizer adds itself: clients send this text to /completion.
    """
    body = with_prefill(body, model)
    model.name_for(body.model)
    dialogue = require_dialogue(model)
    use = requested_tools(body, dialogue.tool_template)
    with api_errors("messages"):
        text = dialogue.text(*read_messages(body, dialogue, use))
    bos = model.tokenizer.bos_id
    if bos is not None and model.tokenizer.encode("")[:1] == [bos]:
        text = text.removeprefix(model.tokenizer.token_text(bos))
    return {"prompt": text}


def tokenizer_info(model: ServedModel, occupancy: Occupancy) -> JSON:
    """Return vocabulary sizes, special tokens and the chat template, for clients that count tokens themselves."""
    tokenizer, dialogue, ends = model.tokenizer, model.dialogue, sorted(model.limits.eos_token_ids)
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_vocab_size": model.limits.vocab_size,
        "max_model_len": model.limits.max_model_len,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_ids": list(dict.fromkeys(token for token in (*tokenizer.eos_ids, *ends) if token in ends)),
        "special_tokens": {str(token): tokenizer.token_text(token) for token in sorted(tokenizer.special_ids)},
        **tokenizer.named,
        "chat_template": dialogue.template.source if isinstance(dialogue, TemplateDialogue) else None,
    }


def _rendered(body: RenderingFields, model: ServedModel) -> list[int]:
    dialogue, body = require_dialogue(model), with_prefill(body, model)
    use = requested_tools(body, dialogue.tool_template)
    with api_errors("messages"):
        return dialogue.encode(*read_messages(body, dialogue, use))


_TOKENIZE = "Encode a text or messages as token ids."
_COUNT = "Count the tokens of a chat's prompt; the interface of llama.cpp's server."
_RENDER = "Render messages with the model's chat template."
DIALECT = Dialect(
    converting=(
        Converting(path="/tokenize", body=TokenizeBody, work=tokenize, summary=_TOKENIZE, renders=True),
        *(
            Converting(path=path, body=CountBody, work=count_chat, summary=_COUNT, renders=True)
            for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens")
        ),
        Converting(path="/detokenize", body=DetokenizeBody, work=detokenize, summary="Decode token ids to text."),
        Converting(path="/apply-template", body=ApplyTemplateBody, work=apply_template, summary=_RENDER, renders=True),
    ),
    describing=(Describing(path="/tokenizer_info", describe=tokenizer_info, summary="Describe the tokenizer."),),
)
