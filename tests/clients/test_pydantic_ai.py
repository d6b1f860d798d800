"""pydantic-ai's agents on three of our dialects: answers by calls and by schemas, functions that are really called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.process import NEEDED, Served

pydantic_ai = pytest.importorskip("pydantic_ai", reason=f"pydantic-ai: {NEEDED}")
anthropic = pytest.importorskip("anthropic", reason=f"anthropic: {NEEDED}")
capabilities, of_openai, of_anthropic, for_openai, for_anthropic = (
    pytest.importorskip(f"pydantic_ai.{name}", reason=f"pydantic-ai: {NEEDED}")
    for name in ("capabilities", "models.openai", "models.anthropic", "providers.openai", "providers.anthropic")
)

pytest_plugins = ["tests.clients.servers"]

DIALECTS = ("chat", "responses", "messages")
QUESTION = "The weather in Bern?"


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


class FirstWeather(capabilities.AbstractCapability):
    """Have the model call `weather` first and give its answer then."""

    def get_model_settings(self) -> Any:
        """Return what decides on each step."""
        return lambda context: {"tool_choice": ["weather" if context.run_step <= 1 else "final_result"]}


def asked(server: Served, dialect: str, work: Callable[[Any], Awaitable[Any]], name: str = "tiny") -> Any:
    """Run something with pydantic-ai's model of our server."""

    async def run() -> Any:
        if dialect == "messages":
            async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as theirs:
                return await work(
                    of_anthropic.AnthropicModel(name, provider=for_anthropic.AnthropicProvider(anthropic_client=theirs))
                )
        kind = of_openai.OpenAIChatModel if dialect == "chat" else of_openai.OpenAIResponsesModel
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ours:
            return await work(kind(name, provider=for_openai.OpenAIProvider(openai_client=ours)))

    return asyncio.run(run())


def agent(model: Any, output: Any, *, max_tokens: int = 700, **options: Any) -> Any:
    """Return an agent that asks nothing twice, and for one call at a time."""
    settings = pydantic_ai.ModelSettings(max_tokens=max_tokens, parallel_tool_calls=False)
    return pydantic_ai.Agent(model, output_type=output, retries=0, model_settings=settings, **options)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_answer_that_is_a_call(roomy_server: Served, dialect: str) -> None:
    results = asked(roomy_server, dialect, lambda model: _several(agent(model, Report)))
    for result in results:
        assert isinstance(result.output, Report) and result.usage.requests == 1
        (call,) = result.all_messages()[1].parts
        assert (call.part_kind, call.tool_name) == ("tool-call", "final_result")
        assert result.usage.input_tokens > 0 < result.usage.output_tokens


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_answer_comes_in_pieces(roomy_server: Served, dialect: str) -> None:
    async def streamed(model: Any) -> list[Any]:
        async with agent(model, Report).run_stream(QUESTION) as stream:
            return [piece async for piece in stream.stream_output(debounce_by=None)]

    pieces = asked(roomy_server, dialect, streamed)
    assert len(pieces) > 1 and isinstance(pieces[-1], Report)


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_an_answer_that_keeps_to_a_schema(roomy_server: Served, dialect: str) -> None:
    """pydantic-ai asks no model of Anthropic's API for one that it does not know by name."""
    results = asked(roomy_server, dialect, lambda model: _several(agent(model, pydantic_ai.NativeOutput(Report))))
    for result in results:
        (text,) = result.all_messages()[1].parts
        assert Report.model_validate_json(text.content) == result.output


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_function_is_called_and_its_result_is_read(roomy_server: Served, dialect: str) -> None:
    _check_function(roomy_server, dialect, "tiny", 700)


@pytest.mark.model
def test_the_default_model_calls_a_function(default_server: Served) -> None:
    _check_function(default_server, "chat", "default", 60)


def test_one_of_several_answers(roomy_server: Served) -> None:
    results = asked(roomy_server, "chat", lambda model: _several(agent(model, [Day, Report])))
    assert all(isinstance(result.output, Day | Report) for result in results)


async def _several(one: Any) -> list[Any]:
    return [await one.run(QUESTION) for _ in range(3)]


def _check_function(server: Served, dialect: str, name: str, max_tokens: int) -> None:
    calls: list[tuple[str, int]] = []

    def weather(city: Annotated[str, Field(max_length=8)], day: Annotated[int, Field(ge=1, le=7)]) -> str:
        """Tell the weather."""
        calls.append((city, day))
        return "heavy rain"

    def work(model: Any) -> Awaitable[Any]:
        one = agent(model, Day, tools=[weather], capabilities=[FirstWeather()], max_tokens=max_tokens)
        run: Awaitable[Any] = one.run(QUESTION)
        return run

    result = asked(server, dialect, work, name)
    assert isinstance(result.output, Day) and result.usage.requests == 2
    ((city, day),) = calls
    assert len(city) <= 8 and 1 <= day <= 7
    _, called, returned, last, _ = result.all_messages()
    assert json.loads(called.parts[0].args_as_json_str()) == {"city": city, "day": day}
    assert returned.parts[0].content == "heavy rain"
    assert last.usage.input_tokens > called.usage.input_tokens, "the result is read"
