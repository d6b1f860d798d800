"""llama.cpp's `timings` and vLLM's `metrics` of an answer, from the times of its sample."""

from __future__ import annotations

import time

from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.transcript import Transcript


def timings_of(generation: Generation, transcript: Transcript) -> JSON:
    """Return the timings of an answer so far; unknown values are None.

    The prompt's time starts when the sample leaves the queue and ends with the first token.
    """
    times, sample = transcript.times, transcript.sample
    started, first, last = (times.started, times.first_token, times.last_token) if times else (None, None, None)
    cached = None if sample is None else sample.num_cached_tokens
    prefilled = None if cached is None else len(generation.requests[transcript.prompt_index].prompt) - cached
    return {
        "cache_n": cached,
        **speeds("prompt", prefilled, _seconds(started, first)),
        **speeds("predicted", len(transcript.token_ids), _seconds(first, last)),
    }


def requested_timings(generation: Generation, transcript: Transcript) -> JSON:
    """Return `timings_of` as a field of a reply if the client asked for it."""
    return {"timings": timings_of(generation, transcript)} if generation.timings else {}


def metrics_of(transcript: Transcript) -> JSON:
    """Return vLLM's `metrics` of an answer, without the values that are unknown.

    Fields and their meaning: `PerRequestMetrics` in vllm/entrypoints/generate/base/serving.py. The time to the first
    token starts when the sample leaves the queue; the speed is that of prompt and answer together.
    """
    times, num_tokens = transcript.times, len(transcript.token_ids)
    if times is None:
        return {}
    decoding, whole = _seconds(times.first_token, times.last_token), _seconds(times.started, times.last_token)
    seconds = {
        "time_to_first_token_ms": _seconds(times.started, times.first_token),
        "generation_time_ms": decoding,
        "queue_time_ms": _seconds(times.arrived, times.started),
        "mean_itl_ms": decoding / (num_tokens - 1) if decoding is not None and num_tokens > 1 else None,
    }
    metrics = {name: value * 1e3 for name, value in seconds.items() if value is not None}
    return {**metrics, "tokens_per_second": num_tokens / whole} if whole else metrics


def speeds(name: str, count: int | None, seconds: float | None) -> JSON:
    """Return the fields of llama.cpp's timings for `count` tokens in `seconds`; unknown values are None."""
    return {
        f"{name}_n": count,
        f"{name}_ms": None if seconds is None else seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / count if count and seconds is not None else None,
        f"{name}_per_second": count / seconds if count and seconds else None,
    }


def _seconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def prefill_reports(generation: Generation, transcript: Transcript, decoded: DecodedDelta) -> list[JSON]:
    """Return the values of `prompt_progress` that are due with a delta; none unless they are requested.

    The first one reports the cached tokens alone. Later ones rise: while a preempted sample computes its prompt again,
    nothing is reported. `time_ms` starts when the sample leaves the queue.
    """
    prefill = None if decoded.delta is None else decoded.delta.prefill
    if prefill is None or not generation.progress:
        return []
    cached, latest = prefill.num_cached, transcript.num_reported
    due = [(cached, 0)] if latest is None else []  # (computed tokens, time)
    if prefill.num_computed > (cached if latest is None else latest):
        started = None if transcript.times is None else transcript.times.started
        due.append((prefill.num_computed, 0 if started is None else round((time.monotonic() - started) * 1e3)))
    if due:
        transcript.num_reported = due[-1][0]
    total = len(generation.requests[transcript.prompt_index].prompt)
    return [{"total": total, "cache": cached, "processed": computed, "time_ms": ms} for computed, ms in due]
