"""The OpenAPI document: valid, complete, and consistent with the server (schemathesis)."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

from nano_inference.server import schema as bodies
from nano_inference.server.app import App, guard_policy, installed_dialects
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import Dialect
from nano_inference.server.engine_link import EngineLink
from nano_inference.server.openapi import openapi
from nano_inference.server.security import KeyRing
from nano_inference.server.trainers.routes import ADMIN_PATHS, QUESTIONS
from tests.effort import IS_THOROUGH
from tests.server.tiny import Running, running

DIALECTS = installed_dialects()
EXAMPLES = 200 if IS_THOROUGH else 3
"""Requests for each operation."""
MAX_LEN = 64
NO_KEY = {"needs_key": False}
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


class WatchedDialects(dict[str, Dialect]):
    """All dialects; `on_read` is called before another thread than the main one reads them, some times a document."""

    def __init__(self, on_read: Callable[[], None]) -> None:
        super().__init__(DIALECTS)
        self.on_read = on_read

    def values(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.on_read()
        return super().values()


@contextmanager
def unserved(dialects: Mapping[str, Dialect]) -> Iterator[App]:
    """Yield an application without a model."""
    config = ServerConfig(log_requests=False)
    one = App(config, guard_policy(config, KeyRing.of(())), EngineLink(step_timeout=60), dialects)
    yield one
    one.close()


def test_document_is_created_once_in_a_thread() -> None:
    readers: list[str] = []
    going = threading.Event()

    def note() -> None:
        going.wait(60)
        readers.append(threading.current_thread().name)

    unused: Any = None

    async def request(app: App) -> None:
        first, *others = [asyncio.create_task(app.document(unused)) for _ in range(4)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()  # the first client disconnects; the others still get the document
        going.set()
        replies = [await other for other in others] + [await app.document(unused)]
        assert {json.loads(bytes(reply.body))["openapi"] for reply in replies} == {"3.1.0"}
        with pytest.raises(asyncio.CancelledError):
            await first

    with unserved(WatchedDialects(note)) as app:
        assert not readers
        asyncio.run(request(app))
    (reader,) = set(readers)
    assert reader.startswith("worker-text")
    once: list[str] = []
    thread = threading.Thread(target=openapi, args=(WatchedDialects(lambda: once.append("")),), kwargs=NO_KEY)
    thread.start()
    thread.join()
    assert len(readers) == len(once) > 0


def test_failed_document_is_created_again() -> None:
    unused: Any = None
    failures = [RuntimeError("not today")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    async def request(app: App) -> None:
        failed = await asyncio.gather(*(app.document(unused) for _ in range(2)), return_exceptions=True)
        assert [str(error) for error in failed] == ["not today"] * 2
        assert (await app.document(unused)).status_code == 200

    with unserved(WatchedDialects(fail)) as app:
        asyncio.run(request(app))


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


def test_references_are_defined() -> None:
    document = openapi(DIALECTS, needs_key=True)
    targets = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert targets <= document["components"]["schemas"].keys()
    assert {"CompletionBody", "ChatBody", "Error"} <= targets


def test_the_limits_are_in_the_document() -> None:
    fields = openapi(DIALECTS, needs_key=False)["components"]["schemas"]["CompletionBody"]["properties"]
    (temperature,) = (one for one in fields["temperature"]["anyOf"] if one["type"] == "number")
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    (stops,) = (one for one in fields["stop"]["anyOf"] if one["type"] == "array")
    assert stops["maxItems"] == bodies.MAX_STOPS
    (bias,) = (one for one in fields["logit_bias"]["anyOf"] if one["type"] == "object")
    assert bias["maxProperties"] == bodies.MAX_BIAS


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


def statuses(operation: APIOperation[Any, Any, Any, Any, Any], mode: GenerationMode) -> set[int]:
    """Send schemathesis' requests for an operation, check each response, and return the statuses."""
    seen: set[int] = set()

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(mode))
    def request(case: Case) -> None:
        response = case.call()
        seen.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    request()
    return seen


def test_schemathesis_finds_no_server_error(small: Running) -> None:
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
    seen = {f"{one.method} {one.path}": statuses(one, GenerationMode.POSITIVE) for one in operations}
    assert all(200 in seen[name] for name in seen if name.startswith("get ") and "{" not in name), seen
    assert 200 in seen["post /detokenize"], seen
    assert set().union(*seen.values()) <= {200, 400, 404, 413, 422}, seen
    assert small.client.get("/ready").json() == {"status": "ready"}


def test_schemathesis_invalid_requests_are_refused(small: Running) -> None:
    for operation in operations_of(small):
        if operation.body:
            assert 200 not in statuses(operation, GenerationMode.NEGATIVE)
