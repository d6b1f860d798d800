"""llama.cpp's `prompt_progress`: how much of a prompt is computed, in the events of a stream (`return_progress`)."""

from __future__ import annotations

import time

from nano_inference.server.call import JSON, Call, Transcript
from nano_inference.server.detokenizer import DecodedDelta


class PrefillProgress:
    """What one stream has reported of the prefill of its samples. Used only by the reply of the call."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._reported: dict[int, int] = {}  # index of a sample -> computed tokens of its prompt in its latest report

    def reports(self, transcript: Transcript, decoded: DecodedDelta) -> list[JSON]:
        """Return the values of `prompt_progress` that are due with a delta; none unless the call requests them.

        The first one reports the cached tokens alone. Later ones rise: while a preempted sample computes its prompt
        again, nothing is reported. `time_ms` starts when the sample leaves the queue.
        """
        prefill = None if decoded.delta is None else decoded.delta.prefill
        if prefill is None or not self._call.shape.progress:
            return []
        due = []
        if transcript.index not in self._reported:
            due.append(self._report(transcript, prefill.num_cached, prefill.num_cached, 0))
        if prefill.num_computed > self._reported.get(transcript.index, prefill.num_cached):
            times = transcript.times
            started = None if times is None else times.started
            elapsed = 0 if started is None else round((time.monotonic() - started) * 1e3)
            due.append(self._report(transcript, prefill.num_cached, prefill.num_computed, elapsed))
        return due

    def _report(self, transcript: Transcript, cached: int, computed: int, elapsed_ms: int) -> JSON:
        self._reported[transcript.index] = computed
        total = len(self._call.requests[transcript.prompt_index].prompt)
        return {"total": total, "cache": cached, "processed": computed, "time_ms": elapsed_ms}
