"""Roles outside OpenAI's API: given to a chat template that writes them, refused if it leaves the message out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.tiny import Running, make_tiny, running

CHAT = "/v1/chat/completions"
KNOWN_ONLY = (
    "{% for one in messages %}{% if one.role in ('user', 'assistant', 'observation') %}"
    "<{{ one.role }}>{{ one.content | trim }}{% endif %}{% endfor %}"
)
"""Leaves out messages of other roles, as templates do."""
QUESTION = {"role": "user", "content": "What is it?"}


def text_of(server: Running, *messages: dict[str, object]) -> str:
    return str(server.post("/apply-template", {"messages": list(messages)}).json()["prompt"])


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/apply-template"])
def test_role_that_the_template_leaves_out_is_refused(tmp_path: Path, path: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with running(make_tiny(tmp_path, template=KNOWN_ONLY)) as server:
        for more in ({}, {"tools": [tool]}):
            body = {"messages": [QUESTION, {"role": "ipython", "content": "3"}], **more}
            refused = server.post(path, body)
            assert refused.status_code == 400
            assert refused.json()["error"]["message"] == "messages.1.role: the chat template has no role 'ipython'"
        assert server.post(path, {"messages": [{"role": "observation", "content": " 3 "}]}).status_code == 200


def test_role_is_written_by_the_template(server: Running) -> None:
    as_text = text_of(server, {"role": "ipython", "content": "3"})
    assert as_text.startswith("<|im_start|>ipython\n3<|im_end|>\n")
    assert as_text == text_of(server, {"role": "ipython", "content": [{"type": "text", "text": "3"}]})
    answers = [
        server.post(CHAT, {"messages": [{"role": role, "content": "3"}], "max_tokens": 2, "return_token_ids": True})
        for role in ("ipython", "user")
    ]
    one, other = (answer.json()["prompt_token_ids"] for answer in answers)
    assert one != other
