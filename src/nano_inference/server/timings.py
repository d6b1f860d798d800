"""llama.cpp's `timings` of an answer, from the times of its sample."""

from __future__ import annotations

from nano_inference.server.call import JSON, Call, Transcript


def timings_of(call: Call, transcript: Transcript, num_tokens: int) -> JSON:
    """Return the timings of an answer that has `num_tokens` tokens so far; unknown values are None.

    The prompt's time starts when the sample leaves the queue and ends with the first token.
    """
    times, sample = transcript.times, transcript.sample
    started, first, last = (None, None, None) if times is None else (times.started, times.first_token, times.last_token)
    cached = None if sample is None else sample.num_cached_tokens
    prefilled = None if cached is None else len(call.requests[transcript.prompt_index].prompt) - cached
    return {
        "cache_n": cached,
        **speeds("prompt", prefilled, _seconds(started, first)),
        **speeds("predicted", num_tokens, _seconds(first, last)),
    }


def speeds(name: str, count: int | None, seconds: float | None) -> JSON:
    """Return the fields of llama.cpp's timings for `count` tokens in `seconds`; unknown values are None."""
    is_known = count is not None and seconds is not None
    return {
        f"{name}_n": count,
        f"{name}_ms": None if seconds is None else seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / count if is_known and count and seconds is not None else None,
        f"{name}_per_second": count / seconds if is_known and count and seconds else None,
    }


def _seconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
