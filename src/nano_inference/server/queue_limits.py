"""Admission limits: samples and tokens of all open calls, and of each client's calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from nano_inference.server.call import Call
from nano_inference.server.clients import Client
from nano_inference.server.errors import ApiError, queue_full, quota_exceeded
from nano_inference.server.quota import quota


class QueueLimits:
    """Owns the counts of admitted samples and tokens. A call is admitted as a whole or refused."""

    def __init__(self, *, max_samples: int, max_tokens: int, share: float = 1.0) -> None:
        self.max_samples = max_samples
        """Limit of running and waiting samples."""
        self.max_tokens = max_tokens
        """Limit of their prompt and output tokens."""
        self.share = share
        """Fraction of the capacity not held by others that one client may hold; 1: no quota."""
        self.num_samples = 0
        self.num_tokens = 0
        self._samples: Counter[str] = Counter()
        """Client -> samples, if any."""
        self._tokens: Counter[str] = Counter()

    @property
    def num_clients(self) -> int:
        """Clients with open calls."""
        return len(self._samples)

    @property
    def largest_part(self) -> int:
        """Maximum samples of one client."""
        return max(self._samples.values(), default=0)

    @contextmanager
    def reserve(self, call: Call, client: Client) -> Iterator[None]:
        """Count a call as admitted until the block is left.

        Raises `ApiError`: 400 for a call that exceeds the limits by itself, 503 with Retry-After if the queue is full,
        429 with Retry-After above the client's quota.
        """
        share = 1.0 if client.is_exempt else self.share
        self._refuse_too_large(call, share)
        self._refuse_when_full(call)
        if share < 1:
            self._refuse_over_quota(call, client.name)
        self._take(client.name, call.total_samples, call.num_tokens)
        try:
            yield
        finally:
            self._take(client.name, -call.total_samples, -call.num_tokens)

    def _take(self, name: str, num_samples: int, num_tokens: int) -> None:
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        for held, change in ((self._samples, num_samples), (self._tokens, num_tokens)):
            held[name] += change
            if not held[name]:
                del held[name]

    def _refuse_too_large(self, call: Call, share: float) -> None:
        samples = f"the request has {call.total_samples} samples"
        tokens = f"its prompts and outputs can reach {call.num_tokens} tokens"
        for asked, capacity, what, param in (
            (call.total_samples, self.max_samples, samples, "n"),
            (call.num_tokens, self.max_tokens, tokens, "max_tokens"),
        ):
            if asked > capacity:
                raise ApiError(400, f"{what}; this server accepts {capacity} at once", param=param)
            if share < 1 and asked > (most := quota(share, capacity, 0)):
                text = f"{what}; this server accepts {most} of one client at once (--client-share)"
                raise ApiError(400, text, param=param)

    def _refuse_when_full(self, call: Call) -> None:
        if self.num_samples + call.total_samples > self.max_samples:
            raise queue_full(
                f"the queue is full: {self.num_samples} of {self.max_samples} samples are open, the request has "
                f"{call.total_samples}; try again shortly"
            )
        if self.num_tokens + call.num_tokens > self.max_tokens:
            raise queue_full(
                f"the queue is full: open requests can reach {self.num_tokens} of {self.max_tokens} tokens, "
                f"the request {call.num_tokens}; try again shortly",
                code="too_many_tokens",
            )

    def _refuse_over_quota(self, call: Call, name: str) -> None:
        for held, asked, used, capacity, unit in (
            (self._samples[name], call.total_samples, self.num_samples, self.max_samples, "samples"),
            (self._tokens[name], call.num_tokens, self.num_tokens, self.max_tokens, "tokens"),
        ):
            most = quota(self.share, capacity, used - held)
            if held + asked <= most:
                continue
            text = (
                f"{name.partition(' ')[0]} quota: this client's open requests hold {held} {unit}, the request has "
                f"{asked}; one client may hold {most} of {capacity} now (--client-share {self.share:g} of what others "
                "leave); try again when some have ended"
            )
            # A client that holds nothing is refused because of the other clients: 503, not 429.
            raise quota_exceeded(text) if held else queue_full(text)
