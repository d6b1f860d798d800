"""Places in the queue: bounds on the samples and the tokens of all open calls, and on each client's part of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from nano_inference.server.call import Call
from nano_inference.server.clients import Client
from nano_inference.server.errors import ApiError, queue_full, quota_exceeded
from nano_inference.server.quota import quota


class QueueLimits:
    """Owns the places in the queue. All samples of a call come in, or none."""

    def __init__(self, *, max_samples: int, max_tokens: int, share: float = 1.0) -> None:
        self.max_samples = max_samples
        """Samples that may run or wait."""
        self.max_tokens = max_tokens
        """Tokens that their prompts and answers may come to."""
        self.share = share
        """Part of what the others leave that one client may hold; 1 is no quota."""
        self.num_samples = 0
        self.num_tokens = 0
        self._samples: Counter[str] = Counter()
        """Samples of every client that holds any."""
        self._tokens: Counter[str] = Counter()

    @property
    def num_clients(self) -> int:
        """Clients that hold places."""
        return len(self._samples)

    @property
    def largest_part(self) -> int:
        """Most samples that one client holds."""
        return max(self._samples.values(), default=0)

    @contextmanager
    def reserve(self, call: Call, client: Client) -> Iterator[None]:
        """Take a call's places; leaving the block gives them back.

        Raises `ApiError`: 400 for a call that could never come in, 503 with Retry-After for one that cannot now, 429
        with Retry-After for one that is more than its client may hold.
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
        samples = f"{call.total_samples} samples are asked for"
        tokens = f"prompts and answers come to {call.num_tokens} tokens"
        for asked, capacity, what, param in (
            (call.total_samples, self.max_samples, samples, "n"),
            (call.num_tokens, self.max_tokens, tokens, "max_tokens"),
        ):
            if asked > capacity:
                raise ApiError(400, f"{what}; this server takes {capacity} at once", param=param)
            if share < 1 and asked > (most := quota(share, capacity, 0)):
                text = f"{what}; this server takes {most} of one client at once (--client-share)"
                raise ApiError(400, text, param=param)

    def _refuse_when_full(self, call: Call) -> None:
        if self.num_samples + call.total_samples > self.max_samples:
            raise queue_full(
                f"the queue is full: {self.num_samples} samples of {self.max_samples} are open, {call.total_samples} "
                "more are asked for; try again shortly"
            )
        if self.num_tokens + call.num_tokens > self.max_tokens:
            raise queue_full(
                f"the queue is full: its requests come to {self.num_tokens} tokens of {self.max_tokens}, "
                f"{call.num_tokens} more are asked for; try again shortly",
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
                f"{name.partition(' ')[0]} quota: this client's open requests hold {held} {unit} and {asked} more are "
                f"asked for; one client may hold {most} of {capacity} now (--client-share {self.share:g} of what "
                "others leave); try again when some have ended"
            )
            # A client that holds nothing is refused because of the others.
            raise quota_exceeded(text) if held else queue_full(text)
