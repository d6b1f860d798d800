"""OpenAI's agents through chat completions and Responses: functions, structured answers, and both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from tests.clients.process import NEEDED, Served
from tests.clients.weather import City, Day, Weekday

agents = pytest.importorskip("agents", reason=f"openai-agents: {NEEDED}")

pytest_plugins = ["tests.clients.servers"]

MODELS = ("OpenAIChatCompletionsModel", "OpenAIResponsesModel")
TURNS = 10


@pytest.fixture(autouse=True)
def no_traces() -> None:
    """Disable the upload of traces."""
    agents.set_tracing_disabled(True)


def run_with_model(server: Served, kind: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """Run a coroutine with an agents model of the server."""

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await work(getattr(agents, kind)(model="tiny", openai_client=client))

    return asyncio.run(run())


def agent(model: Any, calls: list[tuple[str, int]] | None, output: Any, **options: Any) -> Any:
    """Return an agent; if `calls` is a list, the agent must call a function first, which appends to it."""

    def weather(city: City, day: Weekday) -> str:
        """Return the weather."""
        assert calls is not None
        calls.append((city, day))
        return "heavy rain"

    settings = {"max_tokens": 500, "extra_body": {"seed": 1}} | (
        {} if calls is None else {"tool_choice": "required", "parallel_tool_calls": False}
    )
    return agents.Agent(
        name="weather man",
        instructions="be brief",
        model=model,
        model_settings=agents.ModelSettings(**settings),
        tools=[] if calls is None else [agents.function_tool(weather)],
        output_type=output,
        **options,
    )


async def whole_and_streamed(make: Callable[[], Any]) -> list[Any]:
    """Return the results of a whole and of a streamed run."""
    whole = await agents.Runner.run(make(), "Bern?", max_turns=TURNS)
    streamed = agents.Runner.run_streamed(make(), "Bern?", max_turns=TURNS)
    kinds = [event.type async for event in streamed.stream_events()]
    assert kinds.count("raw_response_event") > 4
    return [whole, streamed]


def check_calls(calls: list[tuple[str, int]]) -> None:
    assert len(calls) >= 2, "at least one per run; after the first the model chooses"
    assert all(len(city) <= 8 and 1 <= day <= 7 for city, day in calls)


@pytest.mark.parametrize("kind", MODELS)
def test_structured_answer(roomy_server: Served, kind: str) -> None:
    for result in run_with_model(roomy_server, kind, lambda model: whole_and_streamed(lambda: agent(model, None, Day))):
        assert isinstance(result.final_output, Day)


@pytest.mark.parametrize("kind", MODELS)
def test_function_call(roomy_server: Served, kind: str) -> None:
    calls: list[tuple[str, int]] = []

    def make(model: Any) -> Any:
        return agent(model, calls, str, tool_use_behavior="stop_on_first_tool")

    for result in run_with_model(roomy_server, kind, lambda model: whole_and_streamed(lambda: make(model))):
        assert result.final_output == "heavy rain"
    check_calls(calls)


@pytest.mark.parametrize("kind", MODELS)
def test_function_call_then_structured_answer(roomy_server: Served, kind: str) -> None:
    """The answer's format is sent in every step, also in the first, where a call is required."""
    calls: list[tuple[str, int]] = []
    for result in run_with_model(
        roomy_server, kind, lambda model: whole_and_streamed(lambda: agent(model, calls, Day))
    ):
        assert isinstance(result.final_output, Day)
        assert [item.type for item in result.new_items][:2] == ["tool_call_item", "tool_call_output_item"]
    check_calls(calls)
