"""Streaming of one answer, and its statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nano_inference.cli.conversation import AnswerStats
from nano_inference.cli.session import Session, tick
from nano_inference.cli.terminal import Interrupts, bar
from nano_inference.engine import InferenceEngine
from nano_inference.text import dialogue, stream
from nano_inference.text.dialogue import shown, spelled
from nano_inference.text.repetition import repeats
from nano_inference.types import Delta, SamplingParams, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer."""

    text: str
    sample: TrainingSample
    stats: AnswerStats
    is_repetition: bool  # True if the answer was ended because it repeats itself


def stream_answer(
    session: Session,
    prompt: list[int],
    params: SamplingParams,
    interrupts: Interrupts,
    write: Callable[[str], None],
    *,
    raw: bool = False,
    quiet: bool = False,
    ends_repetition: bool = False,
) -> Answer:
    """Generate one sample and stream its text to `write`; Ctrl-C ends it early, and so does a repetition if asked.

    The text contains the calculator's marks, which `text.dialogue` interprets.
    """
    start = time.perf_counter()
    request_id = session.engine.add_request(prompt, params, program=session.tool)
    state = stream.start(stops=tuple(params.stop), drop_space=session.tokenizer.drops_space and not raw)
    first, text, sample, ids, is_repetition = 0.0, "", None, list[int](), False
    for delta in _deltas(session.engine, len(prompt), interrupts, quiet):
        first = first or time.perf_counter() - start
        state, piece = stream.push(state, readable(session, delta.token_ids, delta.sample))
        write(piece)
        text, sample = text + spelled(piece), delta.sample
        ids += delta.token_ids
        is_repetition = ends_repetition and sample is None and repeats(ids)
        if is_repetition:
            break
    state, piece = stream.finish(state)
    write(piece)
    if sample is None:
        (sample,) = session.engine.abort(request_id)
    session.engine.step()  # removes the finished sample from the engine, which `delta.sample` has already returned
    stats = answer_stats(sample, first, time.perf_counter() - start)
    return Answer(text=text + spelled(piece), sample=sample, stats=stats, is_repetition=is_repetition)


def _deltas(engine: InferenceEngine, num_prompt: int, interrupts: Interrupts, quiet: bool) -> Iterator[Delta]:
    """Run steps and yield their deltas, until the sample ends or Ctrl-C is pressed."""
    is_short = num_prompt <= engine.config.max_tokens_per_batch
    with bar("reading the prompt", quiet=quiet or is_short) as progress:
        result, done = tick(engine), 0
        while not result.deltas and not interrupts.pressed:
            done += result.stats.num_computed
            progress(done, num_prompt)
            result = tick(engine)
    while True:
        yield from result.deltas
        if interrupts.pressed or any(delta.sample for delta in result.deltas):
            return
        result = tick(engine)


def readable(session: Session, tokens: tuple[int, ...], sample: TrainingSample | None) -> bytes:
    """Return the visible bytes of tokens: without special tokens and the token that ended the sample."""
    ended_by_token = sample is not None and sample.finish_reason == "stop" and not isinstance(sample.stop_reason, str)
    is_cut = sample is not None and sample.finish_reason != "stop"
    return shown(session.tokenizer, session.tool, tokens[:-1] if ended_by_token else tokens, is_cut=is_cut)


def text_of(session: Session, sample: TrainingSample, params: SamplingParams, *, raw: bool = False) -> str:
    """Return a finished sample's text, equal to what `stream_answer` writes."""
    return dialogue.text_of(session.tokenizer, session.tool, sample, tuple(params.stop), raw=raw)


def cut_by(session: Session, sample: TrainingSample) -> str | None:
    """Return the length limit that ended a sample; None for another finish reason."""
    if sample.finish_reason != "length":
        return None
    limits = session.engine.limits
    num_slots = limits.num_blocks * limits.block_size
    if len(sample.prompt_tokens) + len(sample.completion_tokens) < min(limits.max_model_len, num_slots):
        return f"--max-tokens {len(sample.completion_tokens)} reached"
    what = "context" if limits.max_model_len <= num_slots else "KV cache"
    return f"prompt and answer fill the {what} of {min(limits.max_model_len, num_slots)} tokens"


def answer_stats(sample: TrainingSample, first_token_after: float, seconds: float) -> AnswerStats:
    """Return the statistics of a sample; times are in seconds after the request."""
    last = sample.version_spans[-1] if sample.version_spans else None
    return AnswerStats(
        num_prompt=len(sample.prompt_tokens),
        num_cached=sample.num_cached_tokens,
        num_new=len(sample.completion_tokens),
        first_token_after=first_token_after,
        seconds=seconds,
        seed=sample.seed,
        version=None if last is None or not last.version else str(last.label or last.version),
    )
