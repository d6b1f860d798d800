"""What llama.cpp reports beside an answer: the prefill; and its options of a start."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.types import ModelError
from tests.server.mounted import END_TOKEN, ids
from tests.server.tiny import Running, make_tiny, opened, running

JSON = dict[str, Any]
HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETE, LLAMA = "/v1/chat/completions", "/v1/completions", "/completion"
STEP = 16
"""Tokens of a step of `server`."""
TEXT = "".join(chr(97 + index * 7 % 26) for index in range(100))


def config(**fields: Any) -> ServerConfig:
    return ServerConfig(port=0, log_requests=False, **fields)


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with running(tiny_directory, config(max_tokens_per_batch=STEP, share_prefix_cache=True)) as one:
        yield one


def progress_of(server: Running, path: str, asked: JSON) -> list[JSON]:
    """Return the reports of the prefill in a stream, which all precede the first token."""
    limit = {"n_predict": 2} if path == LLAMA else {"max_tokens": 2}
    body = {**asked, **limit, "ignore_eos": True, "stream": True, "return_progress": True}
    events = [event for event in server.events(path, body) if event != "[DONE]"]
    reports = [index for index, event in enumerate(events) if "prompt_progress" in event]
    texts = [index for index, event in enumerate(events) if event.get("tokens") or event.get("token_ids")]
    assert not texts or max(reports) < min(texts)
    return [events[index]["prompt_progress"] for index in reports]


# ---- the prefill


@pytest.mark.parametrize(
    ("path", "asked", "total"),
    [
        (LLAMA, {"prompt": f"0{TEXT}"}, 101),
        (COMPLETE, {"prompt": f"1{TEXT}"}, 101),
        (CHAT, {"messages": [{"role": "user", "content": f"2{TEXT}"}]}, None),
    ],
)
def test_prefill_is_reported_after_each_step(server: Running, path: str, asked: JSON, total: int | None) -> None:
    reports = progress_of(server, path, asked)
    first, *later = reports
    assert first == {"total": first["total"], "cache": 0, "processed": 0, "time_ms": 0}
    assert total in (None, first["total"])
    assert {(one["total"], one["cache"]) for one in reports} == {(first["total"], 0)}
    counts = [one["processed"] for one in later]
    assert counts == [*range(STEP, first["total"], STEP), first["total"]]
    assert [one["time_ms"] for one in later] == sorted(one["time_ms"] for one in later)
    again = progress_of(server, path, asked)
    cached = again[0]["cache"]
    assert first["total"] - STEP <= cached < first["total"] and again[0]["processed"] == cached
    assert again[-1] == {**again[-1], "cache": cached, "processed": first["total"]}


def test_prefill_of_several_samples_is_reported_for_each(server: Running) -> None:
    body = {"prompt": f"n{TEXT}", "n": 2, "max_tokens": 2, "stream": True, "return_progress": True}
    events = [event for event in server.events(COMPLETE, body) if event != "[DONE]"]
    reports = [event for event in events if "prompt_progress" in event]
    for index in (0, 1):
        mine = [one["prompt_progress"] for one in reports if one["choices"][0]["index"] == index]
        assert mine[0]["processed"] == mine[0]["cache"] and mine[-1]["processed"] == mine[-1]["total"] == 101


@pytest.mark.parametrize("fields", [{}, {"return_progress": False}, {"return_progress": None}])
def test_prefill_is_not_reported_unless_requested(server: Running, fields: JSON) -> None:
    body = {"prompt": f"{len(fields)}{fields}{TEXT}", "max_tokens": 2, "stream": True, **fields}
    assert not [event for event in server.events(COMPLETE, body) if "prompt_progress" in event]
    whole = server.post(COMPLETE, {**body, "stream": False, "return_progress": True})
    assert whole.status_code == 200 and "prompt_progress" not in whole.json()


def test_reports_change_no_token(server: Running) -> None:
    body = {"prompt": f"t{TEXT}", "max_tokens": 20, "seed": 3, "temperature": 1.5, "stream": True}

    def text(**fields: Any) -> str:
        events = [event for event in server.events(COMPLETE, {**body, **fields}) if event != "[DONE]"]
        return "".join(event["choices"][0]["text"] for event in events)

    assert text(return_progress=True) == text()


# ---- lengths and bans


@pytest.mark.parametrize(("path", "asked"), [(COMPLETE, {"prompt": "ab"}), (CHAT, {"messages": HELLO})])
def test_n_predict_is_the_length_of_an_answer(server: Running, path: str, asked: JSON) -> None:
    def length(**fields: Any) -> int:
        reply = server.post(path, {**asked, "ignore_eos": True, **fields})
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["completion_tokens"])

    assert length(n_predict=3) == 3 == length(n_predict=3, max_tokens=5)
    assert length(n_predict=None, max_tokens=5) == 5
    usage = server.post(path, {**asked, "ignore_eos": True, "n_predict": -1}).json()["usage"]
    assert usage["total_tokens"] == 512
    refused = server.post(path, {**asked, "n_predict": -2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n_predict")


def test_n_predict_of_nothing_is_refused_in_a_chat(server: Running) -> None:
    refused = server.post(CHAT, {"messages": HELLO, "n_predict": 0})
    assert refused.json()["error"]["param"] == "n_predict" and "at least 1" in refused.json()["error"]["message"]


def test_ignored_end_tokens_are_banned(server: Running) -> None:
    body = {"prompt": "ab", "n_predict": 8, "temperature": 0, "logit_bias": [[END_TOKEN, 60]], "return_tokens": True}
    assert server.post(LLAMA, body).json()["stop_type"] == "eos"
    reply = server.post(LLAMA, {**body, "ignore_eos": True}).json()
    assert END_TOKEN not in reply["tokens"] and len(reply["tokens"]) == 8
    assert reply["generation_settings"]["logit_bias"] == [{"token": END_TOKEN, "bias": None}]


# ---- options of the start


def test_usage_can_be_forced_into_every_chunk(tiny_directory: Path) -> None:
    with running(tiny_directory, config(enable_force_include_usage=True)) as server:
        for path, asked in ((COMPLETE, {"prompt": "ab"}), (CHAT, {"messages": HELLO})):
            body = {**asked, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
            whole = server.post(path, body).json()
            for options in (None, {"include_usage": False}):
                *events, last, done = server.events(path, {**body, "stream": True, "stream_options": options})
                assert done == "[DONE]" and last["choices"] == []
                counts = [one["usage"]["completion_tokens"] for one in [*events, last]]
                assert counts == sorted(counts) and counts[-1] == 6
                finished = [one for one in events if one["choices"][0]["finish_reason"]]
                assert finished == events[-1:] and last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_token_names_can_be_ids_by_default(tiny_directory: Path) -> None:
    with running(tiny_directory, config(return_tokens_as_token_ids=True)) as server:
        body = {"prompt": "ab", "max_tokens": 2, "logprobs": 1, "temperature": 0}
        names = server.post(COMPLETE, body).json()["choices"][0]["logprobs"]["tokens"]
        assert all(name.startswith("token_id:") for name in names)
        plain = server.post(COMPLETE, {**body, "return_tokens_as_token_ids": False}).json()["choices"][0]["logprobs"]
        assert not any(name.startswith("token_id:") for name in plain["tokens"])


def test_a_token_comes_first_among_its_alternatives(server: Running) -> None:
    body = {"prompt": "abc", "max_tokens": 6, "logprobs": 2, "temperature": 1.8, "seed": 2, "echo": True}
    found = server.post(COMPLETE, {**body, "return_tokens_as_token_ids": True}).json()["choices"][0]["logprobs"]
    assert [next(iter(tops)) for tops in found["top_logprobs"][1:]] == found["tokens"][1:]
    assert any(list(tops.values()) != sorted(tops.values(), reverse=True) for tops in found["top_logprobs"][1:])


def test_template_dates_are_todays(tmp_path: Path) -> None:
    template = "{{ date_string }}|{{ datetime }}|{% for one in messages %}{{ one.content }}{% endfor %}"
    directory = make_tiny(tmp_path, template=template)
    asked = {"messages": HELLO}
    with running(directory, config()) as server:
        assert server.post("/apply-template", asked).json()["prompt"] == "||hello"
    for fields in ({}, {"chat_template": template}):
        with running(directory, config(template_dates=True, **fields)) as server:
            before = datetime.now()
            prompt = server.post("/apply-template", asked).json()["prompt"]
            days = {before.strftime("%d %b %Y|%b %d %Y"), datetime.now().strftime("%d %b %Y|%b %d %Y")}
            assert prompt.removesuffix("|hello") in days
            given = {**asked, "chat_template_kwargs": {"date_string": "1 Jan 1970"}}
            assert server.post("/apply-template", given).json()["prompt"].startswith("1 Jan 1970|")
            reply = server.post(CHAT, {**asked, "max_tokens": 1, "return_token_ids": True})
            assert reply.json()["prompt_token_ids"] == ids(prompt)


def test_template_dates_need_a_template(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (directory / name).unlink(missing_ok=True)
    with pytest.raises(ModelError, match="--template-dates: the model has no chat template"):
        opened(directory, config(template_dates=True))


def test_pages_can_be_left_out(tiny_directory: Path) -> None:
    with running(tiny_directory, config(pages=False)) as server:
        for path in ("/", "/dashboard", "/docs", "/formulas.js"):
            assert server.client.get(path).status_code == 404
        assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"),
        (
            "llama3",
            "<|start_header_id|>system<|end_header_id|>\n\nBe.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
            "hello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "command-r",
            "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>hello"
            "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ),
    ],
)
def test_templates_by_name(tiny_directory: Path, name: str, expected: str) -> None:
    with running(tiny_directory, config(chat_template=name)) as server:
        asked = {"messages": [{"role": "system", "content": "Be."}, *HELLO]}
        assert server.post("/apply-template", asked).json()["prompt"] == expected


def test_unknown_template_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'llama2' is neither"):
        config(chat_template="llama2")
