"""smolagents' tool-calling agent: required calls are made, and their results are part of the next prompt."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from tests.clients.process import NEEDED, Served

smolagents = pytest.importorskip("smolagents", reason=f"smolagents: {NEEDED}")

pytest_plugins = ["tests.clients.servers"]

STEPS = 2
"""Maximal steps; then the agent asks for an answer without functions."""


@pytest.mark.parametrize("streams", [False, True])
def test_steps_with_calls(roomy_server: Served, streams: bool) -> None:
    """The model chooses between `weather` and the agent's `final_answer`."""
    days: list[Any] = []

    def weather(day: int) -> str:
        """Return the weather.

        Args:
            day: the day
        """
        days.append(day)
        return f"rain on {day}"

    runs = [steps_of(roomy_server, weather, seed, streams) for seed in range(4)]
    assert days and all(isinstance(day, int) for day in days)
    observations = "".join(str(step.observations) for steps in runs for step in steps)
    assert any(f"rain on {day}" in observations for day in days)
    sizes = [[step.token_usage.input_tokens for step in steps[:STEPS]] for steps in runs]
    assert max(map(len, sizes)) > 1
    assert all(one == sorted(set(one)) for one in sizes), "the prompt grows by the results"


def steps_of(server: Served, function: Any, seed: int, streams: bool) -> list[Any]:
    """Return the steps of a run that used the model."""
    place = {"api_base": f"{server.url}/v1", "api_key": "none", "client_kwargs": {"max_retries": 0}}
    model = smolagents.OpenAIModel("tiny", **place, max_tokens=300, seed=seed)
    with closing(model.client):
        tools = [smolagents.tool(function)]
        agent = smolagents.ToolCallingAgent(tools, model, max_steps=STEPS, verbosity_level=0, stream_outputs=streams)
        agent.run("x")
    steps: list[Any] = agent.memory.steps
    return [step for step in steps if isinstance(step, smolagents.ActionStep) and step.token_usage is not None]
