"""Rewrites the versions and ids of one worker's samples as the pool's. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nano_inference.types import Delta, TrainingSample, WeightLabel


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbering:
    """How a pool numbers one worker's samples."""

    pool_version: Callable[[int], int]
    """Maps the worker's numbers of versions, which start anew in each new worker, to the pool's."""
    labels: Mapping[int, WeightLabel]
    """The trainer's names for the pool's versions; they replace a server's, which are texts."""
    lineage: str

    def sample(self, sample: TrainingSample, job_id: int) -> TrainingSample:
        """Return a worker's sample with the pool's request id, versions and lineage."""
        number = self.pool_version
        labels = {number(version): label for version, label in sample.version_labels.items()}
        return replace(
            sample,
            request_id=job_id,
            token_versions=tuple(map(number, sample.token_versions)),
            weight_version=number(sample.weight_version),
            version_labels={**labels, **self.labels},
            lineage=self.lineage,
        )

    def delta(self, delta: Delta, job_id: int) -> Delta:
        """Return a worker's delta, as `sample` does with samples."""
        sample = None if delta.sample is None else self.sample(delta.sample, job_id)
        versions = tuple(map(self.pool_version, delta.versions))
        return replace(delta, request_id=job_id, versions=versions, sample=sample)


def without_first(delta: Delta, count: int) -> Delta:
    """Return a delta without its first `count` tokens; its sample stays whole."""
    if not count:
        return delta
    optional = ("top_logprobs", "raw_logprobs", "sampling_masks")
    cut = {name: value[count:] for name in optional if (value := getattr(delta, name)) is not None}
    return replace(
        delta,
        token_ids=delta.token_ids[count:],
        logprobs=delta.logprobs[count:],
        mask=delta.mask[count:],
        versions=delta.versions[count:],
        **cut,
    )
