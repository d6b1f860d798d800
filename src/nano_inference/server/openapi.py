"""The OpenAPI document of the routes; request bodies come from `schema`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

import nano_inference
from nano_inference.server.dialect import Converting, Dialect, Generating, gets, posts

JSON = dict[str, Any]

_GETS: tuple[tuple[str, str, bool], ...] = (
    ("/v1/models", "List the names that the model is served under.", False),
    ("/models", "The same as /v1/models, as in llama.cpp.", False),
    ("/health", "Liveness: 503 while loading and after the engine has failed.", True),
    ("/ready", "Readiness: 503 while loading, draining or dead.", True),
    ("/ping", "The same as /health.", True),
    ("/liveness", "The same as /health.", True),
    ("/load", "Count the open requests.", False),
    ("/version", "Return the server's version.", False),
    ("/metrics", "Prometheus metrics, under vLLM's names.", False),
    ("/openapi.json", "This document.", False),
    ("/info", "Describe the model, its limits and its defaults.", False),
    ("/", "The chat page.", True),
    ("/dashboard", "The metrics page.", True),
    ("/docs", "The page of this document.", True),
    ("/formulas.js", "The chat page's formula renderer.", True),
)
_REFUSALS: Mapping[str, str] = {
    "400": "The request is wrong; the error names the field.",
    "401": "The API key is missing or wrong.",
    "403": "This Host is not allowed.",
    "404": "The model or path does not exist.",
    "408": "The request took too long to arrive.",
    "413": "The body is too large.",
    "415": "The body must be application/json.",
    "500": "A failure of the server.",
    "503": "Loading, full, draining or dead; Retry-After says when to try again.",
}


def openapi(dialects: Mapping[str, Dialect], *, needs_key: bool) -> JSON:
    """Return the document for these dialects. `needs_key`: True if clients must send an API key."""
    routes = list(posts(dialects))
    refs, definitions = models_json_schema(
        [(model, "validation") for model in {route.body for _, route in routes}],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, JSON] = {path: {"get": _get(summary, is_open)} for path, summary, is_open in _GETS}
    for get in gets(dialects):
        paths.setdefault(get.path, {})["get"] = _get(get.summary, False)
    for recalling in (route for dialect in dialects.values() for route in dialect.recalling):
        operation = _get(recalling.summary, False) | _path_parameter("id")
        paths.setdefault(recalling.path, {})[recalling.method.lower()] = operation
    for dialect, route in routes:
        operation = _post(refs[route.body, "validation"], route, has_own_errors=dialect.error_body is not None)
        paths.setdefault(route.path, {})["post"] = operation
    paths["/v1/models/{model}"] = {"get": _get("Describe one of the names.", False) | _path_parameter("model")}
    text = {"type": ["string", "null"]}
    fields = {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text}
    error = {"type": "object", "required": ["message", "type", "param", "code"], "properties": fields}
    schema = {"type": "object", "required": ["error"], "properties": {"error": error}}
    components: JSON = {"schemas": definitions["$defs"] | {"Error": schema}}
    document: JSON = {
        "openapi": "3.1.0",
        "info": {"title": "nano-inference", "version": nano_inference.__version__},
        "paths": paths,
        "components": components,
    }
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _get(text: str, is_open: bool) -> JSON:
    operation: JSON = {"summary": text, "responses": {"200": {"description": "OK"}} | _refusals()}
    return operation | ({"security": []} if is_open else {})


def _path_parameter(name: str) -> JSON:
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]}


def _post(body: JSON, post: Generating | Converting, *, has_own_errors: bool) -> JSON:
    content: JSON = {"application/json": {"schema": {"type": ["object", "array"]}}}
    if isinstance(post, Generating) and post.streams:
        content[post.form.media_type.partition(";")[0]] = {}
    refusals = _refusals(has_own_errors)
    if post.body.malformed_status != 400:
        refusals[str(post.body.malformed_status)] = refusals["400"]
    return {
        "summary": post.summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "OK", "content": content}} | refusals,
    }


def _refusals(has_own_shape: bool = False) -> JSON:
    schema = {"type": "object"} if has_own_shape else {"$ref": "#/components/schemas/Error"}
    return {
        status: {"description": text, "content": {"application/json": {"schema": schema}}}
        for status, text in _REFUSALS.items()
    }
