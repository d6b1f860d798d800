"""When things happen to samples, as whoever counts is told. On the event loop; times of the monotonic clock."""

from __future__ import annotations

from nano_inference.server.metrics import SampleRecord
from nano_inference.server.served import Observer
from nano_inference.server.ticket import SampleTimes, Ticket
from nano_inference.types import TrainingSample


def count_tokens(observer: Observer, clock: SampleTimes, num_tokens: int, now: float) -> None:
    """Note that a sample got tokens, and tell how long they took."""
    clock.num_tokens += num_tokens
    before, clock.last_token = clock.last_token, now
    if before is None:
        clock.first_token = now
        observer.first_token(now - clock.arrived)
    else:
        observer.token_gap(now - before, num_tokens)


def ended_record(
    ticket: Ticket, prompt_index: int, clock: SampleTimes, reason: str, sample: TrainingSample | None = None
) -> SampleRecord:
    """Return what is counted of a sample that has ended; `sample` is missing when nobody waited for its end."""
    assert clock.ended is not None
    request, mates = ticket.requests[prompt_index], ticket.times[prompt_index]
    return SampleRecord(
        prompt_tokens=len(request.prompt),
        cached_tokens=sample.num_cached_tokens if sample else 0,
        output_tokens=clock.num_tokens,
        params_n=request.num_samples,
        params_max_tokens=request.params.max_tokens or 0,
        finish_reason=reason,
        num_preemptions=sample.num_preemptions if sample else 0,
        arrived=clock.arrived,
        started=clock.started,
        first_token=clock.first_token,
        ended=clock.ended,
        ends_request=all(mate.ended is not None for mate in mates),
        longest_output=max(mate.num_tokens for mate in mates),
    )
