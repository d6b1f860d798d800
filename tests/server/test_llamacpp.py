"""llama.cpp's /completion and /props: fields, refusals, whole replies and streams."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

import nano_inference
from nano_inference import InferenceEngine
from nano_inference.server.app import installed_dialects
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta, token_text
from nano_inference.server.dialect import Occupancy, Route
from nano_inference.server.dialects.llamacpp import LlamaBody, LlamaReply, ask_llama, error_body, props, selected
from nano_inference.server.errors import ApiError
from nano_inference.server.timings import speeds
from nano_inference.server.transcript import transcripts_of
from tests.cases import failures
from tests.server.mounted import ALIASES, BYTES, END_TOKEN, JSON, ended_after, engine_sample, ids, mounted, written
from tests.server.tiny import TEMPLATE, Running, events_in

PATH = "/completion"
ROUTE = Route(path=PATH, body=LlamaBody, ask=ask_llama, reply=LlamaReply, summary="Complete as llama.cpp does.")
HOT: JSON = {"temperature": 1.5, "seed": 3, "n_predict": 40, "ignore_eos": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
GREEDY: JSON = {"temperature": 0, "n_predict": 12}
LETTERS: JSON = {
    "logit_bias": [[ids("a")[0], 100.0], [ids("b")[0], 100.0]],
    "temperature": 1.5,
    "seed": 1,
    "n_predict": 60,
}
TIMING_FIELDS = [f"{part}_{what}" for part in ("prompt", "predicted") for what in ("ms", "per_token_ms", "per_second")]


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with mounted(tiny_directory, ROUTE) as one:
        yield one


def complete(server: Running, **fields: Any) -> Any:
    """Return the JSON of a successful POST; greedy by default."""
    reply = server.post(PATH, {"prompt": "hello", **GREEDY, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


# ---- the reply


def test_whole_reply_has_llamacpps_form(server: Running, engine: InferenceEngine) -> None:
    sample = engine_sample(engine, ids("hello"), max_tokens=2, logprobs=2)
    assert sample.top_logprobs is not None
    reply = complete(server, n_predict=2, n_probs=2, return_tokens=True, stop=["zz"], seed=5, cache_prompt=False)

    def entry(token: int, logprob: float) -> JSON:
        text = token_text(token, server.opened.model.tokenizer)
        return {"id": token, "token": text, "bytes": [BYTES[token]], "logprob": pytest.approx(logprob, abs=1e-5)}

    assert reply.pop("completion_probabilities") == [
        {**entry(token, logprob), "top_logprobs": [entry(one.token, one.logprob) for one in top]}
        for token, logprob, top in zip(sample.completion_tokens, sample.logprobs, sample.top_logprobs, strict=True)
    ]
    assert all(reply["timings"][name] > 0 for name in TIMING_FIELDS)
    assert reply == {
        "index": 0,
        "content": written(sample.completion_tokens),
        "tokens": list(sample.completion_tokens),
        "id_slot": -1,
        "stop": True,
        "model": "tiny",
        "tokens_predicted": 2,
        "tokens_evaluated": 5,
        "generation_settings": {
            "n_predict": 2,
            "seed": 5,
            "temperature": 0.0,
            "top_k": 40,
            "top_p": 0.95,
            "min_p": 0.05,
            "repeat_last_n": -1,
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": ["zz"],
            "ignore_eos": False,
            "logit_bias": [],
            "n_probs": 2,
            "grammar": "",
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "stream": False,
            "timings_per_token": False,
        },
        "prompt": "hello",
        "has_new_line": "\n" in written(sample.completion_tokens),
        "truncated": False,
        "stop_type": "limit",
        "stopping_word": "",
        "tokens_cached": 0,
        "timings": {"cache_n": 0, "prompt_n": 5, "predicted_n": 2, **dict.fromkeys(TIMING_FIELDS, ANY)},
    }


def test_probabilities_are_those_that_tokens_are_drawn_from(server: Running) -> None:
    fields = {**HOT, "top_k": 3, "n_predict": 4, "n_probs": 5, "return_tokens": True}
    rows = complete(server, **fields, post_sampling_probs=True)["completion_probabilities"]
    for row in rows:
        assert {*row} == {"id", "token", "bytes", "prob", "top_probs"} and 0 < row["prob"] <= 1
        kept = [one["prob"] for one in row["top_probs"]]
        assert sum(kept) == pytest.approx(1, abs=1e-4) and sum(prob > 0 for prob in kept) <= 3
    plain = complete(server, **fields)["completion_probabilities"]
    assert [row["id"] for row in plain] == [row["id"] for row in rows] and "logprob" in plain[0]
    for row in complete(server, n_probs=4, post_sampling_probs=True)["completion_probabilities"]:
        assert row["prob"] == 1 and sorted(one["prob"] for one in row["top_probs"]) == [0, 0, 0, 1]


def test_stop_types(server: Running) -> None:
    ends = [
        complete(server, **fields) for fields in ({"logit_bias": [[END_TOKEN, 100]]}, {}, {**LETTERS, "stop": "abb"})
    ]
    assert [(one["stop_type"], one["stopping_word"]) for one in ends] == [("eos", ""), ("limit", ""), ("word", "abb")]
    assert ends[0]["content"] == "" and ends[0]["tokens_predicted"] == 1
    assert "abb" not in ends[2]["content"] and set(ends[2]["content"]) <= {"a", "b"}
    broken = ended_after(server, 10, lambda: complete(server, n_predict=400, ignore_eos=True))
    assert (broken["stop_type"], broken["stop"]) == ("none", True) and 0 < broken["tokens_predicted"] < 400


def test_answer_fills_the_context_by_default(server: Running) -> None:
    for unlimited in ({}, {"n_predict": -1}, {"n_predict": -2}, {"n_predict": None}):
        body = {"prompt": "hello", "temperature": 0, "ignore_eos": True, **unlimited}
        assert server.post(PATH, body).json()["tokens_predicted"] == 512 - 5
    assert complete(server, n_predict=0)["tokens_predicted"] == 0
    assert complete(server, n_predict=0)["content"] == ""
    assert complete(server, n_predict=None, max_tokens=3)["tokens_predicted"] == 3
    assert complete(server, n_predict=2, max_tokens=3)["tokens_predicted"] == 2


def test_answer_fills_a_cache_smaller_than_the_context(tiny_directory: Path) -> None:
    with mounted(tiny_directory, ROUTE, kv_cache_bytes=48 << 10) as server:
        reply = server.post(PATH, {"prompt": "hello", "ignore_eos": True, "temperature": 0})
        assert reply.status_code == 200, reply.text
        room = server.opened.model.limits
        assert reply.json()["tokens_predicted"] == room.num_blocks * room.block_size - 5 < 507


@pytest.mark.parametrize(
    "fields",
    [
        {**HOT, "n_probs": 2},
        {**HOT, "n_cmpl": 2},
        {**LETTERS, "stop": ["abb"]},
        {**HOT, "prompt": ["one", "two"], "timings_per_token": True},
        {"logit_bias": [[END_TOKEN, 100]]},
    ],
)
def test_stream_adds_up_to_the_whole_reply(server: Running, fields: JSON) -> None:
    whole = complete(server, **{**fields, "cache_prompt": False, "return_tokens": True})
    answers = whole if isinstance(whole, list) else [whole]
    body = {"prompt": "hello", **GREEDY, **fields, "cache_prompt": False, "return_tokens": True, "stream": True}
    events = server.events(PATH, body)
    for answer in answers:
        mine = [one for one in events if one["index"] == answer["index"]]
        assert [one["stop"] for one in mine] == [False] * (len(mine) - 1) + [True]
        last = mine.pop()
        assert "".join(one["content"] for one in mine) == answer["content"] and last["content"] == ""
        assert [token for one in mine for token in one["tokens"]] == answer["tokens"] and last["tokens"] == []
        rows = [row for one in mine for row in one.get("completion_probabilities", [])]
        assert rows == answer.get("completion_probabilities", [])
        counts = [one["tokens_predicted"] for one in mine]
        assert counts == sorted(set(counts)) and counts[-1] == answer["tokens_predicted"]
        assert [
            one["tokens_predicted"] == len([t for o in mine[: i + 1] for t in o["tokens"]])
            for i, one in enumerate(mine)
        ]
        assert all(("timings" in one) is ("timings_per_token" in fields) for one in mine)
        timings = last.pop("timings")
        assert timings["prompt_n"] == answer["timings"]["prompt_n"] and answer.pop("timings")["prompt_ms"] > 0
        assert timings["prompt_ms"] > 0 and timings["predicted_ms"] >= 0
        assert last["generation_settings"].pop("stream") is True
        for name in set(last) - {"content", "tokens"}:
            expected = answer[name]
            if name == "generation_settings":
                expected = {key: value for key, value in expected.items() if key != "stream"}
            assert last[name] == expected, name


def test_stream_counts_the_tokens_of_each_event(server: Running) -> None:
    model = server.opened.model
    call = ask_llama(LlamaBody(prompt="a", stream=True), model, ServerConfig(), "")
    transcripts = transcripts_of(call)
    reply = LlamaReply(call, transcripts)
    sent: list[JSON] = []
    for piece in (DecodedDelta("a", (65,), (), None, None), DecodedDelta("b\n", (66, 67), (), "length", None)):
        transcripts[0].append(piece, keep=False)
        sent += events_in(reply.part(transcripts[0], piece).decode())
    assert [(one["stop"], one["tokens_predicted"]) for one in sent] == [(False, 1), (False, 3), (True, 3)]
    assert sent[-1]["has_new_line"] is True


def test_response_fields(server: Running) -> None:
    reply = complete(server, response_fields=["content", "generation_settings/n_predict", "nothing", "timings/a/b"])
    assert reply == {"content": complete(server)["content"], "generation_settings/n_predict": 12}
    events = server.events(PATH, {"prompt": "hello", **GREEDY, "stream": True, "response_fields": ["stop"]})
    assert events[-1] == {"stop": True} and "content" in events[0]
    assert selected({"a": {"b": 0}}, ["a/b"]) == {"a/b": 0} and selected({"a": 1}, []) == {"a": 1}


def test_speeds_with_unknown_values() -> None:
    known = {"x_n": 4, "x_ms": 2000.0, "x_per_token_ms": 500.0, "x_per_second": 2.0}
    assert speeds("x", 4, 2.0) == known
    assert speeds("x", 4, None) == {**dict.fromkeys(known), "x_n": 4}
    assert speeds("x", None, 2.0) == {**dict.fromkeys(known), "x_ms": 2000.0}
    assert speeds("x", 0, 0.0) == {"x_n": 0, "x_ms": 0.0, "x_per_token_ms": None, "x_per_second": None}


# ---- prompts


def test_prompts_of_texts_ids_and_both(server: Running) -> None:
    hello = complete(server, return_tokens=True)
    prompts: list[Any] = [ids("hello"), ["hel", *ids("lo")], [*ids("he"), "llo"]]
    for prompt in prompts:
        one = complete(server, prompt=prompt, return_tokens=True)
        assert (one["tokens"], one["prompt"], one["index"]) == (hello["tokens"], "hello", 0)
    many = complete(server, prompt=["other", ids("hello"), ["hel", *ids("lo")]], return_tokens=True)
    assert [one["index"] for one in many] == [0, 1, 2] and [one["tokens"] for one in many[1:]] == [hello["tokens"]] * 2
    assert [one["prompt"] for one in complete(server, prompt=["other", "hello"])] == ["other", "hello"]
    assert isinstance(complete(server, prompt=["hello"]), dict)
    two = complete(server, prompt=["other", "hello"], **{**HOT, "n_cmpl": 2}, return_tokens=True)
    assert [one["index"] for one in two] == [0, 1, 2, 3] and len({tuple(one["tokens"]) for one in two}) == 4


# ---- fields


SAMPLING: list[tuple[JSON, JSON]] = [
    ({"temperature": 1.7, "seed": 3, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"temperature": 1.7, "seed": 3}),
    ({"temperature": 1.5, "seed": 3}, {"temperature": 1.5, "seed": 3, "top_k": 40, "top_p": 0.95, "min_p": 0.05}),
    ({"repeat_penalty": 3.0}, {"repetition_penalty": 3.0}),
    ({"repeat_penalty": 3.0, "repeat_last_n": -1}, {"repetition_penalty": 3.0}),
    ({"presence_penalty": 2.0}, {"presence_penalty": 2.0}),
    ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
    ({"frequency_penalty": 2.0, "presence_penalty": 2.0, "repeat_penalty": 2.0, "repeat_last_n": 0}, {}),
    ({"logit_bias": [[65, 100]]}, {"logit_bias": {65: 100.0}}),
    ({"logit_bias": {"65": 100}}, {"logit_bias": {65: 100.0}}),
    ({"logit_bias": [["ab", 50], [*ids("b"), 1]]}, {"logit_bias": {ids("a")[0]: 50.0, ids("b")[0]: 51.0}}),
    ({"logit_bias": [["ab ", -100], ["b ", -100]]}, {"logit_bias": dict.fromkeys(ids("ab "), -100.0)}),
    ({"logit_bias": {"ab": 50}}, {"logit_bias": {ids("a")[0]: 50.0, ids("b")[0]: 50.0}}),
    ({"logit_bias": [[191, False], [191, 1.5]]}, {"logit_bias": {191: -98.5}}),
    ({"logit_bias": False}, {}),
    ({"ignore_eos": True, "n_predict": 60}, {"ignore_eos": True, "max_tokens": 60, "logit_bias": {END_TOKEN: -100.0}}),
]


@pytest.mark.parametrize(("fields", "params"), SAMPLING)
def test_tokens_and_logprobs_equal_the_engines(
    server: Running, engine: InferenceEngine, fields: JSON, params: JSON
) -> None:
    reply = complete(server, **fields, n_probs=1, return_tokens=True)
    sample = engine_sample(engine, ids("hello"), logprobs=1, **params)
    assert reply["tokens"] == list(sample.completion_tokens)
    logprobs = [one["logprob"] for one in reply["completion_probabilities"]]
    assert logprobs == pytest.approx(list(sample.logprobs), abs=1e-5)


CHANGES: list[JSON] = [
    {"temperature": 0},
    {"seed": 4},
    {"top_p": 0.3},
    {"top_k": 1},
    {"min_p": 0.9},
    {"repeat_penalty": 3.0},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"logit_bias": [[65, 50]]},
    {"n_predict": 39},
    {"ignore_eos": False, "logit_bias": [[257, 100]]},
]


@pytest.mark.parametrize("change", CHANGES)
def test_each_parameter_changes_the_sampled_tokens(server: Running, change: JSON) -> None:
    plain = complete(server, **HOT, return_tokens=True)["tokens"]
    assert complete(server, **HOT, return_tokens=True)["tokens"] == plain
    assert complete(server, **{**HOT, **change}, return_tokens=True)["tokens"] != plain


def test_seeds_have_64_bits(server: Running) -> None:
    for seed in (2**63, 2**64 - 1):
        one, two = (complete(server, **{**HOT, "seed": seed})["content"] for _ in range(2))
        assert one == two != complete(server, **{**HOT, "seed": seed - 1})["content"]
    assert server.post("/completion", {"prompt": "a", "seed": 2**64}).status_code == 400


@pytest.mark.parametrize("seed", [-1, 2**32 - 1, None])
def test_default_seeds_are_random(server: Running, seed: Any) -> None:
    assert complete(server, **{**HOT, "seed": seed})["content"] != complete(server, **{**HOT, "seed": seed})["content"]


def test_prefix_cache_is_used_unless_disabled(server: Running) -> None:
    long = "a long prompt that fills more than one block of the cache" * 2
    first, second = (complete(server, prompt=long) for _ in range(2))
    assert first["tokens_cached"] == 0 < second["tokens_cached"] == second["timings"]["cache_n"]
    assert second["timings"]["prompt_n"] == len(long) - second["tokens_cached"]
    assert complete(server, prompt=long, cache_prompt=False)["tokens_cached"] == 0
    assert complete(server)["tokens"] == [], "only when asked for"


@pytest.mark.parametrize("fields", [{"grammar": 'root ::= ("a" | "b") "ab"'}, {"json_schema": {"enum": ["bab"]}}])
def test_answer_has_the_requested_structure(server: Running, fields: JSON) -> None:
    reply = complete(server, **fields)
    assert re.fullmatch(r'"?[ab]ab"?', reply["content"]) and reply["stop_type"] == "eos"
    assert reply["generation_settings"]["grammar"] == fields.get("grammar", "")


WITHOUT_EFFECT: list[JSON] = [
    {"samplers": [], "mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0.0, "xtc_probability": 0.0},
    {"id_slot": -1, "n_keep": 0, "return_progress": True, "post_sampling_probs": False, "grammar": ""},
    {"id_slot": 0, "n_keep": 5, "n_discard": 5},
    {"top_n_sigma": -1, "dynatemp_range": 0, "t_max_predict_ms": 0, "lora": [], "json_schema": None},
]


@pytest.mark.parametrize("fields", WITHOUT_EFFECT)
def test_field_without_effect_is_accepted(server: Running, fields: JSON) -> None:
    assert complete(server, **HOT, **fields)["content"] == complete(server, **HOT)["content"]


REFUSED: list[tuple[JSON, str]] = [
    ({"grammar": "root ::= ("}, "grammar"),
    ({"grammar": 'root ::= "a"', "json_schema": {"type": "object"}}, "json_schema"),
    ({"samplers": ["top_k"]}, "samplers"),
    ({"mirostat": 2}, "mirostat"),
    ({"typical_p": 0.5}, "typical_p"),
    ({"tfs_z": 0.5}, "tfs_z"),
    ({"dynatemp_range": 0.5}, "dynatemp_range"),
    ({"dry_multiplier": 0.5}, "dry_multiplier"),
    ({"xtc_probability": 0.5}, "xtc_probability"),
    ({"top_n_sigma": 1.0}, "top_n_sigma"),
    ({"adaptive_target": 0.5}, "adaptive_target"),
    ({"min_keep": 5}, "min_keep"),
    ({"image_data": [{"data": "a", "id": 1}]}, "image_data"),
    ({"multimodal_data": ["a"]}, "multimodal_data"),
    ({"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
    ({"reasoning_budget_tokens": 5}, "reasoning_budget_tokens"),
    ({"repeat_last_n": 64}, "repeat_last_n"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"n_predict": -3}, "n_predict"),
    ({"n_cmpl": 17}, "n_cmpl"),
    ({"n_probs": 21}, "n_probs"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": -2}, "seed"),
    ({"stop": [""]}, "stop.0"),
    ({"logit_bias": [[1]]}, "logit_bias.0"),
    ({"logit_bias": [[1, 2], [1.5, 2]]}, "logit_bias.1"),
    ({"logit_bias": [[1, "a"]]}, "logit_bias.0"),
    ({"logit_bias": {"1": True}}, "logit_bias.0"),
    ({"logit_bias": [[260, 1.0]]}, "logit_bias"),
    ({"logit_bias": [[1, 2], [1, 101]]}, "logit_bias.1"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [260]}, "prompt"),
    ({"prompt": ["a", -1]}, "prompt"),
    ({"prompt": None}, "prompt"),
]


def test_unsupported_or_invalid_field_is_named(server: Running) -> None:
    def check(fields: JSON, param: str) -> None:
        reply = server.post(PATH, {"prompt": "hello", **GREEDY, **fields})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error"), error
        assert param in error["message"]

    assert failures(check, REFUSED) == []


@pytest.mark.parametrize("prompt", ["a" * 600, ["a" * 600, 1], ["a" * 512]])
def test_prompt_longer_than_the_context_has_its_error_type(server: Running, prompt: Any) -> None:
    error = server.post(PATH, {"prompt": prompt, **GREEDY}).json()["error"]
    assert (error["code"], error["type"]) == (400, "exceed_context_size_error")
    assert "context size of 512" in error["message"]
    assert error["n_prompt_tokens"] >= 512 and error["n_ctx"] == 512


def test_error_body() -> None:
    body = error_body(ApiError(503, "no place", code="queue_full"))
    assert body == {"error": {"code": 503, "message": "no place", "type": "unavailable_error"}}


def test_unknown_model_is_refused(server: Running) -> None:
    reply = server.post(PATH, {"prompt": "a", "model": "other"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")


def test_paths_without_v1_are_aliases() -> None:
    rows = [(*dialect.generating, *dialect.converting) for dialect in installed_dialects().values()]
    routes = {route.path: route for row in rows for route in row}
    for alias, path in ALIASES.items():
        assert replace(routes[alias], path=path) == routes[path]


# ---- props


def test_props(server: Running) -> None:
    reply = props(server.opened.model, Occupancy(is_ready=True, num_running=0, max_running=4))
    defaults = reply.pop("default_generation_settings")
    assert reply == {
        "total_slots": 4,
        "model_alias": "tiny",
        "model_path": server.opened.model.file_name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": TEMPLATE,
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "build_info": f"nano-inference {nano_inference.__version__}",
    }
    assert defaults == {
        "n_ctx": 512,
        "params": {
            "n_predict": -1,
            "temperature": 0.8,
            "top_k": 40,
            "top_p": 0.95,
            "min_p": 0.05,
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": -1,
            "n_probs": 0,
        },
    }
    call = ask_llama(LlamaBody(prompt="a"), server.opened.model, ServerConfig(), "")
    params = call.requests[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)


def test_prompts_may_be_objects_with_a_text(server: Running) -> None:
    text = {"prompt_string": "hello"}
    plain = complete(server, prompt="hello", **GREEDY)["content"]
    assert complete(server, prompt=text, **GREEDY)["content"] == plain
    answers = complete(server, prompt=[text, ids("hello"), "hello"], **GREEDY)
    assert [one["content"] for one in answers] == [plain] * 3
    for prompt, field in (
        ({**text, "multimodal_data": ["aa"]}, "prompt.multimodal_data"),
        ([{**text, "multimodal_data": "aa"}], "prompt.0.multimodal_data"),
    ):
        refused = server.post(PATH, {"prompt": prompt})
        assert (refused.status_code, refused.json()["error"]["message"].split()[0]) == (400, field)
    assert server.post(PATH, {"prompt": {"multimodal_data": []}}).status_code == 400
