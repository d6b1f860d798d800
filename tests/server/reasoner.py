"""A model whose weights are set so that it reasons before it answers or calls a function."""

from __future__ import annotations

from pathlib import Path

from tests.server.scripted import make_following

THOUGHT, ANSWER, PLAIN = "I add. ", "Four.", "Five."
LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
_ASKED, _PLAINLY, _CALLING = "<|ask|>", "<|plain|>", "<|call|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{{ message.content or '' }}\n{% endfor %}{% if tools %}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}"
    f"{{% if enable_thinking is defined and not enable_thinking %}}{_PLAINLY}"
    "{% elif is_opened %}<think>"
    f"{{% elif tools and messages[-1].role != 'tool' %}}{_CALLING}{{% else %}}{_ASKED}{{% endif %}}{{% endif %}}"
)
"""With the variable `is_opened` the prompt ends with the mark that opens reasoning."""


def make_reasoner(directory: Path, *, call: str = LOOK, positions: int = 4096, special_marks: bool = False) -> Path:
    """Write a model that answers `ANSWER` after `THOUGHT`, and writes `call` after other reasoning if there are tools.

    The marks are tokens of their own in answers, and parts of tokens before calls. Without thinking it writes `PLAIN`.
    """
    followers = {
        _ASKED: "<think>",
        "<think>": THOUGHT,
        THOUGHT: "</think>",
        "</think>": f"\n\n{ANSWER}",
        f"\n\n{ANSWER}": "<|im_end|>",
        _PLAINLY: PLAIN,
        PLAIN: "<|im_end|>",
        _CALLING: "<think>Look",
        "<think>Look": " it up.</think>\n",
        " it up.</think>\n": call,
        call: "<|im_end|>",
    }
    marks = ("<think>", "</think>") if special_marks else ()
    return make_following(directory, TEMPLATE, (_ASKED, _PLAINLY, _CALLING, *marks), followers, positions)
