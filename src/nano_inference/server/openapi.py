"""The OpenAPI document of the routes; request bodies come from `schema`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

import nano_inference
from nano_inference.server.dialect import Converting, Dialect, Route, gets, posts
from nano_inference.server.guard import OPEN_PATHS

JSON = dict[str, Any]

_GETS: Mapping[str, str] = {
    "/v1/models": "List the names that the model is served under.",
    "/models": "The same as /v1/models, as in llama.cpp.",
    "/health": "Liveness: 503 while loading and after the engine has failed.",
    "/ready": "Readiness: 503 while loading, draining or dead.",
    "/ping": "The same as /health.",
    "/liveness": "The same as /health.",
    "/load": "Count the open requests.",
    "/version": "Return the server's version.",
    "/metrics": "Prometheus metrics, under vLLM's names.",
    "/openapi.json": "This document.",
    "/info": "Describe the model, its limits and its defaults.",
    "/": "The chat page.",
    "/dashboard": "The metrics page.",
    "/docs": "The page of this document.",
    "/formulas.js": "The chat page's formula renderer.",
}
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
        [(body, "validation") for body in {route.body for _, route in routes}],
        ref_template="#/components/schemas/{model}",
    )
    paths = {
        path: {"get": _operation(text, {"security": []} if path in OPEN_PATHS else {})} for path, text in _GETS.items()
    }
    for get in gets(dialects):
        paths.setdefault(get.path, {})["get"] = _operation(get.summary, {})
    for one in (route for dialect in dialects.values() for route in dialect.recalling):
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one.summary, _path_parameter("id"))
    for dialect, route in routes:
        paths.setdefault(route.path, {})["post"] = _post(dialect, route, refs[route.body, "validation"])
    paths["/v1/models/{model}"] = {"get": _operation("Describe one of the names.", _path_parameter("model"))}
    text = {"type": ["string", "null"]}
    fields = {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text}
    error = {"type": "object", "required": list(fields), "properties": fields}
    components: JSON = {
        "schemas": definitions["$defs"]
        | {"Error": {"type": "object", "required": ["error"], "properties": {"error": error}}}
    }
    info = {"title": "nano-inference", "version": nano_inference.__version__}
    document: JSON = {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(summary: str, fields: JSON, *, ok: JSON | None = None, has_own_errors: bool = False) -> JSON:
    """Return an operation with its own fields; `ok` is added to the reply of 200."""
    schema = {"type": "object"} if has_own_errors else {"$ref": "#/components/schemas/Error"}
    content = {"application/json": {"schema": schema}}
    refusals = {status: {"description": text, "content": content} for status, text in _REFUSALS.items()}
    return {"summary": summary, **fields, "responses": {"200": {"description": "OK", **(ok or {})}, **refusals}}


def _path_parameter(name: str) -> JSON:
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]}


def _post(dialect: Dialect, route: Route | Converting, body: JSON) -> JSON:
    content: JSON = {"application/json": {"schema": {"type": ["object", "array"]}}}
    if isinstance(route, Route) and route.streams:
        content[route.form.media_type.partition(";")[0]] = {}
    fields = {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}
    has_own_errors = dialect.error_body is not None
    operation = _operation(route.summary, fields, ok={"content": content}, has_own_errors=has_own_errors)
    operation["responses"].setdefault(str(route.body.malformed_status), operation["responses"]["400"])
    return operation
