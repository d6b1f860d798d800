"""The public surface as text: names and signatures, options, OpenAPI, metrics, environment, entry-point groups.

    python -m tests.surface    writes the files of this directory anew, after a change that is meant

A change of the surface is then a change of these files, in the same commit, for a reviewer to see.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import nano_inference
from nano_inference.cli.app import build_app
from nano_inference.cli.arguments import walk_commands
from nano_inference.server.app import installed_dialects
from nano_inference.server.openapi import openapi
from tests.surface.extensions import environment, groups
from tests.surface.metrics import metrics

HERE = Path(__file__).parent


def names() -> Iterator[str]:
    """Return a line for each public name, and for each public method, property and field of the classes."""
    for name in nano_inference.__all__:
        thing = getattr(nano_inference, name)
        if not inspect.isclass(thing):
            yield f"{name}{_signature(thing)}" if callable(thing) else name
            continue
        parents = [base.__name__ for base in thing.__mro__[1:] if base is not object]
        yield f"class {name}{_signature(thing)}" + (f": {', '.join(parents)}" if parents else "")
        fields = {field.name for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
        yield from (f"    {field}" for field in sorted(fields))
        for member, value in sorted(inspect.getmembers(thing)):
            is_own = not member.startswith("_") and member not in fields and not hasattr(object, member)
            if is_own and not issubclass(thing, BaseException | tuple):
                yield f"    {member}{_signature(value) if callable(value) else ''}"


def _signature(thing: Any) -> str:
    try:
        return str(inspect.signature(thing))
    except (TypeError, ValueError):
        return "(...)"


def options() -> Iterator[str]:
    """Return a line for each option of each command: its names, type and default."""
    for path, command in walk_commands(build_app()):
        yield " ".join(path)
        for argument in command.assemble_argument_collection():
            if argument.parse and argument.names != ("*",):
                yield f"    {' '.join(argument.names)}: {argument.hint} = {argument.field_info.default}"


def document() -> Iterator[str]:
    """Return a line of JSON for each operation and each schema of the OpenAPI document, without texts for people."""
    bare = _bare(openapi(installed_dialects(), needs_key=False))
    for path, operations in sorted(bare.pop("paths").items()):
        yield from (f"{method} {path} {_line(operation)}" for method, operation in sorted(operations.items()))
    for kind, entries in sorted(bare.pop("components").items()):
        yield from (f"{kind} {name} {_line(entry)}" for name, entry in sorted(entries.items()))
    yield _line(bare)


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _bare(value: Any) -> Any:
    """Return a JSON value without descriptions and summaries."""
    if isinstance(value, dict):
        texts = {key for key in ("description", "summary") if isinstance(value.get(key), str)}
        return {key: _bare(one) for key, one in value.items() if key not in texts}
    return [_bare(one) for one in value] if isinstance(value, list) else value


SURFACES: Mapping[str, Callable[[], Iterator[str]]] = MappingProxyType(
    {
        "names.txt": names,
        "options.txt": options,
        "openapi.txt": document,
        "metrics.txt": metrics,
        "environment.txt": environment,
        "groups.txt": groups,
    }
)


def text_of(name: str) -> str:
    """Return what the file of that name must hold."""
    return "\n".join(SURFACES[name]()) + "\n"
