"""`serve --further-model`: several models behind one URL, each in its own process.

One server: each test asks first for the model that the one before leaves loaded, because a load takes two seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from nano_inference.cli import main
from tests.server.served import PATIENCE, Process
from tests.server.tiny import make_tiny

pytestmark = pytest.mark.slow

LOADED = r"(\w+) accepts requests at \S+, process (\d+), after [\d.]+ s, \d+ MiB"
KEY = "a-key-for-tests"
OPTIONS = ("--port", "0", "--num-threads", "1", "--kv-cache-bytes", "8MiB")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two working models of different context and a directory without weights."""
    root = tmp_path_factory.mktemp("several")
    broken = make_tiny(root / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    return {"one": make_tiny(root / "one"), "two": make_tiny(root / "two", positions=256), "broken": broken}


@pytest.fixture(scope="module")
def server(directories: dict[str, Path]) -> Iterator[tuple[Process, str]]:
    """A server that has at most one of its models in memory."""
    arguments = ["--model", str(directories["one"]), "--max-loaded-models", "1", *OPTIONS]
    for name in ("two", "broken"):
        arguments += ["--further-model", f"{name}={directories[name]}"]
    process = Process([*arguments, "--api-key", KEY], {})
    try:
        (listening,) = process.wait_for(r"^listening on (\S+), loading one")
        process.wait_for(r"^ready: one; loaded when a request names them: two, broken")
        yield process, listening[1]
    finally:
        assert process.end() == 0
    pids = [int(match[2]) for match in process.wait_for(LOADED)]
    assert pids and not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "a model's process was left behind"


@pytest.fixture(scope="module")
def client(server: tuple[Process, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[1]}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE) as one:
        yield one


@pytest.fixture
def http(server: tuple[Process, str]) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx2.Client(base_url=server[1], headers=headers, timeout=PATIENCE) as one:
        yield one


def ask(client: openai.OpenAI, model: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": "hello"}]
    return client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0, **options)


def states(http: httpx2.Client) -> dict[str, str]:
    return {one["id"]: one["status"]["value"] for one in http.get("/v1/models").json()["data"]}


def test_an_unknown_model_is_refused_and_unloads_nothing(client: openai.OpenAI, http: httpx2.Client) -> None:
    ask(client, "one")
    with pytest.raises(openai.NotFoundError, match="'three' does not exist; served: one, two, broken"):
        ask(client, "three")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("three")
    no_json = http.post("/v1/completions", content=b"{no json", headers={"content-type": "application/json"})
    assert no_json.status_code == 400
    assert states(http)["one"] == "loaded"


def test_without_a_key_nothing_is_loaded_named_or_unloaded(server: tuple[Process, str], http: httpx2.Client) -> None:
    assert http.post("/models/load", json={"model": "one"}).status_code == 200
    for path in ("/v1/models", "/v1/models/two?load=true", "/info?model=two", "/api/tags"):
        assert httpx2.get(server[1] + path, timeout=60).status_code == 401
    assert httpx2.post(f"{server[1]}/models/unload", json={"model": "one"}, timeout=60).status_code == 401
    for path in ("/", "/dashboard", "/docs", "/formulas.js", "/health"):
        reply = httpx2.get(f"{server[1]}{path}?model=two", timeout=60)
        assert reply.status_code == 200 and "broken" not in reply.text
    assert states(http)["one"] == "loaded"
    assert httpx2.get(f"{server[1]}/health", timeout=60).json()["models"]["loaded"] == 1


@pytest.mark.parametrize("body", [b"", b"{}", b'{"model": 5}', b"[]"])
def test_switching_needs_the_name_of_a_model(http: httpx2.Client, body: bytes) -> None:
    for path in ("/models/load", "/models/unload"):
        reply = http.post(path, content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "model"


def test_a_killed_model_is_loaded_again_by_the_next_request(server: tuple[Process, str], client: openai.OpenAI) -> None:
    ask(client, "one")
    pid = int(server[0].wait_for(LOADED)[-1][2])
    os.kill(pid, signal.SIGKILL)
    assert ask(client, "one").model == "one"
    server[0].wait_for("one ended with code -9")


def test_a_key_loads_a_model_with_any_method(http: httpx2.Client) -> None:
    """A page of another site cannot send this server's key."""
    assert http.post("/models/load", json={"model": "one"}).status_code == 200
    assert http.get("/info?model=two").status_code == 200
    assert states(http)["two"] == "loaded"


def test_lists_name_all_models_and_their_states(client: openai.OpenAI, http: httpx2.Client) -> None:
    ask(client, "two")
    cards = {card.id: card for card in client.models.list()}
    assert list(cards) == ["one", "two", "broken"]
    assert {name: dict(card)["status"]["value"] for name, card in cards.items()}["two"] == "loaded"
    assert dict(client.models.retrieve("two"))["max_model_len"] == 256
    tags = [one["name"] for one in http.get("/api/tags").json()["models"]]
    assert sorted(tags) == ["broken:latest", "one:latest", "two:latest"]
    assert [one["name"] for one in http.get("/api/ps").json()["models"]] == ["two:latest"]
    metrics = http.get("/metrics").text
    assert 'nano_inference_model_loaded{model_name="two"} 1.0' in metrics
    assert 'nano_inference_model_loaded{model_name="one"} 0.0' in metrics
    assert re.search(r'^vllm:num_requests_running\{.*model_name="two".*\} 0', metrics, re.MULTILINE)
    assert http.get("/info", params={"model": "two"}).json()["context"] == 256
    assert http.get("/tokenizer_info").status_code in (200, 404)
    assert states(http)["two"] == "loaded", "no list loads a model"


def test_a_client_that_leaves_does_not_stop_others(server: tuple[Process, str], client: openai.OpenAI) -> None:
    url, headers = server[1], {"authorization": f"Bearer {KEY}"}
    body = {"model": "two", "prompt": "x", "max_tokens": 240, "ignore_eos": True}
    for _ in range(3):
        leaving = HTTPConnection(url.removeprefix("http://"))
        leaving.request("POST", "/v1/completions", json.dumps(body), {**headers, "content-type": "application/json"})
        leaving.close()  # without waiting for the answer
    assert ask(client, "two").model == "two"
    states_of = httpx2.get(f"{url}/info", headers=headers, timeout=PATIENCE).json()["models"]
    assert [one["open"] + one["waiting"] for one in states_of if one["id"] != "two"] == [0, 0]


def test_a_stored_response_is_found_without_naming_its_model(client: openai.OpenAI) -> None:
    made = client.responses.create(model="two", input="hello", max_output_tokens=16)
    assert client.responses.retrieve(made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_unknown")


def test_the_field_model_chooses_the_model_which_is_loaded_for_it(client: openai.OpenAI, http: httpx2.Client) -> None:
    whole = ask(client, "two")
    assert whole.model == "two" and states(http) == {"one": "unloaded", "two": "loaded", "broken": "unloaded"}
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, "two", stream=True))
    assert streamed == whole.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="256"):
        client.completions.create(model="two", prompt="x" * 400)
    client.completions.create(model="one", prompt="x" * 400, max_tokens=1)  # its context is longer
    assert states(http)["two"] == "unloaded"
    assert http.post("/generate", json={"text": "hi", "sampling_params": {"max_new_tokens": 1}}).status_code == 200
    assert states(http)["one"] == "loaded", "a request without a model is for the first"


def test_the_terminal_chat_chooses_a_model_with_a_command(server: tuple[Process, str]) -> None:
    """The first model is the default; another one is loaded by /model, with its own context and defaults."""
    command = [sys.executable, "-m", "nano_inference", "chat", "--server", server[1], "--max-tokens", "4", "--quiet"]
    typed = "/model\nhello\n/model two\nhello\n/model three\n/model broken\n"
    options: Any = {"env": {**os.environ, "NANO_INFERENCE_API_KEY": KEY}, "timeout": PATIENCE, "check": False}
    ended = subprocess.run(command, input=typed, capture_output=True, text=True, **options)
    shown = re.findall(r"^(?:model|context) +(\S+)", ended.stderr, re.MULTILINE)
    assert shown == ["one", "512", "two", "256"], ended.stderr
    assert "models   one, two, broken" in ended.stderr
    assert "/model must be followed by one of the server's models: one, two, broken" in ended.stderr
    assert "the model broken could not be loaded" in ended.stderr
    assert len(server[0].wait_for(r'"path":"/v1/chat/completions","status":200')) >= 2


def test_a_damaged_model_is_one_error_and_the_others_are_unaffected(client: openai.OpenAI, http: httpx2.Client) -> None:
    with pytest.raises(openai.InternalServerError, match="the model broken could not be loaded") as caught:
        ask(client, "broken")
    assert caught.value.status_code == 503 and caught.value.code == "model_not_loaded"
    assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value.body)
    assert states(http)["broken"] == "failed"
    assert ask(client, "two").choices[0].finish_reason in ("length", "stop")


def test_ollamas_names_choose_models_with_and_without_a_tag(http: httpx2.Client) -> None:
    options = {"num_predict": 4, "temperature": 0}
    bodies = [{"model": name, "prompt": "hi", "options": options, "stream": False} for name in ("two", "two:latest")]
    assert [http.post("/api/generate", json=body).json()["model"] for body in bodies] == ["two", "two:latest"]
    assert http.post("/api/show", json={"name": "two"}).json()["model_info"]["LlamaForCausalLM.context_length"] == 256


def test_streams_end_before_their_model_is_unloaded(server: tuple[Process, str]) -> None:
    """Eight streams of each model at the same time, with room for one model: all are complete."""

    async def read(client: httpx2.AsyncClient, model: str, index: int) -> str:
        body = {"model": model, "prompt": f"{index}", "max_tokens": 60, "ignore_eos": True, "stream": True}
        return (await client.post("/v1/completions", json=body)).text

    async def main() -> list[str]:
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx2.AsyncClient(base_url=server[1], headers=headers, timeout=PATIENCE) as client:
            return await asyncio.gather(*(read(client, ("two", "one")[n % 2], n) for n in range(16)))

    texts = asyncio.run(main())
    assert all(text.rstrip().endswith("[DONE]") and "error" not in text for text in texts)


def test_models_are_loaded_and_unloaded_by_request(http: httpx2.Client) -> None:
    unloaded = next(name for name in ("one", "two") if states(http)[name] == "unloaded")
    assert http.post("/models/load", json={"model": unloaded}).json()["status"] == {"value": "loaded"}
    assert states(http)[unloaded] == "loaded"
    assert http.post("/models/unload", json={"model": unloaded}).json()["status"] == {"value": "unloaded"}
    assert states(http) | {"broken": ""} == {"one": "unloaded", "two": "unloaded", "broken": ""}
    assert http.post("/models/load", json={"model": "three"}).status_code == 404


QUESTIONS = ("/info", "/props", "/tokenizer_info", "/stats", "/version", "/health_generate", "/api/version")


@pytest.mark.parametrize("headers", [{}, {"origin": "http://evil.example"}])
def test_without_a_key_only_a_post_of_json_loads_a_model(keyless: httpx2.Client, headers: dict[str, str]) -> None:
    """A page of another site can cause every GET, and not every browser sends Sec-Fetch-Site with it."""
    paths = [*(f"{path}?model=two" for path in QUESTIONS), "/v1/models/two?load=true"]
    paths += ["/v1/responses/resp_unknown", *QUESTIONS] if states(keyless)["one"] == "unloaded" else []
    for path in paths:
        for method in ("GET", "HEAD"):
            assert keyless.request(method, path, headers=headers).status_code == 403, (method, path)
    refused = keyless.get(paths[0], headers=headers).json()["error"]
    assert refused["code"] == "load_needs_post" and "/models/load" in refused["message"]
    assert keyless.post("/v1/completions?model=two", content="{}", headers={"content-type": "text/plain"} | headers)
    assert states(keyless)["two"] == "unloaded"
    assert keyless.post("/models/unload", json={"model": "one"}).status_code == 200  # the next case finds none loaded


def test_the_openapi_document_needs_no_loaded_model(keyless: httpx2.Client) -> None:
    assert keyless.post("/models/unload", json={"model": "one"}).status_code == 200
    assert "/v1/completions" in keyless.get("/openapi.json").json()["paths"]
    assert "loaded" not in states(keyless).values()


def test_without_a_key_a_post_loads_what_a_get_then_describes(keyless: httpx2.Client) -> None:
    assert keyless.post("/v1/models/load", json={"model": "two"}).status_code == 200
    assert keyless.get("/info?model=two").json()["context"] == 256


@pytest.fixture(scope="module")
def keyless(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """A server without keys, as it is by default."""
    models = ["--model", str(directories["one"]), "--further-model", f"two={directories['two']}"]
    process = Process([*models, *OPTIONS], {})
    try:
        (listening,) = process.wait_for(r"^listening on (\S+), loading one")
        process.wait_for("^ready: one")
        with httpx2.Client(base_url=listening[1], timeout=PATIENCE) as one:
            yield one
    finally:
        assert process.end() == 0


@pytest.mark.nightly
def test_a_unix_socket_serves_several_models(directories: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "s"
    further = ["--further-model", f"two={directories['two']}", "--uds", str(path)]
    process = Process(["--model", str(directories["one"]), *further, *OPTIONS[2:]], {})
    try:
        process.wait_for(f"^listening on {re.escape(str(path))}, loading one")
        process.wait_for("^ready: one")
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), timeout=PATIENCE) as http:
            listed = [one["id"] for one in http.get("http://localhost/v1/models").json()["data"]]
            body = {"model": "two", "prompt": "x", "max_tokens": 1}
            assert http.post("http://localhost/v1/completions", json=body).json()["model"] == "two"
    finally:
        assert process.end() == 0
    assert listed == ["one", "two"] and not path.exists()


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--further-model", "ONE"], "two models are named one:latest; give one of them as NAME=PATH"),
        (["--further-model", "two="], "--further-model must be a model, or NAME=PATH, got 'two='"),
        (["--further-model", "ONE/missing"], "missing"),
        (["--models-memory", "1GiB"], "--models-memory is for several models: it needs --further-model"),
        (["--further-model", "two=ONE", "--enable-rl"], "--further-model: routes for trainers need a server of one"),
        (["--further-model", "two=ONE", "--workers", "http://127.0.0.1:1"], "--further-model cannot be used with"),
        (["--further-model", "two=ONE", "--chat-template", "chatml"], "--chat-template belongs to one model"),
        (["--further-model", "two=ONE", "--models-memory", "1KiB"], "one: its files have [0-9]+ bytes, more than"),
    ],
)
def test_settings_that_do_not_fit_together_are_one_line(
    directories: dict[str, Path],
    arguments: list[str],
    pattern: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, without pydantic, as the command starts."""
    monkeypatch.delitem(sys.modules, "pydantic", raising=False)
    one = str(directories["one"])
    arguments = ["--model", one, *(text.replace("ONE", one) for text in arguments)]
    assert main(["serve", "--quiet", "--port", "0", *arguments]) in (1, 2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(pattern, line), line
