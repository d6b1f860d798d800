"""Rewrites the versions and ids of one worker's samples as the pool's. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nano_inference.types import Delta, TrainingSample


def pool_sample(
    sample: TrainingSample, pool_version: Callable[[int], int], job_id: int, lineage: str
) -> TrainingSample:
    """Return a worker's sample with the pool's request id, versions and lineage.

    `pool_version` maps the worker's numbers of versions, which start at 0 in each new worker, to the pool's.
    """
    labels = {pool_version(number): label for number, label in sample.version_labels.items()}
    return replace(
        sample,
        request_id=job_id,
        token_versions=tuple(pool_version(number) for number in sample.token_versions),
        weight_version=pool_version(sample.weight_version),
        version_labels=labels,
        lineage=lineage,
    )


def pool_delta(delta: Delta, pool_version: Callable[[int], int], job_id: int, lineage: str) -> Delta:
    """Return a worker's delta, as `pool_sample` does with samples."""
    sample = None if delta.sample is None else pool_sample(delta.sample, pool_version, job_id, lineage)
    numbers = tuple(pool_version(number) for number in delta.versions)
    return replace(delta, request_id=job_id, versions=numbers, sample=sample)


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
