"""What dialects share that translate their bodies into the fields of a completion or a chat. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import to_json

from nano_inference.server.ask import ask_chat, ask_completion
from nano_inference.server.body import parse
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError, renamed
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import Body, ChatBody, CompletionBody
from nano_inference.server.structured import Structure

_B = TypeVar("_B", bound=Body)
_UNLIMITED = 1 << 40


def as_body(fields: Mapping[str, Any], kind: type[_B]) -> _B:
    """Return a body with these fields. Raises `ApiError` naming an invalid one."""
    try:
        return kind.model_validate(fields)
    except ValidationError:
        return parse(to_json(fields), kind)  # raises the client's error


def with_current_reasoning(messages: Sequence[JSON]) -> list[JSON]:
    """Return a chat's messages; those before the user's last text without `reasoning_content`."""
    start = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [
        {name: value for name, value in message.items() if index > start or name != "reasoning_content"}
        for index, message in enumerate(messages)
    ]


def given_fields(body: Body) -> dict[str, Any]:
    """Return a body's known fields with their values or defaults, without those that are None."""
    values: dict[str, Any] = {}
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        values[name] = field.default if value is None else value
    return {name: value for name, value in values.items() if value is not None}


def translated(
    fields: Mapping[str, Any],
    kind: type[CompletionBody | ChatBody],
    names: Mapping[str, str],
    model: ServedModel,
    config: ServerConfig,
    salt: str,
) -> Generation:
    """Return what a completion or a chat with these fields asks for; errors, also later ones, have a dialect's names.

    `names`: field of `kind` -> the dialect's. With `max_tokens` None and no default of the server, the output of a
    completion may fill the context. Raises `ApiError`.
    """
    if kind is CompletionBody and fields["max_tokens"] is None and config.n_predict is None:
        fields = {**fields, "n_predict": -1}
    try:
        if kind is ChatBody:
            generation = ask_chat(as_body(fields, ChatBody), model, config, salt)
        else:
            generation = ask_completion(as_body(fields, CompletionBody), model, config, salt)
    except ApiError as error:
        raise renamed(error, names) from None
    return replace(generation, structures=tuple(_renamed(one, names) for one in generation.structures))


def _renamed(structure: Structure | None, names: Mapping[str, str]) -> Structure | None:
    """Return a structure, whose errors name its field when it is compiled, with the dialect's name."""
    if structure is None:
        return None
    head, dot, path = structure.field.partition(".")
    return structure._replace(field=names.get(head, head) + dot + path)


def prompt_length(fields: Mapping[str, Any], names: Mapping[str, str], model: ServedModel) -> int:
    """Return the number of tokens of a chat's prompt, also beyond the model's context. Raises `ApiError`."""
    unlimited = replace(model, limits=replace(model.limits, max_model_len=_UNLIMITED, num_blocks=_UNLIMITED))
    return len(translated(fields, ChatBody, names, unlimited, ServerConfig(), "").requests[0].prompt)
