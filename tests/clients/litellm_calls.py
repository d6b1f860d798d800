"""Calls a server with litellm and prints the results as JSON. Argument: URL. Runs in litellm's virtual environment."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm


def main(url: str) -> dict[str, Any]:
    """Return the result of every kind of call."""
    place: Any = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 12, "max_retries": 0}
    chat = place | {"model": "openai/tiny", "messages": [{"role": "user", "content": "hello"}]}
    whole = litellm.completion(**chat)
    text = litellm.text_completion(**place, model="text-completion-openai/tiny", prompt="once")
    return {
        "whole": whole.choices[0].message.content,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "finish_reason": whole.choices[0].finish_reason,
        "streamed": joined(litellm.completion(**chat, stream=True)),
        "asynchronous": asyncio.run(litellm.acompletion(**chat)).choices[0].message.content,
        "asynchronously_streamed": asyncio.run(streamed(chat)),
        "text": text.choices[0].text,
        "bad_field": refusal(chat | {"temperature": 7}),
        "bad_model": refusal(chat | {"model": "openai/other"}),
    }


def joined(chunks: Any) -> str:
    """Return the text of a stream."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def streamed(chat: Any) -> str:
    return joined([chunk async for chunk in await litellm.acompletion(**chat, stream=True)])


def refusal(call: Any) -> list[str]:
    """Return the class name and the text of the error that a call raises."""
    try:
        litellm.completion(**call)
    except litellm.exceptions.APIError as error:
        return ["APIError", str(error)]
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    print(json.dumps(main(sys.argv[1])))
