"""llama.cpp's `__verbose`: what the model was given and what it returned, without any parsing."""

from __future__ import annotations

from nano_inference.server.call import JSON, Call, Transcript
from nano_inference.text.tokenizer import Tokenizer


def verbose_facts(call: Call, transcript: Transcript, tokenizer: Tokenizer) -> JSON:
    """Return the prompt and the answer as text with special tokens, and their numbers of tokens.

    Names as in the reply of llama.cpp's /completion. Ids outside the tokenizer's vocabulary have no text.
    """
    prompt = call.requests[transcript.prompt_index].prompt
    known = tokenizer.vocab_size
    return {
        "prompt": tokenizer.decode([token for token in prompt if token < known], skip_special=False),
        "content": tokenizer.decode([token for token in transcript.token_ids if token < known], skip_special=False),
        "tokens_evaluated": len(prompt),
        "tokens_predicted": len(transcript.token_ids),
        "tokens_cached": 0 if transcript.sample is None else transcript.sample.num_cached_tokens,
    }
