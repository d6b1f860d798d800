"""Calls a server through instructor and prints the results as JSON. Arguments: URL, model, kind of call.

Runs in instructor's virtual environment. There are no retries: an answer that its class rejects is an error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import anthropic
import instructor
import openai
from pydantic import BaseModel, ConfigDict

from tests.clients.weather import Day, Report

HELLO: Any = {"messages": [{"role": "user", "content": "The weather in Bern?"}]}
SEEDS = range(3)
BRACE = ord("}") - ord("!")
"""The tiny model's token of a closing brace."""


class Open(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="allow")


def chat(url: str, name: str, mode: instructor.Mode) -> dict[str, Any]:
    """Return whole, streamed and asynchronous answers of chat completions."""
    place: Any = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    request = HELLO | {"model": name, "max_tokens": 700, "max_retries": 0}
    create = instructor.from_openai(openai.OpenAI(**place), mode=mode).chat.completions
    later = instructor.from_openai(openai.AsyncOpenAI(**place), mode=mode).chat.completions
    partials = [list(create.create_partial(**request, response_model=Report, seed=seed)) for seed in SEEDS]
    return {
        "whole": [create.create(**request, response_model=Report, seed=seed).model_dump() for seed in SEEDS],
        "asynchronous": [asyncio.run(later.create(**request, response_model=Report, seed=0)).model_dump()],
        "streamed": [pieces[-1].model_dump() for pieces in partials],
        "pieces": [len(pieces) for pieces in partials],
    }


def others(url: str, name: str) -> dict[str, Any]:
    """Return answers through Responses and Messages, and one of `json_object` with a bias for closing braces."""
    request = HELLO | {"model": name, "max_tokens": 700, "max_retries": 0, "response_model": Report}
    openai_client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    anthropic_client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    responses = instructor.from_openai(openai_client, mode=instructor.Mode.RESPONSES_TOOLS)
    messages = instructor.from_anthropic(anthropic_client, mode=instructor.Mode.ANTHROPIC_TOOLS)
    plain = instructor.from_openai(openai_client, mode=instructor.Mode.JSON)
    free = {"response_model": Open, "logit_bias": {str(BRACE): 100}}
    return {
        "responses": [responses.chat.completions.create(**request).model_dump() for _ in SEEDS],
        "messages": [messages.chat.completions.create(**request).model_dump() for _ in SEEDS],
        "object": plain.chat.completions.create(**(request | free)).model_dump(),
    }


def small(url: str, name: str) -> dict[str, Any]:
    """Return short answers: an object by a call, by a schema, and the first of a streamed list."""
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    request = HELLO | {"model": name, "temperature": 0, "max_tokens": 60, "max_retries": 0, "response_model": Day}
    tools, schema = (
        instructor.from_openai(plain, mode=mode).chat.completions
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
    )
    return {
        "tools": tools.create(**request).model_dump(),
        "schema": schema.create(**request).model_dump(),
        "iterable": next(iter(tools.create_iterable(**request))).model_dump(),
    }


if __name__ == "__main__":
    url, name, kind = sys.argv[1:]
    if kind == "others":
        print(json.dumps(others(url, name)))
    elif kind == "small":
        print(json.dumps(small(url, name)))
    else:
        print(json.dumps(chat(url, name, instructor.Mode[kind])))
