"""Asks a server through instructor and prints what came as JSON. Run in instructor's own environment: URL, model, what.

Nothing is tried twice: an answer that its class refuses is an error here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any, Literal

import anthropic
import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

HELLO: Any = {"messages": [{"role": "user", "content": "The weather in Bern?"}]}
SEEDS = range(3)
BRACE = ord("}") - ord("!")
"""Of the tiny model's tokens."""


class Day(BaseModel):
    """Bounded in every part, so that any model comes to an end."""

    model_config = ConfigDict(extra="forbid")

    number: Annotated[int, Field(ge=1, le=31)]
    kind: Literal["sun", "rain"]
    note: Annotated[str, Field(max_length=8)]


class Report(BaseModel):
    """A list of objects in an object."""

    model_config = ConfigDict(extra="forbid")

    city: Annotated[str, Field(min_length=1, max_length=10)]
    days: Annotated[list[Day], Field(min_length=1, max_length=2)]
    unit: Literal["C", "F"]


class Open(BaseModel):
    """Any object: what `json_object` promises and no more."""

    model_config = ConfigDict(extra="allow")


def chat(url: str, name: str, mode: instructor.Mode) -> dict[str, Any]:
    """Return whole, streamed and asynchronous answers of chat completions."""
    place: Any = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    asked = HELLO | {"model": name, "max_tokens": 700, "max_retries": 0}
    create = instructor.from_openai(openai.OpenAI(**place), mode=mode).chat.completions
    later = instructor.from_openai(openai.AsyncOpenAI(**place), mode=mode).chat.completions
    partials = [list(create.create_partial(**asked, response_model=Report, seed=seed)) for seed in SEEDS]
    return {
        "whole": [create.create(**asked, response_model=Report, seed=seed).model_dump() for seed in SEEDS],
        "asynchronous": [asyncio.run(later.create(**asked, response_model=Report, seed=0)).model_dump()],
        "streamed": [pieces[-1].model_dump() for pieces in partials],
        "pieces": [len(pieces) for pieces in partials],
    }


def others(url: str, name: str) -> dict[str, Any]:
    """Return answers by way of Responses and of Messages, and any object: of a model that is fond of closing braces."""
    asked = HELLO | {"model": name, "max_tokens": 700, "max_retries": 0, "response_model": Report}
    ours = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    theirs = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    responses = instructor.from_openai(ours, mode=instructor.Mode.RESPONSES_TOOLS)
    messages = instructor.from_anthropic(theirs, mode=instructor.Mode.ANTHROPIC_TOOLS)
    plain = instructor.from_openai(ours, mode=instructor.Mode.JSON)
    free = {"response_model": Open, "logit_bias": {str(BRACE): 100}}
    return {
        "responses": [responses.chat.completions.create(**asked).model_dump() for _ in SEEDS],
        "messages": [messages.chat.completions.create(**asked).model_dump() for _ in SEEDS],
        "object": plain.chat.completions.create(**(asked | free)).model_dump(),
    }


def small(url: str, name: str) -> dict[str, Any]:
    """Return a few short answers: one object by a call and by a schema, and the first of several that are streamed."""
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = HELLO | {"model": name, "temperature": 0, "max_tokens": 60, "max_retries": 0, "response_model": Day}
    tools, schema = (
        instructor.from_openai(plain, mode=mode).chat.completions
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
    )
    return {
        "tools": tools.create(**asked).model_dump(),
        "schema": schema.create(**asked).model_dump(),
        "iterable": next(iter(tools.create_iterable(**asked))).model_dump(),
    }


if __name__ == "__main__":
    url, name, what = sys.argv[1:]
    if what == "others":
        print(json.dumps(others(url, name)))
    elif what == "small":
        print(json.dumps(small(url, name)))
    else:
        print(json.dumps(chat(url, name, instructor.Mode[what])))
