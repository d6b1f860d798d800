"""The header `endpoint-load-metrics`: the engine's load in ORCA's form, for proxies that balance by it.

A request asks for it with the header `endpoint-load-metrics-format`, as in vLLM, whose names the values have. Forms:
gRPC proposal A51 and https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto (`named_metrics`).
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

from starlette.types import Send

from nano_inference.server.headers import Headers, single
from nano_inference.types import StepStats

ASKS = b"endpoint-load-metrics-format"
_NAME = b"endpoint-load-metrics"


def load_report(form: str, stats: StepStats | None, num_blocks: int) -> str | None:
    """Return the header's value in the form TEXT or JSON, of any case; None for another. `stats` None: no step ran."""
    values = {
        "kv_cache_usage_perc": 0.0 if stats is None else max(0.0, 1 - stats.num_free_blocks / num_blocks),
        "num_requests_waiting": 0.0 if stats is None else float(stats.num_waiting),
    }
    if form.upper() == "TEXT":
        return "TEXT " + ", ".join(f"named_metrics.{name}={value:.6g}" for name, value in values.items())
    if form.upper() == "JSON":
        return "JSON " + json.dumps({"named_metrics": values})
    return None


def with_load_report(send: Send, headers: Headers, stats: StepStats | None, num_blocks: int) -> Send:
    """Return a `send` that adds the header to the start of a response if the request's headers ask for it."""
    form = single(headers, ASKS)
    value = None if form is None else load_report(form, stats, num_blocks)
    if value is None:
        return send

    async def reporting(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (_NAME, value.encode("ascii"))]}
        await send(message)

    return reporting
