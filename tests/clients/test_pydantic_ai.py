"""pydantic-ai's agents through three dialects: answers by calls and by schemas, and function calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from tests.clients.process import NEEDED, Served
from tests.clients.weather import City, Day, Report, Weekday

pydantic_ai = pytest.importorskip("pydantic_ai", reason=f"pydantic-ai: {NEEDED}")
anthropic = pytest.importorskip("anthropic", reason=f"anthropic: {NEEDED}")
capabilities, of_openai, of_anthropic, for_openai, for_anthropic = (
    pytest.importorskip(f"pydantic_ai.{name}", reason=f"pydantic-ai: {NEEDED}")
    for name in ("capabilities", "models.openai", "models.anthropic", "providers.openai", "providers.anthropic")
)

pytest_plugins = ["tests.clients.servers"]

DIALECTS = ("chat", "responses", "messages")
QUESTION = "The weather in Bern?"


class FirstWeather(capabilities.AbstractCapability):
    """Require a call of `weather` in the first step and the answer in the second."""

    def get_model_settings(self) -> Any:
        return lambda context: {"tool_choice": ["weather" if context.run_step <= 1 else "final_result"]}


def run_with_model(server: Served, dialect: str, work: Callable[[Any], Awaitable[Any]], name: str = "tiny") -> Any:
    """Run a coroutine with pydantic-ai's model of the server."""

    async def run() -> Any:
        if dialect == "messages":
            async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
                return await work(
                    of_anthropic.AnthropicModel(name, provider=for_anthropic.AnthropicProvider(anthropic_client=client))
                )
        kind = of_openai.OpenAIChatModel if dialect == "chat" else of_openai.OpenAIResponsesModel
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await work(kind(name, provider=for_openai.OpenAIProvider(openai_client=client)))

    return asyncio.run(run())


def agent(model: Any, output: Any, *, max_tokens: int = 700, **options: Any) -> Any:
    """Return an agent without retries and with one call at a time."""
    settings = pydantic_ai.ModelSettings(max_tokens=max_tokens, parallel_tool_calls=False)
    return pydantic_ai.Agent(model, output_type=output, retries=0, model_settings=settings, **options)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_answer_as_a_call(roomy_server: Served, dialect: str) -> None:
    results = run_with_model(roomy_server, dialect, lambda model: _run_three_times(agent(model, Report)))
    for result in results:
        assert isinstance(result.output, Report) and result.usage.requests == 1
        (call,) = result.all_messages()[1].parts
        assert (call.part_kind, call.tool_name) == ("tool-call", "final_result")
        assert result.usage.input_tokens > 0 < result.usage.output_tokens


@pytest.mark.parametrize("dialect", DIALECTS)
def test_answer_is_streamed(roomy_server: Served, dialect: str) -> None:
    async def streamed(model: Any) -> list[Any]:
        async with agent(model, Report).run_stream(QUESTION) as stream:
            return [piece async for piece in stream.stream_output(debounce_by=None)]

    pieces = run_with_model(roomy_server, dialect, streamed)
    assert len(pieces) > 1 and isinstance(pieces[-1], Report)


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_answer_by_a_schema(roomy_server: Served, dialect: str) -> None:
    """For Anthropic's API pydantic-ai uses schemas only with models that it knows."""
    results = run_with_model(
        roomy_server, dialect, lambda model: _run_three_times(agent(model, pydantic_ai.NativeOutput(Report)))
    )
    for result in results:
        (text,) = result.all_messages()[1].parts
        assert Report.model_validate_json(text.content) == result.output


@pytest.mark.parametrize("dialect", DIALECTS)
def test_function_call_and_result(roomy_server: Served, dialect: str) -> None:
    _check_function(roomy_server, dialect, "tiny", 700)


@pytest.mark.model
def test_default_model_calls_a_function(default_server: Served) -> None:
    _check_function(default_server, "chat", "default", 60)


async def _run_three_times(one: Any) -> list[Any]:
    return [await one.run(QUESTION) for _ in range(3)]


def _check_function(server: Served, dialect: str, name: str, max_tokens: int) -> None:
    calls: list[tuple[str, int]] = []

    def weather(city: City, day: Weekday) -> str:
        """Return the weather."""
        calls.append((city, day))
        return "heavy rain"

    def work(model: Any) -> Awaitable[Any]:
        one = agent(model, Day, tools=[weather], capabilities=[FirstWeather()], max_tokens=max_tokens)
        run: Awaitable[Any] = one.run(QUESTION)
        return run

    result = run_with_model(server, dialect, work, name)
    assert isinstance(result.output, Day) and result.usage.requests == 2
    ((city, day),) = calls
    assert len(city) <= 8 and 1 <= day <= 7
    _, called, returned, last, _ = result.all_messages()
    assert json.loads(called.parts[0].args_as_json_str()) == {"city": city, "day": day}
    assert returned.parts[0].content == "heavy rain"
    assert last.usage.input_tokens > called.usage.input_tokens, "the prompt contains the result"
