"""`RequestQueue`: checks requests and adds them to the engine's queue."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq

from nano_inference.admission import Limits, StopMatcherFactory, checked
from nano_inference.calls import Calls
from nano_inference.config import EngineConfig
from nano_inference.seeds import derive_seed
from nano_inference.sequence import Sequence, start_sequences
from nano_inference.state import EngineState
from nano_inference.types import BadRequest, EngineRequest


class RequestQueue:
    """Owns the counters of request and sequence ids. Its methods run inside a call."""

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        stop_matcher: StopMatcherFactory | None,
        state: EngineState,
        calls: Calls,
    ) -> None:
        """`stop_matcher` is None without a tokenizer."""
        self.limits = limits
        self._config = config
        self._stop_matcher = stop_matcher
        self._state = state
        self._calls = calls
        self._next_request = 0
        self._next_sequence = 0

    def admit_all(self, requests: Seq[EngineRequest], prefixes: Seq[str] = ()) -> list[list[Sequence]]:
        """Return the sequences of every request without queueing them. Raises `BadRequest`.

        `prefixes` holds one text for each request, put in front of its error message.
        """
        admitted: list[list[Sequence]] = []
        next_sequence = self._next_sequence
        for index, request in enumerate(requests):
            try:
                admitted.append(self._admit(request, self._next_request + index, next_sequence))
            except ValueError as error:  # a `BadRequest`, or from the request's matcher or program
                cause = None if isinstance(error, BadRequest) else error
                raise BadRequest(f"{prefixes[index] if prefixes else ''}{error}") from cause
            next_sequence += len(admitted[-1])
        return admitted

    def enqueue(self, sequences: list[Sequence], *, claimed: bool, is_owned: bool) -> int:
        """Queue a request's sequences; return its id. An owned request ends with the running call."""
        request_id = sequences[0].request_id

        def enqueue() -> None:
            self._next_request = request_id + 1
            self._next_sequence += len(sequences)
            if is_owned:
                self._calls.own(request_id)
            self._state.requests.open(request_id, sequences, claimed=claimed, is_owned=is_owned)
            self._state.core.enqueue(sequences)

        self._state.change(enqueue)
        return request_id

    def _admit(self, request: EngineRequest, request_id: int, first_id: int) -> list[Sequence]:
        request, max_new_tokens = checked(request, self.limits, self._stop_matcher)
        newest = -1 if request.partial is None else max(request.partial.token_versions, default=-1)
        if newest > (version := self._state.core.version):
            raise BadRequest(f"partial: has tokens of weight version {newest}, this engine's is {version}")
        return start_sequences(
            request,
            request_id=request_id,
            first_id=first_id,
            seed=self._seed_of(request, request_id),
            max_new_tokens=max_new_tokens,
            eos_token_ids=self.limits.eos_token_ids,
            logprobs_mode=self._config.logprobs_mode,
            lineage=self.limits.lineage,
        )

    def _seed_of(self, request: EngineRequest, request_id: int) -> int:
        """Return the seed of the request, of its partial sample, derived from the engine's, or fresh entropy."""
        if request.params.seed is not None:
            return request.params.seed
        if request.partial is not None and request.partial.seed is not None:
            return request.partial.seed
        if self._config.seed is not None:
            return derive_seed(self._config.seed, request_id)
        return secrets.randbits(64)
