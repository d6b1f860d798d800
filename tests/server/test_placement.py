"""What the proxy's router sees of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nano_inference.server.front.placement import DEFAULT_OUTPUT, MAX_COST, Placement, placement_of


def of(body: Any, session: bytes | None = None) -> Placement:
    headers = [] if session is None else [(b"x-session-id", session)]
    return placement_of(headers, body if isinstance(body, bytes) else json.dumps(body).encode())


def common(first: Placement, second: Placement) -> int:
    pairs = zip(first.tokens, second.tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first.tokens), len(second.tokens)))


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize("field", ["prompt", "input_ids", "token_ids", "prompt_token_ids"])
def test_token_ids_are_routed_as_they_are(field: str) -> None:
    assert list(of({field: [5, 6, 7], "max_tokens": 10}).tokens) == [5, 6, 7]


def test_the_first_of_several_prompts_counts() -> None:
    assert list(of({"prompt": [[1, 2], [3]]}).tokens) == [1, 2]
    assert of({"prompt": ["abc", "d"]}).tokens == b"abc"


def test_messages_share_the_prefix_of_their_conversation() -> None:
    first, second = of({"messages": talk("question")}), of({"messages": talk("question", "answer", "more")})
    assert common(first, second) >= len("question")
    assert first.session == second.session and first.session is not None
    assert of({"messages": talk("other")}).session != first.session


def test_a_system_field_and_tools_precede_the_messages() -> None:
    tokens = bytes(of({"system": "be brief", "tools": [{"a": 1}], "messages": talk("q")}).tokens)
    assert tokens.index(b"be brief") < tokens.index(b"q")


@pytest.mark.parametrize(
    ("body", "session"),
    [({"prompt": "a", "prompt_cache_key": "k"}, "k"), ({"prompt": "a", "prompt_cache_key": 5}, None)],
)
def test_session_of_the_body(body: Any, session: str | None) -> None:
    assert of(body).session == session
    assert of(body, b"header").session == "header"
    assert len(of(body, b"x" * 1000).session or "") == 256


@pytest.mark.parametrize(
    ("body", "cost"),
    [
        ({"prompt": [1] * 8, "max_tokens": 10}, 19),
        ({"prompt": [1] * 8, "max_tokens": 10, "n": 4}, 49),
        ({"prompt": "x" * 40, "n_predict": 5}, 16),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 7, "n": 2}}, 16),
        ({"prompt": [1], "max_tokens": -1, "n": True}, 2 + DEFAULT_OUTPUT),
        ({"prompt": [1], "max_tokens": 10**30, "n": 10**30}, MAX_COST),
    ],
)
def test_cost_is_prompt_and_output_tokens(body: Any, cost: int) -> None:
    assert of(body).cost == cost


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, {"prompt": [2**80, -1]}, {"messages": [5]}, {"prompt": {"a": 1}}],
)
def test_any_body_can_be_routed(body: Any) -> None:
    placement = of(body)
    assert placement.cost >= 1 and all(0 <= token < 2**62 for token in placement.tokens)
