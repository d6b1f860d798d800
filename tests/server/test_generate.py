"""vLLM's /inference/v1/generate: fields, refusals, whole replies and streams."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from nano_inference import InferenceEngine
from nano_inference.server.detokenizer import LogprobEntry
from nano_inference.server.dialect import Route
from nano_inference.server.dialects.generate import GenerateBody, GenerateParams, GenerateReply, ask_generate, rank_of
from nano_inference.types import TokenLogprob
from tests.cases import failures
from tests.server.mounted import END_TOKEN, JSON, ended_after, engine_sample, ids, mounted, written
from tests.server.tiny import Running

PATH = "/inference/v1/generate"
ROUTE = Route(path=PATH, body=GenerateBody, ask=ask_generate, reply=GenerateReply, summary="Complete token ids.")
HOT: JSON = {"temperature": 1.5, "seed": 3, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with mounted(tiny_directory, ROUTE) as one:
        yield one


def body_of(sampling: JSON, **fields: Any) -> JSON:
    """Return a body; greedy and short by default."""
    return {"token_ids": ids("hello"), "sampling_params": {"temperature": 0, "max_tokens": 12, **sampling}, **fields}


def generate(server: Running, sampling: JSON, **fields: Any) -> JSON:
    """Return the JSON of a successful POST."""
    reply = server.post(PATH, body_of(sampling, **fields))
    assert reply.status_code == 200, reply.text
    answer: JSON = reply.json()
    return answer


def tokens_of(reply: JSON, index: int = 0) -> list[int]:
    return list(reply["choices"][index]["token_ids"])


# ---- the reply


def test_whole_reply_has_vllms_form(server: Running, engine: InferenceEngine) -> None:
    sample = engine_sample(engine, ids("hello"), max_tokens=2, logprobs=2, prompt_logprobs=1)
    reply = generate(server, {"max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1}, request_id="mine-1", model="tiny")
    assert isinstance(reply.pop("created"), int)
    assert sample.top_logprobs is not None and sample.prompt_top_logprobs is not None

    def entry(token: int, logprob: float, rank: int) -> JSON:
        close = pytest.approx(logprob, abs=1e-5)
        return {"token": f"token_id:{token}", "token_id": token, "logprob": close, "rank": rank, "bytes": None}

    content = [
        {
            **entry(token, logprob, 1),
            "top_logprobs": [entry(one.token, one.logprob, rank) for rank, one in enumerate(top, start=1)],
        }
        for token, logprob, top in zip(sample.completion_tokens, sample.logprobs, sample.top_logprobs, strict=True)
    ]
    prompt = reply.pop("prompt_logprobs")
    assert prompt[0] is None and len(prompt) == len(ids("hello"))
    for token, score, top, row in zip(
        ids("ello"), sample.prompt_logprobs or (), sample.prompt_top_logprobs, prompt[1:], strict=True
    ):
        assert row[str(token)]["logprob"] == pytest.approx(score, abs=1e-5)
        assert row[str(top[0].token)]["rank"] == 1
    assert reply == {
        "request_id": "mine-1",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "token_ids": list(sample.completion_tokens),
                "mask": [1, 1],
                "logprobs": {"content": content},
                "finish_reason": "length",
                "stop_reason": None,
                "weight_versions": [{"version": "0", "start": 0, "end": 2, "number": 0}],
                "lineage": server.opened.model.limits.lineage,
                "routed_experts": None,
                "sampling_mask": None,
            }
        ],
        "kv_transfer_params": None,
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_defaults_equal_vllms(server: Running) -> None:
    reply = server.post(PATH, {"token_ids": [5]}).json()
    assert reply["choices"][0]["logprobs"] is None and reply["prompt_logprobs"] is None
    assert reply["usage"]["completion_tokens"] <= 16 and len(reply["request_id"]) > 8
    unlimited = server.post(PATH, {"token_ids": [5], "sampling_params": {"ignore_eos": True}}).json()
    assert unlimited["usage"]["completion_tokens"] == 16
    room = server.post(PATH, {"token_ids": [5], "sampling_params": {"ignore_eos": True, "max_tokens": None}}).json()
    assert room["usage"]["completion_tokens"] == 511
    params = GenerateParams()
    assert (params.temperature, params.top_p, params.top_k, params.n) == (1.0, 1.0, 0, 1)
    twice = {server.post(PATH, {"token_ids": [5]}).text for _ in range(3)}
    assert len(twice) == 3, "unseeded requests differ"


def merged(chunks: list[JSON]) -> dict[int, JSON]:
    """Return {index: choice} assembled from the chunks of a stream."""
    choices: dict[int, JSON] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices.setdefault(part["index"], {"token_ids": [], "mask": [], "content": []})
            whole["token_ids"] += part["token_ids"]
            whole["mask"] += part["mask"]
            whole["content"] += (part["logprobs"] or {"content": []})["content"]
            for name in ("raw_logprobs", "sampling_mask"):
                if part.get(name) is not None:
                    whole[name] = [*whole.get(name, ()), *part[name]]
            if part["finish_reason"] is not None:
                assert "finish_reason" not in whole, "ends once"
                whole |= {name: part[name] for name in ("finish_reason", "stop_reason", "weight_versions")}
    return choices


@pytest.mark.parametrize(
    "sampling",
    [
        {**HOT, "n": 3, "logprobs": 2},
        {**HOT, "return_raw_logprobs": True, "return_sampling_mask": True, "top_k": 3},
        {"stop": "e", "logprobs": 0},
        {"logit_bias": {str(END_TOKEN): 100.0}},
    ],
)
def test_stream_adds_up_to_the_whole_reply(server: Running, sampling: JSON) -> None:
    reply = generate(server, sampling, cache_salt="whole")
    options = {"include_usage": True}
    events = server.events(
        PATH, body_of(sampling, stream=True, stream_options=options, request_id="mine-2", cache_salt="s")
    )
    assert events[-1] == "[DONE]" and events[-2]["choices"] == []
    usage = {**events[-2]["usage"], "prompt_tokens_details": None}
    assert usage == {**reply["usage"], "prompt_tokens_details": None}
    assert all(one["request_id"] == "mine-2" and one["model"] == "tiny" for one in events[:-1])
    assert all(one["usage"] is None for one in events[:-2])
    choices = merged(events[:-1])
    for choice in reply["choices"]:
        mine = choices.pop(choice["index"])
        content = (choice["logprobs"] or {"content": []})["content"]
        assert mine.pop("content") == content
        names = (*("token_ids", "mask", "finish_reason", "stop_reason", "weight_versions"),)
        names += tuple(name for name in ("raw_logprobs", "sampling_mask") if choice.get(name) is not None)
        assert mine == {name: choice[name] for name in names}
    assert not choices


def test_continuous_usage_counts_the_tokens_so_far(server: Running) -> None:
    body = body_of({**HOT, "n": 3}, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    chunks = server.events(PATH, body)[:-1]
    num_new = [sum(len(choice["token_ids"]) for choice in one["choices"]) for one in chunks]
    assert [one["usage"]["completion_tokens"] for one in chunks] == list(accumulate(num_new))
    assert sum(num_new) == 120
    plain = server.events(PATH, body_of(HOT, stream=True))
    assert all("usage" not in one for one in plain[:-1]) and plain[-2]["choices"]


def test_rank_of_tokens_in_and_outside_the_top() -> None:
    top = (TokenLogprob(7, -0.5), TokenLogprob(9, -1.0))
    assert rank_of(LogprobEntry(9, "", -1.0, top, 0), 2) == 2
    assert rank_of(LogprobEntry(3, "", -4.0, (*top, TokenLogprob(3, -4.0)), 0), 2) is None
    assert rank_of(LogprobEntry(3, "", -4.0, (TokenLogprob(3, -4.0),), 0), 0) is None


# ---- fields


SAMPLING: list[JSON] = [
    {},
    {"temperature": 1.7, "seed": 3},
    {"temperature": 1.5, "seed": 3, "top_p": 0.4},
    {"temperature": 1.5, "seed": 3, "top_k": 2},
    {"temperature": 1.5, "seed": 3, "min_p": 0.5},
    {"repetition_penalty": 3.0},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"logit_bias": {"65": 100.0, "66": 99.9}},
    {"allowed_token_ids": [120, 121, 122]},
    {"ignore_eos": True, "max_tokens": 40},
    {"min_tokens": 12, "logit_bias": {"257": 100.0}},
    {"max_tokens": 1},
    {"max_tokens": 0},
]


@pytest.mark.parametrize("fields", SAMPLING)
def test_tokens_and_logprobs_equal_the_engines(server: Running, engine: InferenceEngine, fields: JSON) -> None:
    choice = generate(server, {"logprobs": 1, **fields})["choices"][0]
    sample = engine_sample(engine, ids("hello"), logprobs=1, **fields)
    assert choice["token_ids"] == list(sample.completion_tokens)
    assert choice["finish_reason"] == sample.finish_reason
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    assert logprobs == pytest.approx(list(sample.logprobs), abs=1e-5)


CHANGES: list[JSON] = [
    {"temperature": 0},
    {"seed": 4},
    {"top_p": 0.3},
    {"top_k": 1},
    {"min_p": 0.9},
    {"repetition_penalty": 3.0},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"logit_bias": {"65": 50.0}},
    {"allowed_token_ids": [1, 2]},
    {"max_tokens": 39},
    {"truncate_prompt_tokens": 2},
    {"ignore_eos": False, "logit_bias": {"257": 100.0}},
]


@pytest.mark.parametrize("change", CHANGES)
def test_each_field_changes_the_sampled_tokens(server: Running, change: JSON) -> None:
    plain = tokens_of(generate(server, HOT))
    assert tokens_of(generate(server, HOT)) == plain
    assert tokens_of(generate(server, {**HOT, **change})) != plain


def test_stop_tokens_stop_strings_and_bad_words(server: Running) -> None:
    plain = tokens_of(generate(server, HOT))
    at = next(index for index, token in enumerate(plain) if token not in plain[:index] and index > 2)
    stopped = generate(server, {**HOT, "stop_token_ids": [plain[at]]})["choices"][0]
    assert (stopped["token_ids"], stopped["stop_reason"]) == (plain[: at + 1], plain[at])
    letters = {"allowed_token_ids": ids("ab"), "temperature": 1.5, "seed": 1, "max_tokens": 60}
    stopped = generate(server, {**letters, "stop": "abb"})["choices"][0]
    assert stopped["stop_reason"] == "abb" and stopped["token_ids"][-3:] == ids("abb")
    assert stopped["finish_reason"] == "stop"
    shown = generate(server, {**letters, "stop": ["abb"], "include_stop_str_in_output": True})["choices"][0]
    assert shown["token_ids"] == stopped["token_ids"], "ids keep every token either way"
    free = tokens_of(generate(server, {**letters, "bad_words": ["a"]}))
    assert free == ids("b") * 60
    late = generate(server, {**letters, "stop": "abb", "min_tokens": 50})["choices"][0]
    assert len(late["token_ids"]) >= 50
    special = {"logit_bias": {"256": 100.0}, "stop": "_start|><|im", "max_tokens": 6}
    assert generate(server, special)["choices"][0]["finish_reason"] == "length"
    seen = generate(server, {**special, "skip_special_tokens": False})["choices"][0]
    assert (seen["finish_reason"], seen["token_ids"]) == ("stop", [256, 256])


def test_request_fields(server: Running) -> None:
    long = ids("a long prompt that fills more than one block of the cache" * 2)
    for salt, cached in (("one", False), ("one", True), ("two", False)):
        reply = generate(server, {}, token_ids=long, cache_salt=salt)
        assert (reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) is cached
    fresh = generate(server, {"skip_reading_prefix_cache": True}, token_ids=long, cache_salt="one")
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert generate(server, {}, return_token_ids=True)["prompt_token_ids"] == ids("hello")
    assert "prompt_token_ids" not in generate(server, {})
    chunks = server.events(PATH, body_of({}, stream=True, return_token_ids=True))[:-1]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [ids("hello")] + [None] * (len(chunks) - 1)
    assert server.post(PATH, body_of({}, model="other")).status_code == 404
    masked = generate(server, {**HOT, "top_k": 2, "return_sampling_mask": True, "return_raw_logprobs": True})
    choice = masked["choices"][0]
    assert [len(mask) for mask in choice["sampling_mask"]] == [2] * 40 and len(choice["raw_logprobs"]) == 40
    assert len(generate(server, {**HOT, "n": 3})["choices"]) == 3


def test_answer_has_the_requested_structure(server: Running) -> None:
    structure = {"regex": "[ab]{4}", "json": None, "disable_fallback": False}
    choice = generate(server, {"structured_outputs": structure, "logprobs": 0})["choices"][0]
    assert re.fullmatch("[ab]{4}", written(choice["token_ids"])) and choice["finish_reason"] == "stop"
    assert all(one["logprob"] <= 0 for one in choice["logprobs"]["content"])


WITHOUT_EFFECT: list[JSON] = [
    {"detokenize": True},
    {"detokenize": False},
    {"flat_logprobs": True},
    {"skip_clone": True},
    {"output_kind": 2},
    {"spaces_between_special_tokens": True},
    {"spaces_between_special_tokens": False, "stream_interval": 5, "length_penalty": 0.5},
    {"extra_args": None},
    {"structured_outputs": None},
    {"structured_outputs": {"json": None, "disable_fallback": False}},
]


@pytest.mark.parametrize("fields", WITHOUT_EFFECT)
def test_field_without_effect_is_accepted(server: Running, fields: JSON) -> None:
    assert tokens_of(generate(server, {**HOT, **fields})) == tokens_of(generate(server, HOT))


def test_fields_of_a_render_step_are_accepted(server: Running) -> None:
    more = {"token_offsets": [[0, 1]] * 5, "assistant_tokens_mask": [0] * 5, "features": None, "priority": 0}
    assert tokens_of(generate(server, HOT, **more)) == tokens_of(generate(server, HOT))


REFUSED: list[tuple[JSON, JSON, str]] = [
    ({}, {"features": {"mm_hashes": {}, "mm_placeholders": {}}}, "features"),
    ({}, {"content_parts": [{"type": "image_url", "url": "x"}]}, "content_parts"),
    ({}, {"lora_request": {"a": 1}}, "lora_request"),
    ({}, {"token_ids": []}, "token_ids"),
    ({}, {"token_ids": [-1]}, "token_ids.0"),
    ({}, {"token_ids": [260]}, "token_ids"),
    ({}, {"token_ids": [1] * 600}, "token_ids"),
    ({}, {"token_ids": "hello"}, "token_ids"),
    ({}, {"cache_salt": "a@b"}, "cache_salt"),
    ({}, {"request_id": ""}, "request_id"),
    ({}, {"stream_options": {"include_usage": True}}, "stream_options"),
    ({"structured_outputs": {"structural_tag": "{}"}}, {}, "sampling_params.structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "((["}}, {}, "sampling_params.structured_outputs.regex"),
    ({"max_new_tokens": 5}, {}, "sampling_params.max_new_tokens"),
    ({"temperature": -1}, {}, "sampling_params.temperature"),
    ({"top_p": 0}, {}, "sampling_params.top_p"),
    ({"n": 17}, {}, "sampling_params.n"),
    ({"logprobs": 21}, {}, "sampling_params.logprobs"),
    ({"logprobs": -1}, {}, "sampling_params.logprobs"),
    ({"prompt_logprobs": 21}, {}, "sampling_params.prompt_logprobs"),
    ({"prompt_logprobs": 1}, {"stream": True}, "sampling_params.prompt_logprobs"),
    ({"min_tokens": 13}, {}, "sampling_params.min_tokens"),
    ({"stop_token_ids": [260]}, {}, "sampling_params.stop_token_ids"),
    ({"allowed_token_ids": []}, {}, "sampling_params.allowed_token_ids"),
    ({"logit_bias": {"260": 1.0}}, {}, "sampling_params.logit_bias"),
    ({"output_kind": 3}, {}, "sampling_params.output_kind"),
    ({"output_kind": 0}, {"stream": True}, "sampling_params.output_kind"),
    ({"output_kind": 2}, {"stream": True}, "sampling_params.output_kind"),
    ({"stop": "a", "detokenize": False}, {}, "sampling_params.stop"),
    ({"best_of": 2}, {}, "sampling_params.best_of"),
    ({"truncation_side": "both"}, {}, "sampling_params.truncation_side"),
    ({"truncate_prompt_tokens": 0}, {}, "sampling_params.truncate_prompt_tokens"),
    ({"logprob_token_ids": [1]}, {}, "sampling_params.logprob_token_ids"),
    ({"logprob_token_ids": [260], "logprobs": 1}, {}, "sampling_params.logprob_token_ids"),
    ({"logprobs": -1}, {}, "sampling_params.logprobs"),
    ({"logits_processors": ["x"]}, {}, "sampling_params.logits_processors"),
    ({"guided_decoding": {"regex": "a"}}, {}, "sampling_params.guided_decoding"),
    ({"thinking_token_budget": 5}, {}, "sampling_params.thinking_token_budget"),
    ({"use_beam_search": True}, {}, "sampling_params.use_beam_search"),
]


def test_unsupported_or_invalid_field_is_named(server: Running) -> None:
    def check(sampling: JSON, fields: JSON, param: str) -> None:
        reply = server.post(PATH, body_of(sampling, **fields))
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param), error
        assert param in error["message"] or "size of 512" in error["message"]

    assert failures(check, REFUSED) == []


# ---- ends


def test_aborted_request_returns_its_tokens_so_far(server: Running) -> None:
    sampling = {"temperature": 1.0, "seed": 1, "max_tokens": 200, "ignore_eos": True, "logprobs": 1}
    whole = generate(server, sampling)["choices"][0]
    reply = ended_after(server, 20, lambda: generate(server, sampling, request_id="gone"))
    assert reply["request_id"] == "gone"
    (choice,) = reply["choices"]
    count = len(choice["token_ids"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", None)
    assert 0 < count < 200 and choice["token_ids"] == whole["token_ids"][:count]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]
