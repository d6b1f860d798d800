"""The header `endpoint-load-metrics`, which a request asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.load_report import load_report
from nano_inference.types import StepStats
from tests.server.tiny import Running, running

COMPLETE = "/v1/completions"


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with running(tiny_directory) as one:
        yield one


def report_of(server: Running, form: str | None, **fields: Any) -> str | None:
    headers = {} if form is None else {"endpoint-load-metrics-format": form}
    reply = server.client.post(COMPLETE, json={"prompt": "ab", "max_tokens": 2, **fields}, headers=headers)
    assert reply.status_code == 200
    return reply.headers.get("endpoint-load-metrics")


@pytest.mark.parametrize("stream", [False, True])
def test_load_is_reported_in_the_form_that_the_request_names(server: Running, stream: bool) -> None:
    for form in ("TEXT", "text"):
        text = report_of(server, form, stream=stream)
        assert text is not None and text.startswith("TEXT named_metrics.kv_cache_usage_perc=")
        assert text.endswith(", named_metrics.num_requests_waiting=0")
    found = report_of(server, "JSON", stream=stream)
    assert found is not None and found.startswith("JSON ")
    values = json.loads(found.removeprefix("JSON "))["named_metrics"]
    assert set(values) == {"kv_cache_usage_perc", "num_requests_waiting"} and 0 <= values["kv_cache_usage_perc"] < 1


@pytest.mark.parametrize("form", [None, "", "BIN"])
def test_load_is_not_reported_otherwise(server: Running, form: str | None) -> None:
    assert report_of(server, form) is None


def test_report_has_the_counts_of_the_last_step() -> None:
    stats = StepStats(
        num_rows=1, num_computed=1, num_sampled=1, num_preempted=0, num_running=1, num_waiting=3, num_free_blocks=15,
        weight_version=0,
    )  # fmt: skip
    values = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}
    assert load_report("Json", stats, 20) == f"JSON {json.dumps({'named_metrics': values})}"
    expected = "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3"
    assert load_report("TEXT", stats, 20) == expected
