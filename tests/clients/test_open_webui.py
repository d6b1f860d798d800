"""Open WebUI without its pages: both kinds of connection, by its own API. `make test-open-webui` installs it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.clients.process import PATIENCE, Served, offline, serving

PROGRAM = Path(sys.prefix) / "open-webui" / "bin" / "open-webui"
pytestmark = pytest.mark.skipif(
    not PROGRAM.exists(), reason="Open WebUI: not installed; `make test-open-webui` installs it (3 GB)"
)

CONTEXT = 65536
"""A chat's tools have 21,000 bytes, which are tokens of the scripted model."""
ANSWER = "It is late."
TOOL = "get_current_timestamp"
HELLO = [{"role": "user", "content": "What time is it?"}]
OWN = {"OPENAI": "scripted", "OLLAMA": "scripted:latest"}
"""Open WebUI's kind of connection -> its name of the model."""
NUM_REQUESTS = 5
"""Of one chat: the call, the answer, and then follow-up questions, title and tags."""
JSON = dict[str, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model asks Open WebUI for the time."""
    from tests.server.scripted import make_scripted  # imports Transformers

    home = tmp_path_factory.mktemp("scripted")
    make_scripted(home, TOOL, {}, ANSWER, CONTEXT)
    options = ("--served-model-name", "scripted", "--max-model-len", str(CONTEXT), "--kv-cache-bytes", "16777216")
    with serving(home, *options, "--num-threads", "1", "--device", "cpu") as one:
        yield one


@pytest.fixture(scope="module")
def webui(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """A client of Open WebUI, signed in as its first user."""
    home = tmp_path_factory.mktemp("open_webui")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    settings = {
        **{name: str(home) for name in ("HOME", "DATA_DIR")},
        **dict.fromkeys(("OPENAI_API_BASE_URL", "OPENAI_API_BASE_URLS"), f"{served.url}/v1"),
        **dict.fromkeys(("OLLAMA_BASE_URL", "OLLAMA_BASE_URLS"), served.url),
        **dict.fromkeys(("ENABLE_OLLAMA_API", "ENABLE_OPENAI_API", "OFFLINE_MODE"), "true"),
        **dict.fromkeys(("BYPASS_EMBEDDING_AND_RETRIEVAL", "DO_NOT_TRACK", "SCARF_NO_ANALYTICS"), "true"),
        "OPENAI_API_KEY": "none",
        "RAG_EMBEDDING_ENGINE": "openai",
        "ENABLE_VERSION_UPDATE_CHECK": "false",
        "WEBUI_SECRET_KEY": "0123456789abcdef" * 2,
    }
    log = home / "log.txt"
    command = [str(PROGRAM), "serve", "--host", "127.0.0.1", "--port", port]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=home, env=offline(home) | settings, stdout=out, stderr=out)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            wait_for(client, process, log)
            user = {"name": "user", "email": "user@example.org", "password": "Passw0rd!"}
            token = client.post("/api/v1/auths/signup", json=user).raise_for_status().json()["token"]
            client.headers["authorization"] = f"Bearer {token}"
            assert client.get("/api/models").status_code == 200, "it finds the models when it lists them"
            yield client
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def wait_for(client: httpx2.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when Open WebUI answers."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"Open WebUI did not start:\n{log.read_text()[-4000:]}")


def post(webui: httpx2.Client, path: str, body: JSON) -> Any:
    """POST JSON and return the JSON of the reply."""
    reply = webui.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_open_webui_lists_the_models_of_both_connections(webui: httpx2.Client) -> None:
    models = webui.get("/api/models").json()["data"]
    assert [(one["id"], one["owned_by"]) for one in models] == [("scripted", "openai"), ("scripted:latest", "ollama")]
    assert webui.get("/ollama/api/version").json()["version"]
    assert [one["model"] for one in webui.get("/ollama/api/tags").json()["models"]] == ["scripted:latest"]
    assert [one["model"] for one in webui.get("/ollama/api/ps").json()["models"]] == ["scripted:latest"]
    assert "tools" in post(webui, "/ollama/api/show", {"model": "scripted:latest"})["capabilities"]


@pytest.mark.parametrize("model", OWN.values())
def test_open_webui_answers_by_its_api(webui: httpx2.Client, model: str) -> None:
    body = {"model": model, "messages": HELLO, "params": {"num_ctx": 2048, "temperature": 0.5, "keep_alive": "5m"}}
    whole = post(webui, "/api/chat/completions", {**body, "stream": False})
    assert whole["choices"][0]["message"]["content"] == ANSWER and whole["usage"]["completion_tokens"] == 2
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    text = webui.post("/api/chat/completions", json=streamed).text
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(one) for one in data if one != "[DONE]"]
    parts = [choice["delta"].get("content") or "" for one in chunks for choice in one["choices"]]
    assert "".join(parts) == ANSWER and chunks[-1]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("model", OWN.values())
def test_a_chat_of_its_page_calls_a_tool_and_names_itself(webui: httpx2.Client, served: Served, model: str) -> None:
    chat, answer = new_chat(webui, model)
    tasks = dict.fromkeys(("title_generation", "tags_generation", "follow_up_generation"), True)
    body = {
        **{"model": model, "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}},
        **{"params": {}, "tool_servers": [], "features": {"web_search": False, "code_interpreter": False}},
        **{"chat_id": chat, "id": answer, "session_id": "no-socket", "background_tasks": tasks},
    }
    num_before = len(served.answers())
    assert post(webui, "/api/chat/completions", body)["status"] is True
    stored = wait_for_answer(webui, chat, answer)
    calls = [one for one in stored["output"] if one["type"] == "function_call"]
    assert [one["name"] for one in calls] == [TOOL] and ANSWER in stored["content"]
    assert not stored.get("error") and stored["usage"]["output_tokens"] > 0
    path = "/api/chat" if ":" in model else "/v1/chat/completions"
    assert requests_after(served, num_before, NUM_REQUESTS) == [(path, 200)] * NUM_REQUESTS


def requests_after(served: Served, num_before: int, count: int) -> list[tuple[str, int]]:
    """Return paths and statuses of requests once the server has logged so many."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = [(one["path"], one["status"]) for one in served.answers()[num_before:] if one.get("path")]
        if len(found) >= count:
            break
        time.sleep(0.2)
    return found


def new_chat(webui: httpx2.Client, model: str) -> tuple[str, str]:
    """Store a chat as the page does; return its id and that of the empty answer."""
    asked, answer = str(uuid.uuid4()), str(uuid.uuid4())
    common = {"models": [model], "timestamp": int(time.time())}
    question = {**common, **HELLO[0], "id": asked, "parentId": None, "childrenIds": [answer]}
    empty = {**common, "id": answer, "parentId": asked, "childrenIds": [], "role": "assistant", "content": ""}
    history = {"messages": {asked: question, answer: {**empty, "model": model}}, "currentId": answer}
    chat = {"id": "", "title": "New Chat", "models": [model], "history": history, "messages": [], "tags": []}
    return str(post(webui, "/api/v1/chats/new", {"chat": chat})["id"]), answer


def wait_for_answer(webui: httpx2.Client, chat: str, answer: str) -> JSON:
    """Return the stored answer once it is complete and the chat has a title, which is made after it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        got = webui.get(f"/api/v1/chats/{chat}").raise_for_status().json()
        stored: JSON = got["chat"]["history"]["messages"][answer]
        if stored.get("done") and got["title"] != "New Chat":
            return stored
        time.sleep(0.2)
    raise AssertionError(f"no answer: {stored}")


@pytest.mark.parametrize("model", OWN.values())
def test_open_webui_shows_the_servers_refusal(webui: httpx2.Client, model: str) -> None:
    body = {"model": model, "messages": HELLO, "stream": False, "params": {"mirostat": 2}}
    reply = webui.post("/api/chat/completions", json=body)
    assert reply.status_code == 400 and "mirostat" in reply.text and "not supported" in reply.text
