"""Recipes of docs/clients.md as they are printed: Python, and the settings of `llm` and `ollama`.

The tests of the other clients use their recipes (`recipes.py`).
"""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.clients.process import NEEDED, Served, program, succeed
from tests.clients.recipes import snippets, value

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def answer(tiny_server: Served) -> str:
    """The server's answer to `ASKED`."""
    return str(tiny_server.ask("/v1/chat/completions", ASKED)["choices"][0]["message"]["content"])


def made(client: str, server: Served, *places: str) -> Any:
    """Return the value of a client's first recipe; `places` are `module.name`s that it uses."""
    names = {}
    for place in places:
        module, _, name = place.rpartition(".")
        names[name] = getattr(pytest.importorskip(module, reason=f"{client}: {NEEDED}"), name)
    return value(snippets(client, server.url, "tiny")[0], names)


def test_openai(tiny_server: Served, answer: str) -> None:
    with made("openai", tiny_server, "openai.OpenAI") as client:
        assert client.chat.completions.create(model="tiny", **ASKED).choices[0].message.content == answer


def test_anthropic(tiny_server: Served, answer: str) -> None:
    with made("anthropic", tiny_server, "anthropic.Anthropic") as client:
        message = client.messages.create(model="tiny", messages=HELLO, max_tokens=8, extra_body={"temperature": 0})
        assert message.content[0].text == answer


def test_langchain(tiny_server: Served, answer: str) -> None:
    chat = made("langchain", tiny_server, "langchain_openai.ChatOpenAI")
    assert chat.bind(temperature=0, max_tokens=8).invoke("hi").content == answer


def test_pydantic_ai(tiny_server: Served, answer: str) -> None:
    places = ("pydantic_ai.models.openai.OpenAIChatModel", "pydantic_ai.providers.openai.OpenAIProvider")
    model = made("pydantic-ai", tiny_server, *places)
    agent = importlib.import_module("pydantic_ai").Agent(model, model_settings={"temperature": 0, "max_tokens": 8})

    async def run() -> Any:
        async with model.client:  # a client that is left open is reported in a later test
            return await agent.run("hi")

    assert asyncio.run(run()).output == answer


def test_openai_agents(tiny_server: Served, answer: str) -> None:
    agents = pytest.importorskip("agents", reason=f"openai-agents: {NEEDED}")
    openai = importlib.import_module("openai")
    clients: list[Any] = []

    def make_client(**options: Any) -> Any:
        clients.append(openai.AsyncOpenAI(**options))
        return clients[0]

    names = {"OpenAIChatCompletionsModel": agents.OpenAIChatCompletionsModel, "AsyncOpenAI": make_client}
    model = value(snippets("openai-agents", tiny_server.url, "tiny")[0], names)
    settings = agents.ModelSettings(temperature=0, max_tokens=8)
    agent = agents.Agent(name="a", model=model, model_settings=settings)
    agents.set_tracing_disabled(True)

    async def run() -> Any:
        async with clients[0]:
            return await agents.Runner.run(agent, "hi")

    assert asyncio.run(run()).final_output == answer


def test_smolagents(tiny_server: Served, answer: str) -> None:
    model = made("smolagents", tiny_server, "smolagents.OpenAIServerModel")
    assert model.generate(HELLO, temperature=0, max_tokens=8).content == answer


@pytest.mark.parametrize(
    ("client", "code", "text"),
    [
        ("litellm", "from litellm import completion\nreply = RECIPE", "reply.choices[0].message.content"),
        (
            "instructor",
            "import instructor\nfrom openai import OpenAI\nreply = RECIPE.chat.completions.create(response_model=None, "
            f"model='tiny', **{ASKED!r})",
            "reply.choices[0].message.content",
        ),
    ],
)
def test_recipe_in_an_environment_of_its_own(
    tiny_server: Served, answer: str, tmp_path: Path, client: str, code: str, text: str
) -> None:
    python = Path(program("python")).parent.parent / client / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{client}: {NEEDED}")
    recipe = snippets(client, tiny_server.url, "tiny")[0]
    recipe = recipe.replace("messages=…", f"**{ASKED!r}")
    printed = succeed([str(python), "-c", f"{code.replace('RECIPE', recipe)}\nprint(repr({text}))"], tmp_path)
    assert printed.decode().splitlines()[-1] == repr(answer)


def test_llm(tiny_server: Served, answer: str, tmp_path: Path) -> None:
    pytest.importorskip("llm", reason=f"llm: {NEEDED}")
    name, *fields = snippets("llm", tiny_server.url, "tiny")
    (tmp_path / name).write_text("- " + "\n  ".join(fields) + "\n")
    asked = ("-o", "temperature", "0", "-o", "max_tokens", "8", "--key", "none")
    printed = succeed([program("llm"), "-m", "local", "hi", *asked], tmp_path, LLM_USER_PATH=str(tmp_path))
    assert printed.decode() == answer + "\n"


def test_ollama(tiny_server: Served, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ollama = pytest.importorskip("ollama", reason=f"ollama: {NEEDED}")
    name, _, url = snippets("ollama", tiny_server.url, "tiny")[0].partition("=")
    monkeypatch.setenv(name, url)
    options = {"temperature": 0, "num_predict": 8}
    with ollama.Client() as client:
        assert client.chat(model="tiny", messages=HELLO, options=options).message.content == answer
