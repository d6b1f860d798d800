"""SGLang's /generate and /health_generate: fields, refusals, whole replies and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference import InferenceEngine
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialect import Route
from nano_inference.server.dialects.sglang import SglangBody, SglangReply, ask_health, ask_sglang, next_event
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.transcript import transcripts_of
from tests.cases import failures
from tests.server.mounted import END_TOKEN, JSON, ended_after, engine_sample, ids, mounted, written
from tests.server.tiny import Running

pytestmark = pytest.mark.slow

PATH = "/generate"
ROUTE = Route(path=PATH, body=SglangBody, ask=ask_sglang, reply=SglangReply, summary="Generate as SGLang does.")
HEALTH = Route(
    path="/health_generate",
    body=SglangBody,
    ask=lambda body, model, config, salt: ask_health(model, config),
    reply=SglangReply,
    summary="Sample one token.",
)
HOT: JSON = {"temperature": 1.5, "sampling_seed": 3, "max_new_tokens": 40, "ignore_eos": True}
GREEDY: JSON = {"temperature": 0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with mounted(tiny_directory, ROUTE, HEALTH) as one:
        yield one


@pytest.fixture(scope="module")
def model(server: Running) -> ServedModel:
    return server.opened.model


def generate(server: Running, params: Any = GREEDY, **fields: Any) -> Any:
    """Return the JSON of a successful POST."""
    prompt = {} if "text" in fields else {"input_ids": ids("hello")}
    reply = server.post(PATH, {**prompt, "sampling_params": params, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def without_latency(reply: Any) -> Any:
    """Return replies without their `e2e_latency`, which must be present."""
    for one in reply if isinstance(reply, list) else [reply]:
        assert 0 < one["meta_info"].pop("e2e_latency") < 600
    return reply


def test_logprob_options(server: Running) -> None:
    assert not [name for name in generate(server)["meta_info"] if "logprobs" in name]
    assert not [
        name for name in generate(server, top_logprobs_num=2, logprob_start_len=0)["meta_info"] if "logp" in name
    ]
    plain = generate(server, return_logprob=True)["meta_info"]
    assert [name for name in plain if "logprobs" in name] == ["output_token_logprobs"]
    whole = generate(server, return_logprob=True, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
    part = generate(server, return_logprob=True, logprob_start_len=2)["meta_info"]["input_token_logprobs"]
    assert part == [[None, *whole[2][1:]], *whole[3:]]
    assert generate(server, return_logprob=True, logprob_start_len=5)["meta_info"]["input_token_logprobs"] == []
    named = generate(server, return_logprob=True, return_text_in_logprobs=True, logprob_start_len=0)["meta_info"]
    assert "".join(text for _, _, text in named["input_token_logprobs"]) == "hello"
    assert [one[1] for one in named["output_token_logprobs"]] == [one[1] for one in plain["output_token_logprobs"]]
    assert all(isinstance(text, str) for _, _, text in named["output_token_logprobs"])
    hot = generate(server, HOT, return_logprob=True, top_logprobs_num=2)["meta_info"]
    assert [len(row) for row in hot["output_top_logprobs"]] == [2] * 40
    own = zip(hot["output_token_logprobs"], hot["output_top_logprobs"], strict=True)
    assert any(token not in [other for _, other, _ in row] for (_, token, _), row in own)


def test_named_tokens_have_log_probabilities_of_their_own(server: Running) -> None:
    options: JSON = {"return_logprob": True, "top_logprobs_num": 2}
    plain = generate(server, HOT, **options)["meta_info"]
    named = [plain["output_top_logprobs"][0][1][1], 7]
    meta = generate(server, HOT, **options, token_ids_logprob=named)["meta_info"]
    rows = meta["output_token_ids_logprobs"]
    assert [[token for _, token, _ in row] for row in rows] == [named] * 40
    assert rows[0][0] == plain["output_top_logprobs"][0][1]
    assert all(value < 0 for row in rows for value, _, _ in row)
    assert meta["output_top_logprobs"] == plain["output_top_logprobs"]
    assert "input_token_ids_logprobs" not in meta, "named tokens are of the output"
    each = generate(server, HOT, **options, input_ids=[ids("hello"), [5]], token_ids_logprob=[named, []])
    assert each[0]["meta_info"]["output_token_ids_logprobs"] == rows
    assert "output_token_ids_logprobs" not in each[1]["meta_info"]
    assert "output_token_ids_logprobs" not in generate(server, HOT, token_ids_logprob=named)["meta_info"]


def test_finish_reason_is_an_object(server: Running) -> None:
    ending = {"logit_bias": {str(END_TOKEN): 100.0}, "temperature": 0}
    reply = generate(server, ending)
    assert (reply["text"], reply["output_ids"]) == ("", [END_TOKEN])
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": END_TOKEN}
    letters = {"logit_bias": {str(token): 100.0 for token in ids("ab")}, "temperature": 1.5, "sampling_seed": 1}
    reply = generate(server, {**letters, "stop": ["abb"]})
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "abb"}
    assert reply["text"] + "abb" == written(reply["output_ids"])
    kept = generate(server, {**letters, "stop": ["abb"], "no_stop_trim": True})
    assert kept["text"] == reply["text"] + "abb" and kept["output_ids"] == reply["output_ids"]
    reply = generate(server, {**letters, "stop_token_ids": ids("b")})
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids("b")[0]}


def test_defaults_equal_sglangs(server: Running, model: ServedModel) -> None:
    reply = server.post(PATH, {"input_ids": [5], "sampling_params": {"ignore_eos": True}}).json()
    assert reply["meta_info"]["completion_tokens"] == 128
    room = {"ignore_eos": True, "max_new_tokens": None}
    reply = server.post(PATH, {"input_ids": [5], "sampling_params": room}).json()
    assert reply["meta_info"]["completion_tokens"] == 511
    assert len({tuple(generate(server, {"ignore_eos": True})["output_ids"]) for _ in range(3)}) == 3, "unseeded"
    unlimited = SglangBody.model_validate(
        {"input_ids": [[5], [5, 6]], "sampling_params": {"max_new_tokens": None, "n": 2}}
    )
    assert ask_sglang(unlimited, model, ServerConfig(), "").num_tokens == (1 + 2 * 511) + (2 + 2 * 510)
    call = ask_sglang(SglangBody(input_ids=[5]), model, ServerConfig(), "")
    params = call.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 128)


def test_list_of_prompts_returns_a_list(server: Running) -> None:
    texts = ["hello", "other text", "third"]
    single = [without_latency(generate(server, text=text, extra_key="lists")) for text in texts]
    assert single[0]["output_ids"] == generate(server)["output_ids"]
    many = without_latency(generate(server, text=texts, rid="batch", extra_key="lists2"))
    assert [one["meta_info"]["id"] for one in many] == ["batch_0", "batch_1", "batch_2"]
    by_ids = without_latency(
        generate(server, input_ids=[ids(text) for text in texts], rid=["a", "b", "c"], extra_key="l3")
    )
    assert [one["meta_info"]["id"] for one in by_ids] == ["a", "b", "c"]
    for replies in (many, by_ids):
        assert [(one["text"], one["output_ids"]) for one in replies] == [(o["text"], o["output_ids"]) for o in single]
    assert isinstance(generate(server, text=["hello"]), list)


def test_prompts_may_have_different_parameters(server: Running) -> None:
    letters = {"logit_bias": {str(token): 100.0 for token in ids("ab")}, "temperature": 1.5, "sampling_seed": 1}
    params: list[JSON] = [
        letters,
        {**letters, "stop": "abb"},
        {**letters, "stop": "ba"},
        {**HOT, "max_new_tokens": None},
        GREEDY,
        GREEDY,
    ]
    logprobs = [False, True, True, False, True, True]
    tops = [1, 1, 0, 3, 2, 0]
    starts = [-1, 0, 2, 0, 0, -1]
    fields = {"return_logprob": logprobs, "top_logprobs_num": tops, "logprob_start_len": starts}
    many = generate(server, params, input_ids=[ids("hello")] * 6, **fields, extra_key="own")
    for index, one in enumerate(many):
        mine = {name: value[index] for name, value in fields.items()}
        alone = generate(server, params[index], **mine)
        for reply in (one, alone):
            for name in ("id", "e2e_latency", "cached_tokens"):
                del reply["meta_info"][name]
        assert list(one["meta_info"]) == list(alone["meta_info"])
        assert (one["text"], one["output_ids"]) == (alone["text"], alone["output_ids"])
        for name in ("finish_reason", "completion_tokens", "mask"):
            assert one["meta_info"][name] == alone["meta_info"][name]
        for name in ("output_top_logprobs", "input_token_logprobs", "input_top_logprobs"):
            rows, others = one["meta_info"].get(name), alone["meta_info"].get(name)
            assert json.dumps(without_logprobs(rows)) == json.dumps(without_logprobs(others))
    assert many[3]["meta_info"]["completion_tokens"] == 507


def without_logprobs(value: Any) -> Any:
    """Return entries without log-probabilities, whose last bit depends on the batch."""
    if isinstance(value, list):
        return [without_logprobs(one) for one in value]
    return None if isinstance(value, float) else value


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        (HOT, {"return_logprob": True, "top_logprobs_num": 2, "return_sampling_mask": True}),
        ({**HOT, "n": 2}, {"text": ["one", "two"]}),
        ({**GREEDY, "stop": "e"}, {"return_logprob": True, "return_text_in_logprobs": True}),
        ({**HOT, "max_new_tokens": 300}, {}),
    ],
)
def test_each_stream_event_contains_all_text_so_far(server: Running, params: JSON, fields: JSON) -> None:
    whole = generate(server, params, **fields, rid="same", extra_key="whole")
    expected = without_latency(whole if isinstance(whole, list) else [whole])
    prompt = {} if "text" in fields else {"input_ids": ids("hello")}
    body = {**prompt, "sampling_params": params, **fields, "stream": True, "rid": "same", "extra_key": "stream"}
    events = server.events(PATH, body)
    assert events[-1] == "[DONE]"
    last: dict[int, JSON] = {}
    for event in without_latency(events[:-1]):
        index = event.pop("index", 0)
        before = last.get(index)
        if before is not None:
            assert before["meta_info"]["finish_reason"] is None
            assert event["text"].startswith(before["text"])
            count = len(before["output_ids"])
            assert event["output_ids"][:count] == before["output_ids"] and len(event["output_ids"]) >= count
            earlier = before["meta_info"].get("output_token_logprobs")
            assert earlier is None or event["meta_info"]["output_token_logprobs"][:count] == earlier
        last[index] = event
    assert all(("index" in event) is isinstance(whole, list) for event in server.events(PATH, body)[:-1])
    for one in [*expected, *last.values()]:
        del one["meta_info"]["cached_tokens"]
    assert [last[index] for index in range(len(expected))] == expected


def test_total_event_size_is_linear_in_the_answer() -> None:
    sizes = [1]
    while (after := next_event(sizes[-1])) <= 30_000:
        sizes.append(after)
    assert sizes[:127] == list(range(1, 128)) and sizes[-1] > 29_000
    assert sum(sizes) < 80 * 30_000


def test_events_with_little_new_text_are_skipped(model: ServedModel) -> None:
    call = ask_sglang(SglangBody(input_ids=[5], stream=True), model, ServerConfig(), "")
    (transcript,) = transcripts_of(call)
    reply = SglangReply(call, [transcript])

    def part(piece: DecodedDelta) -> bytes:
        transcript.append(piece)
        return reply.part(transcript, piece)

    piece = DecodedDelta("a", (65,), (), None, None)
    sent = [bool(part(piece)) for _ in range(400)]
    assert all(sent[:128]) and 60 < sum(sent[128:]) < 140
    assert part(piece._replace(finish_reason="length"))


SAMPLING: list[tuple[JSON, JSON]] = [
    ({}, {}),
    ({"temperature": 1.7, "sampling_seed": 3}, {"temperature": 1.7, "seed": 3}),
    ({"temperature": 1.5, "sampling_seed": 3, "top_p": 0.4}, {"temperature": 1.5, "seed": 3, "top_p": 0.4}),
    ({"temperature": 1.5, "sampling_seed": 3, "top_k": 2}, {"temperature": 1.5, "seed": 3, "top_k": 2}),
    ({"temperature": 1.5, "sampling_seed": 3, "min_p": 0.5}, {"temperature": 1.5, "seed": 3, "min_p": 0.5}),
    ({"repetition_penalty": 3.0}, {"repetition_penalty": 3.0}),
    ({"presence_penalty": 2.0}, {"presence_penalty": 2.0}),
    ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
    ({"logit_bias": {"65": 100.0}}, {"logit_bias": {65: 100.0}}),
    ({"min_new_tokens": 12, "logit_bias": {"257": 100.0}}, {"min_tokens": 12, "logit_bias": {257: 100.0}}),
    ({"max_new_tokens": 0}, {"max_tokens": 0}),
    ({"ignore_eos": True, "max_new_tokens": 60}, {"ignore_eos": True, "max_tokens": 60}),
]


@pytest.mark.parametrize(("fields", "params"), SAMPLING)
def test_tokens_and_logprobs_equal_the_engines(
    server: Running, engine: InferenceEngine, fields: JSON, params: JSON
) -> None:
    reply = generate(server, {**GREEDY, **fields}, return_logprob=True)
    sample = engine_sample(engine, ids("hello"), **params)
    assert reply["output_ids"] == list(sample.completion_tokens)
    logprobs = [logprob for logprob, _, _ in reply["meta_info"]["output_token_logprobs"]]
    assert logprobs == pytest.approx(list(sample.logprobs), abs=1e-5)
    assert reply["meta_info"]["finish_reason"]["type"] == sample.finish_reason


REFUSED: list[tuple[Any, JSON, str]] = [
    ({}, {"return_logprob": True, "token_ids_logprob": [260]}, "token_ids_logprob"),
    ({}, {"return_logprob": True, "token_ids_logprob": [1], "logprob_start_len": 0}, "token_ids_logprob"),
    ({}, {"return_logprob": True, "token_ids_logprob": [[1], [2]]}, "token_ids_logprob"),
    ({"regex": "(((["}, {}, "sampling_params.regex"),
    ({"regex": "a", "ebnf": "b"}, {}, "sampling_params.ebnf"),
    ({"stop_regex": "a(?=b)"}, {}, "sampling_params.stop_regex"),
    ({"structural_tag": "{}"}, {}, "sampling_params.structural_tag"),
    ({"custom_params": {"return_top_p_token_ids": 1}}, {}, "sampling_params.custom_params.return_top_p_token_ids"),
    ({"beam_width": 2}, {}, "sampling_params.beam_width"),
    ({"thinking_budget": 2}, {}, "sampling_params.thinking_budget"),
    ({"max_tokens": 4}, {}, "sampling_params.max_tokens"),
    ({"min_new_tokens": 13}, {}, "sampling_params.min_new_tokens"),
    ({"max_new_tokens": -1}, {}, "sampling_params.max_new_tokens"),
    ({"temperature": -1}, {}, "sampling_params.temperature"),
    ({"stop_token_ids": [260]}, {}, "sampling_params.stop_token_ids"),
    ({"n": 17}, {}, "sampling_params.n"),
    ([GREEDY], {"input_ids": [[1], [2]]}, "sampling_params"),
    ([GREEDY, {"min_new_tokens": 200}], {"input_ids": [[1], [2]]}, "sampling_params.1.min_new_tokens"),
    ([GREEDY, {"top_p": 7}], {"input_ids": [[1], [2]]}, "sampling_params.1.top_p"),
    ([GREEDY, {"n": 2}], {"input_ids": [[1], [2]]}, "sampling_params.n"),
    ([GREEDY, {"no_stop_trim": True}], {"input_ids": [[1], [2]]}, "sampling_params.no_stop_trim"),
    ([GREEDY, {"skip_special_tokens": False}], {"input_ids": [[1], [2]]}, "sampling_params.skip_special_tokens"),
    ({}, {"text": "a"}, "input_ids"),
    ({}, {"input_ids": None}, "input_ids"),
    ({}, {"input_ids": []}, "input_ids"),
    ({}, {"input_ids": [260]}, "input_ids"),
    ({}, {"input_ids": None, "text": "a" * 600}, "text"),
    ({}, {"rid": ["a", "b"]}, "rid"),
    ({}, {"rid": ["a", "a"], "input_ids": [[1], [2]]}, "rid"),
    ({}, {"return_logprob": [True, True]}, "return_logprob"),
    ({}, {"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ({}, {"return_logprob": True, "logprob_start_len": 6}, "logprob_start_len"),
    ({}, {"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ({}, {"return_logprob": True, "logprob_start_len": 0, "stream": True}, "logprob_start_len"),
    ({}, {"extra_key": "a@b"}, "extra_key"),
]


def test_unsupported_or_invalid_field_is_named(server: Running) -> None:
    def check(params: Any, fields: JSON, param: str) -> None:
        params = params if isinstance(params, list) else {**GREEDY, **params}
        reply = server.post(PATH, {"input_ids": ids("hello"), "sampling_params": params, **fields})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param), error
        assert param.rpartition(".")[2] in error["message"] or "size of 512" in error["message"]

    assert failures(check, REFUSED) == []


def test_call_names_are_the_rids(model: ServedModel) -> None:
    def names(**fields: Any) -> set[str]:
        return set(ask_sglang(SglangBody(**fields), model, ServerConfig(), "").names)

    assert names(input_ids=[1], rid="a") == {"a"}
    assert names(input_ids=[[1], [2]], rid=["a", "b"]) == {"a", "b"}
    assert names(input_ids=[[1], [2]], rid="a") == {"a", "a_0", "a_1"}
    with pytest.raises(ApiError):
        names(input_ids=[[1], [2]], rid=["a", "a"])


def test_resubmitted_aborted_sample_equals_the_uninterrupted_one(server: Running) -> None:
    params = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 120, "ignore_eos": True}
    whole = generate(server, params, return_logprob=True)
    part = ended_after(server, 30, lambda: generate(server, params, return_logprob=True))
    done = part["output_ids"]
    assert part["meta_info"]["finish_reason"] == {"type": "abort", "message": "the request was aborted"}
    assert 0 < len(done) < 120 and done == whole["output_ids"][: len(done)]
    assert len(part["meta_info"]["output_token_logprobs"]) == len(done)
    more = {**params, "max_new_tokens": 120 - len(done)}
    rest = generate(server, more, input_ids=ids("hello") + done, return_logprob=True)
    assert done + rest["output_ids"] == whole["output_ids"]
    expected = [one[0] for one in whole["meta_info"]["output_token_logprobs"]]
    again = [one[0] for reply in (part, rest) for one in reply["meta_info"]["output_token_logprobs"]]
    assert again == pytest.approx(expected, abs=1e-5)


def test_health_generate_samples_one_token(server: Running) -> None:
    reply = server.post("/health_generate", {})
    assert reply.status_code == 200 and reply.json()["meta_info"]["completion_tokens"] == 1
