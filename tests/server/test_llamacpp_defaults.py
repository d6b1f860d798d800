"""What llama.cpp's server does without being asked, here by options: seed, continued answers, BOS; and its reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from nano_inference.server.config import ServerConfig
from tests.server.tiny import MAX_LEN, Running, make_tiny, running

JSON = dict[str, Any]
CHAT, COMPLETE, LLAMA, RENDER, RESPOND = (
    *("/v1/chat/completions", "/v1/completions", "/completion", "/apply-template", "/v1/responses"),
)
HOT = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
HELLO: JSON = {"role": "user", "content": "hello"}
OPEN: JSON = {"role": "assistant", "content": "Wh"}
BOS = 258


def config(**fields: Any) -> ServerConfig:
    return ServerConfig(port=0, log_requests=False, **fields)


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    """A server that continues answers and has a default seed."""
    with running(tiny_directory, config(prefill_assistant=True, default_seed=7, max_tokens_per_batch=64)) as one:
        yield one


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose tokenizer begins each text with a BOS, with the template chatml."""
    directory = make_tiny(tmp_path_factory.mktemp("with_bos"))
    file = directory / "tokenizer.json"
    core = tokenizers.Tokenizer.from_file(str(file))
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    core.save(str(file))
    with running(directory, config(chat_template="chatml")) as one:
        yield one


# ---- the seed


def text_of(server: Running, path: str, **fields: Any) -> str:
    reply: JSON = server.post(path, {"prompt": "a", **HOT, **fields}).json()
    return str(reply["content"] if path == LLAMA else reply["choices"][0]["text"])


def test_default_seed_is_that_of_requests_without_one(server: Running) -> None:
    wanted = text_of(server, COMPLETE, max_tokens=30, seed=7)
    assert text_of(server, COMPLETE, max_tokens=30) == text_of(server, LLAMA, n_predict=30) == wanted
    assert text_of(server, COMPLETE, max_tokens=30, seed=8) != wanted
    settings = server.post(LLAMA, {"prompt": "a", "n_predict": 1}).json()["generation_settings"]
    assert settings["seed"] == 7
    assert server.client.get("/props").json()["default_generation_settings"]["params"]["seed"] == 7


@pytest.mark.parametrize("seed", [-1, 2**32 - 1])
def test_request_for_a_random_seed_gets_one(server: Running, seed: int) -> None:
    texts = {text_of(server, LLAMA, n_predict=30, seed=seed) for _ in range(3)}
    assert len(texts) == 3 and text_of(server, LLAMA, n_predict=30) not in texts


# ---- continued answers


def rendered(server: Running, *messages: JSON, **fields: Any) -> str:
    reply = server.post(RENDER, {"messages": messages, **fields})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["prompt"])


def test_last_answer_is_continued_unless_the_request_decides(server: Running) -> None:
    head = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(server, HELLO, OPEN) == f"{head}Wh"
    assert rendered(server, HELLO) == head
    closed = f"{head}Wh<|im_end|>\n"
    assert rendered(server, HELLO, OPEN, add_generation_prompt=False) == closed
    assert rendered(server, HELLO, OPEN, continue_final_message=False) == f"{closed}<|im_start|>assistant\n"
    fields = {"messages": [HELLO, OPEN], "max_tokens": 1, "return_token_ids": True}
    used = server.post(CHAT, fields).json()["prompt_token_ids"]
    assert used == server.post(CHAT, {**fields, "continue_final_message": True}).json()["prompt_token_ids"]
    count = {"messages": [HELLO, OPEN]}
    assert server.post("/tokenize", count).json()["tokens"] == used
    assert server.post("/v1/chat/completions/input_tokens", count).json()["input_tokens"] == len(used)


def test_two_answers_at_the_end_are_not_continued(server: Running) -> None:
    for path in (CHAT, RENDER):
        error = server.post(path, {"messages": [HELLO, OPEN, OPEN]}).json()["error"]
        assert (error["param"], "two answers" in error["message"]) == ("messages", True)


def test_last_answer_is_not_continued_by_default(tiny_directory: Path) -> None:
    with running(tiny_directory, config()) as plain:
        assert rendered(plain, HELLO, OPEN).endswith("Wh<|im_end|>\n<|im_start|>assistant\n")
        assert rendered(plain, HELLO, OPEN, OPEN).count("Wh") == 2


# ---- BOS


def test_named_template_begins_with_the_bos_of_the_tokenizer(with_bos: Running) -> None:
    fields = {"messages": [HELLO], "max_tokens": 1, "return_token_ids": True}
    prompt = with_bos.post(CHAT, fields).json()["prompt_token_ids"]
    assert prompt[:1] == [BOS] and prompt.count(BOS) == 1


def test_rendered_text_can_be_sent_to_completion(with_bos: Running) -> None:
    fields = {"messages": [HELLO], "max_tokens": 1, "return_token_ids": True}
    prompt = with_bos.post(CHAT, fields).json()["prompt_token_ids"]
    text = rendered(with_bos, HELLO)
    assert "<|bos|>" not in text
    asked = {"prompt": text, "max_tokens": 1, "return_token_ids": True}
    assert with_bos.post(COMPLETE, asked).json()["choices"][0]["prompt_token_ids"] == prompt


def test_empty_text_has_an_embedding_if_the_tokenizer_adds_a_token(with_bos: Running) -> None:
    vectors = [
        with_bos.post("/v1/embeddings", {"input": one}).json()["data"][0]["embedding"] for one in ("", [BOS], [""])
    ]
    assert vectors[0] == vectors[1] == vectors[2]


def test_pooling_is_that_of_the_server_unless_the_request_names_one(tiny_directory: Path) -> None:
    def vector(server: Running, **fields: Any) -> list[float]:
        data: list[JSON] = server.post("/v1/embeddings", {"input": "hello", **fields}).json()["data"]
        return list(data[0]["embedding"])

    with running(tiny_directory, config()) as plain, running(tiny_directory, config(pooling="last")) as last:
        assert vector(last) == vector(plain, pooling="last") != vector(plain)
        assert vector(last, pooling="mean") == vector(plain)


# ---- reports


@pytest.mark.parametrize(("limit", "is_truncated"), [(-1, True), (MAX_LEN, True), (3, False)])
def test_answer_is_truncated_if_the_context_ends_it(server: Running, limit: int, is_truncated: bool) -> None:
    body = {"prompt": "a" * (MAX_LEN - 9), "n_predict": limit, "ignore_eos": True}
    whole = server.post(LLAMA, body).json()
    *_, last = server.events(LLAMA, {**body, "stream": True})
    for reply in (whole, last):
        assert (reply["stop_type"], reply["truncated"]) == ("limit", is_truncated)
    exact = server.post(LLAMA, {**body, "n_predict": 9}).json()
    assert (exact["tokens_predicted"], exact["truncated"]) == (9, False)


def test_path_of_the_model_is_its_files_name(server: Running, tiny_directory: Path) -> None:
    assert server.client.get("/props").json()["model_path"] == tiny_directory.name


def named_events(server: Running, body: JSON) -> list[JSON]:
    """Return the data of a stream whose events have names."""
    reply = server.post(RESPOND, {**body, "stream": True})
    return [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: ")]


def test_responses_report_progress_and_timings(server: Running) -> None:
    body = {"input": "ab" * 90, "max_output_tokens": 4, "timings_per_token": True, "return_progress": True}
    events = named_events(server, body)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    reports = [one for one in events if "prompt_progress" in one]
    assert {one["type"] for one in reports} == {"response.in_progress"}
    assert reports[-1]["prompt_progress"]["processed"] == reports[-1]["prompt_progress"]["total"] > 180
    kinds = {one["type"] for one in events if "timings" in one}
    assert kinds == {"response.output_text.delta", events[-1]["type"]}
    assert events[-1]["timings"]["predicted_n"] == events[-1]["response"]["usage"]["output_tokens"] == 4
    whole = server.post(RESPOND, body).json()
    assert whole["timings"]["predicted_n"] == 4 and "prompt_progress" not in whole
    plain = named_events(server, {"input": "a", "max_output_tokens": 2})
    assert plain and not {"timings", "prompt_progress"} & {name for one in plain for name in one}


# ---- a template with a variable `functions`

FIRE = (
    "functools {{ bos_token }}F:{{ functions }}{% for one in messages %}<{{ one.role }}>{{ one.content }}"
    "{% for call in one.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def test_functions_are_a_text_for_a_template_that_writes_it(tmp_path: Path) -> None:
    with running(make_tiny(tmp_path, template=FIRE), config()) as one:
        assert rendered(one, HELLO) == "functools <|bos|>F:<user>hello"
        text = rendered(one, HELLO, tools=[TOOL])
        assert json.loads(text[text.index("[") : text.rindex("]") + 1]) == [TOOL["function"]]
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 5}'}}
        said = rendered(one, HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, tools=[TOOL])
        assert said.endswith("<assistant>5") and "<tool_call>" not in said
        asked = {"messages": [HELLO], "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
        message = one.post(CHAT, {**asked, "parallel_tool_calls": False}).json()["choices"][0]["message"]
        assert [one["function"]["name"] for one in message["tool_calls"]] == ["f"]
