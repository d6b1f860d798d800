"""llama.cpp's GET /slots."""

from __future__ import annotations

from nano_inference.server.call import JSON
from nano_inference.server.dialect import Occupancy, RunningSample
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel


def slots(model: ServedModel, occupancy: Occupancy) -> list[JSON]:
    """Return one entry for each sample that can run at once, those that run first, without texts and parameters.

    An entry has no identity: the next reply may list a sample elsewhere. Raises `ApiError` 501 if the server hides it.
    """
    if occupancy.running is None:
        raise ApiError(501, "this server does not list what runs: it was started with --no-slots", code="not_supported")
    running = occupancy.running()
    idle = [None] * max(0, occupancy.max_running - len(running))
    return [_slot(index, one, model) for index, one in enumerate([*running, *idle])]


def _slot(index: int, sample: RunningSample | None, model: ServedModel) -> JSON:
    context = model.limits.max_model_len
    slot: JSON = {"id": index, "n_ctx": context, "speculative": False, "is_processing": sample is not None}
    if sample is None:
        return slot
    most = context - sample.num_prompt if sample.max_tokens is None else sample.max_tokens
    remaining = max(0, most - sample.num_tokens)
    next_token = {"has_next_token": remaining > 0, "n_remain": remaining, "n_decoded": sample.num_tokens}
    return slot | {"n_prompt_tokens": sample.num_prompt, "next_token": [next_token]}
