"""LoRA adapters over HTTP: vLLM's and SGLang's routes, the dialects' names of an adapter, versions, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.server.trainers.routes import LORA_PATHS
from tests.server.tiny import Running, opened, running
from tests.server.trainer import adapter_config, adapter_of, held, make_adapter, ok, refused, serving, until
from tests.weights.shared_trainer import SharedTrainer, shared_trainer

pytestmark = pytest.mark.slow

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = [5, 9, 30, 2, 44]
JSON = dict[str, Any]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters: two that can be loaded, and some that cannot."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in ((1, "one"), (2, "two"), (3, "cut")):
        make_adapter(root / name, seed)
    cut = root / "cut" / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    make_adapter(root / "dora", 4, use_dora=True)
    make_adapter(root / "large", 5, rank=32)
    (make_adapter(root / "linked", 6) / "adapter_config.json").unlink()
    (root / "linked" / "adapter_config.json").symlink_to("/etc/hostname")
    (root / "empty").mkdir()
    return root


@pytest.fixture(scope="module")
def server(tiny_directory: Path, shelf: Path) -> Iterator[Running]:
    with serving(tiny_directory, shelf, enable_lora=True, max_adapter_rank=16, max_adapters=8) as one:
        yield one


@pytest.fixture(autouse=True)
def empty(server: Running) -> Iterator[None]:
    yield
    for card in server.client.get("/v1/models").json()["data"]:
        if card["parent"] is not None:
            assert server.post(UNLOAD, {"lora_name": card["id"]}).status_code == 200


def load(server: Running, name: str, path: str = "one", **fields: Any) -> None:
    reply = server.post(LOAD, {"lora_name": name, "lora_path": path, **fields})
    assert reply.status_code == 200, reply.text


def tokens(server: Running, model: str | None = None) -> list[int]:
    return list(completion(server, model)["choices"][0]["token_ids"])


def completion(server: Running, model: str | None = None, **fields: Any) -> JSON:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = server.post("/v1/completions", {**body, "model": model, **fields})
    assert reply.status_code == 200, reply.text
    found: JSON = reply.json()
    return found


CHAT: JSON = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
OPTIONS: JSON = {"stream": False, "options": {"num_predict": 8, "temperature": 0}}
DIALECTS: dict[str, tuple[JSON, Callable[[JSON], Any]]] = {
    "/v1/completions": ({"prompt": "Hello", "max_tokens": 8, "temperature": 0}, lambda reply: reply["choices"]),
    "/v1/chat/completions": (CHAT, lambda reply: reply["choices"][0]["message"]),
    "/v1/responses": (
        {"input": "Hello", "max_output_tokens": 8, "temperature": 0},
        lambda reply: reply["output"][0]["content"],
    ),
    "/v1/messages": (CHAT, lambda reply: reply["content"]),
    "/v1/embeddings": ({"input": "Hello"}, lambda reply: reply["data"]),
    "/api/chat": ({"messages": CHAT["messages"], **OPTIONS}, lambda reply: reply["message"]),
    "/api/generate": ({"prompt": "Hello", **OPTIONS}, lambda reply: reply["response"]),
    "/api/embed": ({"input": "Hello"}, lambda reply: reply["embeddings"]),
    "/completion": ({"prompt": "Hello", "n_predict": 8, "temperature": 0}, lambda reply: reply["content"]),
    "/inference/v1/generate": (
        {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "temperature": 0}},
        lambda reply: reply["choices"][0]["token_ids"],
    ),
    "/generate": (
        {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "temperature": 0}},
        lambda reply: reply["output_ids"],
    ),
}


@pytest.mark.parametrize("path", DIALECTS)
def test_a_request_names_an_adapter_as_its_model(server: Running, path: str) -> None:
    body, answer = DIALECTS[path]
    field = "lora_path" if path == "/generate" else "model"
    name = "first:latest" if path.startswith("/api/") else "first"
    before = answer(server.post(path, body).json())
    load(server, "first")
    reply = server.post(path, {**body, field: name}).json()
    assert answer(reply) != before
    assert reply.get("model", name) == name
    assert answer(server.post(path, body).json()) == before, "requests without an adapter changed"
    assert server.post(path, {**body, field: "none"}).status_code == (400 if path == "/generate" else 404)


def test_each_prompt_of_sglang_has_its_own_adapter(server: Running) -> None:
    load(server, "first")
    load(server, "second", "two")
    body = {**DIALECTS["/generate"][0], "input_ids": [PROMPT] * 3, "lora_path": ["second", None, "first"]}
    found = [one["output_ids"] for one in server.post("/generate", body).json()]
    assert found == [
        server.post("/generate", {**body, "input_ids": PROMPT, "lora_path": name}).json()["output_ids"]
        for name in ("second", None, "first")
    ]
    assert len(set(map(tuple, found))) == 3
    refused(server.post("/generate", {**body, "lora_path": ["first"]}), 400, "lora_path")


def test_vllms_routes_answer_with_vllms_texts_and_statuses(server: Running, shelf: Path) -> None:
    reply = server.post(LOAD, {"lora_name": "first", "lora_path": str(shelf / "one"), "load_inplace": False})
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'first' added successfully.")
    assert reply.headers["content-type"].startswith("text/plain")
    first = tokens(server, "first")
    again = {"lora_name": "first", "lora_path": "two"}
    refused(server.post(LOAD, again), 400, "'first' has already been loaded", "'load_inplace' to True")
    assert tokens(server, "first") == first
    load(server, "first", "two", load_inplace=True)
    assert tokens(server, "first") != first
    reply = server.post(UNLOAD, {"lora_name": "first", "lora_int_id": 1})
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'first' removed successfully.")
    refused(server.post(UNLOAD, {"lora_name": "first"}), 404, "'first' cannot be found")
    refused(server.post("/v1/completions", {"model": "first", "prompt": "a"}), 404, "'first' does not exist")


def test_sglangs_routes_answer_as_sglang(server: Running) -> None:
    body = {"lora_name": "first", "lora_path": "one", "pinned": False}
    reply = ok(server.post("/load_lora_adapter", body))
    assert reply["success"] is True and reply["loaded_adapters"] == {"first": "one"}
    for again in (server.post("/load_lora_adapter", body), server.post("/load_lora_adapter", body | {"pinned": True})):
        refused(again, 400)
        assert again.json()["success"] is False
    assert ok(server.post("/unload_lora_adapter", {"lora_name": "first"}))["loaded_adapters"] == {}
    refused(server.post("/unload_lora_adapter", {"lora_name": "first"}), 400, "'first' cannot be found")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedTrainer]:
    with shared_trainer(adapter_of(2), tmp_path_factory.mktemp("sharing")) as one:
        yield one


@pytest.mark.parametrize(("form", "load_format"), [("adapter", None), ("bytes", "flattened_bucket")])
def test_an_adapter_in_shared_memory_equals_its_file(
    server: Running, trainer: SharedTrainer, form: str, load_format: str | None
) -> None:
    load(server, "file", "two")
    body: JSON = {"lora_name": "memory", "config_dict": adapter_config(), "load_format": load_format}
    body["serialized_named_tensors"] = [trainer.serialize(form)]
    ok(server.post("/load_lora_adapter_from_tensors", body))
    assert tokens(server, "memory") == tokens(server, "file") != tokens(server)
    path = "/load_lora_adapter_from_tensors"
    more = {**body, "lora_name": "more"}
    refused(server.post(path, {**more, "config_dict": adapter_config(use_dora=True)}), 400, "config_dict: use_dora")
    refused(server.post(path, {**more, "serialized_named_tensors": ["gASVAAAA"]}), 400, "serialized_named_tensors")
    refused(server.post(path, {**more, "expected_checksums": {"a": "b"}}), 400, "expected_checksums")
    assert len(server.client.get("/v1/models").json()["data"]) == 3


def test_adapters_are_listed_as_models(server: Running, shelf: Path) -> None:
    load(server, "first", str(shelf / "one"))
    cards = {one["id"]: one for one in server.client.get("/v1/models").json()["data"]}
    assert (cards["first"]["root"], cards["first"]["parent"]) == ("one", "tiny")
    assert server.client.get("/v1/models/first").json() == cards["first"]
    assert "first:latest" in [one["name"] for one in server.client.get("/api/tags").json()["models"]]
    config = server.client.get("/server_info?config_format=json").json()["vllm_config"]["lora_config"]
    assert config == {"max_lora_rank": 16, "max_loras": 8}


BAD: dict[str, tuple[int, str]] = {
    **{
        "cut": (400, "lora_path"),
        "dora": (400, "use_dora"),
        "large": (400, "r must be in"),
        "empty": (400, "lora_path"),
    },
    **{"nowhere": (400, "no directory"), "linked": (403, "outside"), "/etc": (403, "outside"), "../x": (400, "..")},
}


@pytest.mark.parametrize("path", BAD)
def test_an_adapter_that_cannot_be_loaded_leaves_the_old_one(server: Running, path: str) -> None:
    load(server, "first")
    before = tokens(server, "first")
    status, part = BAD[path]
    reply = server.post(LOAD, {"lora_name": "first", "lora_path": path, "load_inplace": True})
    assert refused(reply, status, part)["param"] == "lora_path"
    assert tokens(server, "first") == before != tokens(server)


def test_fields_of_what_is_not_supported_are_refused(server: Running) -> None:
    for path, fields, name in (
        (LOAD, {"is_3d_lora_weight": True}, "is_3d_lora_weight"),
        (LOAD, {"load_in_place": True}, "load_in_place"),
        (LOAD, {"lora_name": "tiny"}, "lora_name"),
        ("/load_lora_adapter", {"pinned": True}, "pinned"),
        ("/load_lora_adapter", {"added_tokens_config": {"a": 1}}, "added_tokens_config"),
    ):
        assert refused(server.post(path, {"lora_name": "x", "lora_path": "one", **fields}), 400)["param"] == name
    assert len(server.client.get("/v1/models").json()["data"]) == 1


def test_tokens_report_the_versions_of_their_adapter(server: Running) -> None:
    load(server, "first", version="step-1")
    choice = completion(server, "first")["choices"][0]
    assert choice["adapter_versions"] == [{"version": "step-1", "start": 0, "end": 8}]
    assert "adapter_versions" not in completion(server)["choices"][0]
    load(server, "first", "two", version="step-2", load_inplace=True)
    body = {**DIALECTS["/generate"][0], "lora_path": "first"}
    (found,) = server.post("/generate", body).json()["meta_info"]["adapter_versions"]
    assert found["version"] == "step-2"
    body = {"model": "first", "prompt": PROMPT, "max_tokens": 2, "stream": True, "return_token_ids": True}
    choices = [one["choices"][0] for one in server.events("/v1/completions", {**body, "ignore_eos": True})[:-1]]
    assert [name for one in choices for name in one.get("adapter_token_versions", ())] == ["step-2"] * 2


def test_a_reloaded_adapter_never_meets_kv_of_the_old_one(server: Running) -> None:
    load(server, "first", "two")
    expected = tokens(server, "first")
    assert server.post(UNLOAD, {"lora_name": "first"}).status_code == 200
    load(server, "first", "one")
    tokens(server, "first")  # caches the prompt
    load(server, "first", "two", load_inplace=True)
    assert tokens(server, "first") == expected


def test_an_adapter_is_loaded_while_the_server_is_paused(server: Running) -> None:
    ok(server.client.post("/pause?mode=keep"))
    load(server, "first")
    ok(server.client.post("/resume"))
    assert tokens(server, "first") != tokens(server)


def test_a_request_whose_adapter_was_just_unloaded_is_refused(server: Running) -> None:
    load(server, "first")
    with ThreadPoolExecutor() as pool:
        with held(server):
            unloading = pool.submit(server.post, UNLOAD, {"lora_name": "first"})
            until(server, lambda: server.link.engine.num_commands)
            asked = pool.submit(server.post, "/v1/completions", {"model": "first", "prompt": PROMPT})
            until(server, lambda: server.link.num_open)
        assert unloading.result(60).status_code == 200
        refused(asked.result(60), 400, "adapter: 'first' is not loaded")


def test_the_least_recently_used_adapter_makes_room(server: Running) -> None:
    for index in range(9):
        load(server, f"a{index}")
    names = [one["id"] for one in server.client.get("/v1/models").json()["data"]]
    assert names == ["tiny", *(f"a{index}" for index in range(1, 9))]


def test_routes_need_the_option(tiny_directory: Path, shelf: Path) -> None:
    config = ServerConfig(port=0, log_requests=False, enable_lora=True)
    with running(tiny_directory, config) as one:
        refused(one.post(LOAD, {"lora_name": "first", "lora_path": str(shelf / "one")}), 403, "--weights-dir")
        refused(one.post("/pause", {}), 404, "--enable-rl")
    with serving(tiny_directory, shelf) as one:
        for path in LORA_PATHS:
            refused(one.post(path, {}), 404, "--enable-lora")
        assert one.client.get("/server_info").json()["vllm_config"]["lora_config"] is None


def test_adapters_of_the_command_line_are_loaded_at_the_start(
    server: Running, tiny_directory: Path, shelf: Path
) -> None:
    load(server, "first", "one")
    modules = (f"first={shelf / 'one'}", f"second={shelf / 'two'}")
    config = ServerConfig(port=0, log_requests=False, enable_lora=True, lora_modules=modules, any_model=True)
    with running(tiny_directory, config) as one:
        assert tokens(one, "first") == tokens(server, "first")
        assert tokens(one, "second") not in (tokens(one, "first"), tokens(one, "other"))
        assert tokens(one, "other") == tokens(server)
    for wrong, part in ((f"tiny={shelf / 'one'}", "tiny"), (f"bad={shelf / 'cut'}", "bad"), ("a=/nowhere", "a")):
        config = ServerConfig(port=0, log_requests=False, enable_lora=True, lora_modules=(wrong,))
        with pytest.raises(ValueError, match=f"lora_modules: .*{part}"):
            opened(tiny_directory, config)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"lora_modules": ("a=b",)}, "lora_modules needs enable_lora"),
        ({"lora_modules": ("a=",), "enable_lora": True}, "lora_modules must be NAME=PATH"),
        ({"enable_lora": True, "further_model": ("x",)}, "further_model"),
        ({"enable_lora": True, "workers": ("http://localhost:1",)}, "workers"),
        ({"weights_dir": "/tmp"}, "weights_dir is for a trainer: it needs enable_rl or enable_lora"),
    ],
)
def test_options_that_do_not_go_together_are_refused(fields: JSON, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ServerConfig(**fields)
