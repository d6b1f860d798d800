"""An environment of verifiers with a tool: additions, and a harness that answers the model's calls of `plus`.

verifiers imports it by its name, as a taskset and as a harness.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["Additions", "Calculator"]

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "plus",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
MOST_TURNS = 4


class Addition(vf.TaskData):
    """A question and the number that its answer must have."""

    total: str


class AdditionTask(vf.Task[Addition]):
    """Rewards an answer with the total, and counts the tool's results."""

    @vf.reward
    async def is_right(self, task: Addition, trace: vf.Trace) -> float:
        reply = trace.nodes[-1].message
        return float(reply.role == "assistant" and task.total in str(reply.content))

    @vf.metric
    async def num_tool_results(self, trace: vf.Trace) -> float:
        return float(sum(node.message.role == "tool" for node in trace.nodes))


class Additions(vf.Taskset[AdditionTask, vf.TasksetConfig]):
    """One task."""

    def load(self) -> Iterable[AdditionTask]:
        yield AdditionTask(Addition(prompt="2+3?", total="5"), self.config.task)


class Calculator(vf.Harness[vf.HarnessConfig]):
    """A chat loop in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask the model until it calls no tool."""
        messages: list[Any] = [message_to_wire(vf.UserMessage(content=str(data.prompt)))]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(MOST_TURNS):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, tools=TOOLS)
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                messages += [
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "content": str(sum(json.loads(arguments_of(call)).values())),
                    }
                    for call in message.tool_calls
                ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def arguments_of(call: Any) -> str:
    """Return the JSON text of a call's arguments."""
    text: str = call.function.arguments
    return text
