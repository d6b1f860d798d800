"""The OpenAPI document: valid, complete, and consistent with the server (schemathesis)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from nano_inference.server.app import installed_dialects
from nano_inference.server.config import ServerConfig
from nano_inference.server.openapi import openapi
from nano_inference.server.trainers.routes import ADMIN_PATHS, QUESTIONS
from tests.server.tiny import Running, running

pytestmark = pytest.mark.slow

DIALECTS = installed_dialects()
MAX_LEN = 64
COUNTS = pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.nightly)])
"""Requests for each operation."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
CONFIG = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": [400, 413, 422]}}})
"""413 for bodies with too many messages: the size limit is checked first. 422 is nanochat's for wrong types."""


@pytest.fixture(scope="module")
def small(tiny_directory: Path) -> Iterator[Running]:
    with running(tiny_directory, ServerConfig(port=0, log_requests=False, max_n=4), max_model_len=MAX_LEN) as one:
        yield one


def test_served_document_is_valid(small: Running) -> None:
    document = small.client.get("/openapi.json").json()
    assert document == openapi(DIALECTS, needs_key=False)
    assert document["openapi"].startswith("3.1")
    schemathesis.openapi.from_dict(document).validate()


def test_document_describes_exactly_the_routes(small: Running) -> None:
    described = {
        (path.replace("{model}", "{model:path}"), method.upper())
        for path, operations in openapi(DIALECTS, needs_key=False)["paths"].items()
        for method in operations
    }
    routes = {
        (route.path, method)
        for route in small.app.routes
        if isinstance(route, Route) and route.path not in ADMIN_PATHS | QUESTIONS  # RL routes, described in docs/rl.md
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert described == routes


def test_security_scheme_is_described_if_key_is_needed() -> None:
    free, guarded = openapi(DIALECTS, needs_key=False), openapi(DIALECTS, needs_key=True)
    assert "security" not in free and "securitySchemes" not in free["components"]
    assert guarded["security"] == [{"key": []}]
    assert guarded["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    is_open = {
        path
        for path, operations in guarded["paths"].items()
        for operation in operations.values()
        if operation.get("security") == []
    }
    assert is_open == {"/health", "/ready", "/ping", "/liveness", "/", "/dashboard", "/docs", "/formulas.js"}


def operations_of(server: Running) -> list[APIOperation[Any, Any, Any, Any, Any]]:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=CONFIG)
    return [one.ok() for one in schema.get_all_operations()]


def statuses(operation: APIOperation[Any, Any, Any, Any, Any], mode: GenerationMode, count: int) -> set[int]:
    """Send schemathesis' requests for an operation, check each response, and return the statuses."""
    seen: set[int] = set()

    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(mode))
    def request(case: Case) -> None:
        response = case.call()
        seen.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    request()
    return seen


@COUNTS
def test_schemathesis_finds_no_server_error(small: Running, count: int) -> None:
    """No 5xx, and every response is described in the document."""
    operations = operations_of(small)
    described = {
        f"{method.upper()} {path}"
        for path, one in openapi(DIALECTS, needs_key=False)["paths"].items()
        for method in one
    }
    assert {one.label for one in operations} == described - {"GET /openapi.json"}, (
        "schemathesis omits the document itself"
    )
    seen = {f"{one.method} {one.path}": statuses(one, GenerationMode.POSITIVE, count) for one in operations}
    assert all(200 in seen[name] for name in seen if name.startswith("get ") and "{" not in name), seen
    assert 200 in seen["post /detokenize"], seen
    assert set().union(*seen.values()) <= {200, 400, 404, 413, 422}, seen
    assert small.client.get("/ready").json() == {"status": "ready"}


@COUNTS
def test_schemathesis_invalid_requests_are_refused(small: Running, count: int) -> None:
    for operation in operations_of(small):
        if operation.body:
            assert 200 not in statuses(operation, GenerationMode.NEGATIVE, count)
