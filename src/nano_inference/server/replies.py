"""Written samples to OpenAI's JSON: choices, log-probabilities, usage, whole replies, chunks of a stream. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from nano_inference.server.calls import Call, ReplyShape
from nano_inference.server.writing import Entry, Pen, Written, alone, begin, give_up, prompt_entries, token_data, write
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import Delta, StopReason, TrainingSample

JSON = dict[str, Any]


@dataclass(slots=True)
class Draft:
    """What was written of one sample so far. Belongs to the one coroutine that answers the call."""

    prompt_index: int
    index: int
    """Its number among all choices of the call."""
    pen: Pen
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: StopReason | None = None
    sample: TrainingSample | None = None

    def take(self, delta: Delta, shape: ReplyShape, tokenizer: Tokenizer, *, keep: bool = True) -> Written:
        """Add a delta; return what it brought. Text and entries are kept for a whole reply, not for a stream."""
        self.pen, written = write(self.pen, delta, shape, tokenizer)
        self.token_ids += written.token_ids
        if keep:
            self.text += written.text
            self.entries += written.entries
        self.finish_reason, self.stop_reason = written.finish_reason, written.stop_reason
        self.sample = delta.sample
        return written

    def cut_short(self, reason: str) -> Written:
        """End the sample with what it has, because its time is up; return the text that was held back."""
        rest = give_up(self.pen)
        self.text += rest
        self.finish_reason, self.stop_reason = "length", reason
        return Written(rest, (), (), "length", reason)


def drafts_of(call: Call) -> list[Draft]:
    """Return an empty draft for every choice, prompt by prompt."""
    return [
        Draft(prompt_index=prompt, index=prompt * call.num_samples + sample, pen=begin(call.shape, prompt))
        for prompt in range(len(call.asks))
        for sample in range(call.num_samples)
    ]


def usage(call: Call, drafts: Iterable[Draft], *, with_cached: bool = True) -> JSON:
    """Return the tokens that a call took: each prompt once, every token that was added."""
    drafts = list(drafts)
    num_prompt = sum(len(ask.prompt) for ask in call.asks)
    num_new = sum(len(draft.token_ids) for draft in drafts)
    out: JSON = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
    if with_cached:
        firsts = (draft.sample for draft in drafts if draft.index % call.num_samples == 0)
        cached = sum(sample.num_cached_tokens for sample in firsts if sample is not None)
        out["prompt_tokens_details"] = {"cached_tokens": cached}
    return out


def whole(call: Call, drafts: Sequence[Draft], tokenizer: Tokenizer, created: int) -> JSON:
    """Return the reply to a call that is not streamed."""
    make = _chat_choice if call.kind == "chat" else _completion_choice
    reply: JSON = {
        "id": call.id,
        "object": "chat.completion" if call.kind == "chat" else "text_completion",
        "created": created,
        "model": call.model,
        "choices": [make(call, draft, tokenizer) for draft in drafts],
        "usage": usage(call, drafts),
        "system_fingerprint": None,
    }
    if call.kind == "chat":
        if call.shape.prompt_logprobs is not None:
            reply["prompt_logprobs"] = _prompt_logprobs(drafts[0].sample, call.shape, tokenizer)
        if call.shape.token_ids:
            reply["prompt_token_ids"] = list(call.asks[0].prompt)
    return reply


def reply_size(call: Call, drafts: Iterable[Draft]) -> int:
    """Return about how many tokens and alternatives a whole reply tells of: what it costs to put together."""
    shape = call.shape
    num_new = sum(len(draft.token_ids) for draft in drafts)
    num_prompt = sum(len(ask.prompt) for ask in call.asks) * call.num_samples
    per_new = 0 if shape.logprobs is None else 2 + shape.logprobs
    per_prompt = 0 if shape.prompt_logprobs is None else 2 + shape.prompt_logprobs
    return num_new * (1 + per_new) + num_prompt * (per_prompt + (per_new if shape.echo_logprobs else 0))


def opening_chunks(call: Call, drafts: Sequence[Draft], created: int) -> list[JSON]:
    """Return what a stream begins with: in a chat each choice's role, then what is echoed, and the prompt's ids."""
    shape = call.shape
    chunks: list[JSON] = []
    if call.kind == "chat":
        chunks = [_chunk(call, created, draft.index, {"role": "assistant", "content": None}) for draft in drafts]
        if shape.token_ids:
            chunks[0]["prompt_token_ids"] = list(call.asks[0].prompt)
        return chunks + [
            _chunk(call, created, draft.index, {"content": text}) for text in shape.echo for draft in drafts
        ]
    for draft in drafts if shape.echo or shape.token_ids else ():
        text = shape.echo[draft.prompt_index] if shape.echo else ""
        ids = {"prompt_token_ids": list(call.asks[draft.prompt_index].prompt)} if shape.token_ids else {}
        chunks.append(_chunk(call, created, draft.index, text, **ids))
    return chunks


def delta_chunks(call: Call, draft: Draft, written: Written, tokenizer: Tokenizer, created: int) -> list[JSON]:
    """Return the chunks of one delta: one with what it brought, and an empty one that says why the sample ended."""
    shape, is_chat = call.shape, call.kind == "chat"
    extras: JSON = {}
    if shape.logprobs is not None and written.entries:
        extras["logprobs"] = _logprobs(call, written.entries, tokenizer)
    if shape.token_ids and written.token_ids:
        extras["token_ids"] = list(written.token_ids)
    chunks: list[JSON] = []
    if written.text or extras:
        content: Any = {"content": written.text} if is_chat else written.text
        chunks.append(_chunk(call, created, draft.index, content, **extras))
    if written.finish_reason is not None:
        end = _chunk(call, created, draft.index, {} if is_chat else "", stop_reason=written.stop_reason)
        end["choices"][0]["finish_reason"] = written.finish_reason
        chunks.append(end)
    return chunks


def usage_chunk(call: Call, drafts: Sequence[Draft], created: int) -> JSON:
    """Return the last chunk of a stream that was asked for its usage."""
    return {**_head(call, created), "choices": [], "usage": usage(call, drafts)}


def _head(call: Call, created: int) -> JSON:
    kind = "chat.completion.chunk" if call.kind == "chat" else "text_completion"
    return {"id": call.id, "object": kind, "created": created, "model": call.model, "system_fingerprint": None}


def _chunk(call: Call, created: int, index: int, content: Any, **extras: Any) -> JSON:
    choice: JSON = {"index": index}
    choice["delta" if call.kind == "chat" else "text"] = content
    choice |= {"logprobs": None, "finish_reason": None, **extras}
    chunk = {**_head(call, created), "choices": [choice]}
    if call.include_usage:
        chunk["usage"] = None
    return chunk


def _chat_choice(call: Call, draft: Draft, tokenizer: Tokenizer) -> JSON:
    echo = call.shape.echo[draft.prompt_index] if call.shape.echo else ""
    choice: JSON = {
        "index": draft.index,
        "message": {"role": "assistant", "content": echo + draft.text, "refusal": None},
        "logprobs": None if call.shape.logprobs is None else _logprobs(call, draft.entries, tokenizer),
        "finish_reason": draft.finish_reason,
        "stop_reason": draft.stop_reason,
    }
    if call.shape.token_ids:
        choice["token_ids"] = list(draft.token_ids)
    return choice


def _completion_choice(call: Call, draft: Draft, tokenizer: Tokenizer) -> JSON:
    shape, prompt = call.shape, call.asks[draft.prompt_index].prompt
    echo = shape.echo[draft.prompt_index] if shape.echo else ""
    entries: Sequence[Entry] = draft.entries
    sample = draft.sample
    if shape.echo_logprobs and sample is not None:
        scores, tops = sample.prompt_logprobs or (), sample.prompt_top_logprobs
        entries = [*prompt_entries(prompt, scores, tops, shape, tokenizer), *draft.entries]
    choice: JSON = {
        "index": draft.index,
        "text": echo + draft.text,
        "logprobs": None if shape.logprobs is None else _logprobs(call, entries, tokenizer),
        "finish_reason": draft.finish_reason,
        "stop_reason": draft.stop_reason,
    }
    if shape.prompt_logprobs is not None:
        choice["prompt_logprobs"] = _prompt_logprobs(sample, shape, tokenizer)
    if shape.token_ids:
        choice |= {"prompt_token_ids": list(prompt), "token_ids": list(draft.token_ids)}
    return choice


def _logprobs(call: Call, entries: Sequence[Entry], tokenizer: Tokenizer) -> JSON:
    make = _chat_logprobs if call.kind == "chat" else _completion_logprobs
    return make(entries, call.shape, tokenizer)


def _chat_logprobs(entries: Sequence[Entry], shape: ReplyShape, tokenizer: Tokenizer) -> JSON:
    """Return a chat's form: one object a token, each with its bytes and `top_logprobs`."""
    count = shape.logprobs or 0
    name = _namer(shape, tokenizer)
    data = cache(lambda token: list(token_data(token, tokenizer)))
    return {
        "content": [
            {
                "token": f"token_id:{entry.token}" if shape.tokens_as_ids else entry.text,
                "logprob": entry.logprob,
                "bytes": list(entry.text.encode()),
                "top_logprobs": [
                    {
                        "token": name(one.token),
                        "logprob": one.logprob,
                        "bytes": data(one.token),
                    }
                    for one in (entry.top or ())[:count]
                ],
            }
            for entry in entries
        ]
    }


def _completion_logprobs(entries: Sequence[Entry], shape: ReplyShape, tokenizer: Tokenizer) -> JSON:
    """Return a completion's form: four parallel lists."""
    name = _namer(shape, tokenizer)
    return {
        "tokens": [f"token_id:{entry.token}" if shape.tokens_as_ids else entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            None if entry.top is None else {name(one.token): one.logprob for one in entry.top} for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }


def _prompt_logprobs(sample: TrainingSample | None, shape: ReplyShape, tokenizer: Tokenizer) -> list[JSON | None]:
    """Return vLLM's form: None for the first token, then token id -> log-probability, rank and text.

    The rank of a token that is none of the alternatives asked for is not known: None.
    """
    if sample is None:
        return []
    scores = sample.prompt_logprobs or ()
    tops = sample.prompt_top_logprobs or ((),) * len(scores)
    text = cache(lambda token: alone(token, tokenizer))
    rows: list[JSON | None] = [None]
    for token, score, top in zip(sample.prompt_tokens[1:], scores, tops, strict=True):
        row = {
            str(one.token): {"logprob": one.logprob, "rank": rank, "decoded_token": text(one.token)}
            for rank, one in enumerate(top[: shape.prompt_logprobs], start=1)
        }
        own = {"logprob": score, "rank": None, "decoded_token": text(token)}
        rows.append({**row, **({} if str(token) in row else {str(token): own})})
    return rows


def _namer(shape: ReplyShape, tokenizer: Tokenizer) -> Callable[[int], str]:
    """Return how alternatives are called; each is looked up once."""
    return cache(lambda token: f"token_id:{token}" if shape.tokens_as_ids else alone(token, tokenizer))
