"""smolagents' agent that calls functions: what it requires is called, and its steps are read back."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from tests.clients.process import NEEDED, Served

smolagents = pytest.importorskip("smolagents", reason=f"smolagents: {NEEDED}")

pytest_plugins = ["tests.clients.servers"]


@pytest.mark.parametrize("streams", [False, True])
def test_steps_of_calls(roomy_server: Served, streams: bool) -> None:
    """Which function is called is the model's affair: `weather`, or the agent's own `final_answer`."""
    days: list[Any] = []
    sizes: list[list[int]] = []
    num_days = 0

    def weather(day: int) -> str:
        """Tell it.

        Args:
            day: the day
        """
        days.append(day)
        return f"rain on {day}"

    for seed in range(4):
        steps = steps_of(roomy_server, weather, seed, streams)
        called = [call for step in steps for call in step.tool_calls or ()]
        assert called and {call.name for call in called} <= {"weather", "final_answer"}
        told = "".join(str(step.observations) for step in steps)
        # a step that has `final_answer` among its calls is refused by the agent as a whole
        wanted = [call.arguments["day"] for call in called if call.name == "weather"]
        assert all(day in days and f"rain on {day}" in told for day in wanted)
        assert all(isinstance(day, int) for day in days)
        num_days += len(days)
        days.clear()
        sizes.append([step.token_usage.input_tokens for step in steps])
    assert num_days and max(map(len, sizes)) > 1
    assert all(one == sorted(set(one)) for one in sizes), "what came back is read in the next step"


def steps_of(server: Served, function: Any, seed: int, streams: bool) -> list[Any]:
    """Return the steps of a run in which the model wrote."""
    place = {"api_base": f"{server.url}/v1", "api_key": "none", "client_kwargs": {"max_retries": 0}}
    model = smolagents.OpenAIModel("tiny", **place, max_tokens=300, seed=seed)
    with closing(model.client):
        tools = [smolagents.tool(function)]
        agent = smolagents.ToolCallingAgent(tools, model, max_steps=2, verbosity_level=0, stream_outputs=streams)
        agent.run("x")
    steps: list[Any] = agent.memory.steps
    return [step for step in steps if isinstance(step, smolagents.ActionStep) and step.token_usage is not None]
