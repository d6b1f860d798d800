"""Who may come in: bounds on the samples and the tokens of all open calls, counted on the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nano_inference.server.call import Call
from nano_inference.server.errors import ApiError, queue_full


class Admission:
    """Owns the places in the queue. All samples of a call come in, or none."""

    def __init__(self, *, max_samples: int, max_tokens: int) -> None:
        self.max_samples = max_samples
        """Samples that may run or wait."""
        self.max_tokens = max_tokens
        """Tokens that their prompts and answers may come to."""
        self.num_samples = 0
        self.num_tokens = 0

    @contextmanager
    def place_for(self, call: Call) -> Iterator[None]:
        """Take a call's places; leaving the block gives them back.

        Raises `ApiError`: 400 for a call that could never come in, 503 with Retry-After for one that cannot now.
        """
        self._refuse_too_large(call)
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
        self.num_samples += call.total_samples
        self.num_tokens += call.num_tokens
        try:
            yield
        finally:
            self.num_samples -= call.total_samples
            self.num_tokens -= call.num_tokens

    def _refuse_too_large(self, call: Call) -> None:
        if call.total_samples > self.max_samples:
            raise ApiError(
                400,
                f"{call.total_samples} samples are asked for; this server takes {self.max_samples} at once",
                param="n",
            )
        if call.num_tokens > self.max_tokens:
            raise ApiError(
                400,
                f"prompts and answers come to {call.num_tokens} tokens; this server takes {self.max_tokens} at once",
                param="max_tokens",
            )
