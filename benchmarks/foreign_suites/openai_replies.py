"""Values for OpenAI's tests in place of those that only a server of recorded replies accepts."""

from __future__ import annotations

import os
import re
from pathlib import Path

import openai

KEY = "My API Key"
"""The key of the tests: replies are stored for the key of their request."""
_SAMPLES = (
    (r'"(resp_677efb5139a88190b512bc3fef8e535d|response_id)"', "stored()"),
    (r"(\.create|\.count)\(\)", r'\1(input="string")'),
    (r"(\.create\(\s+stream=True,)(\s+\))", r'\1 input="string",\2'),
    (r"(from __future__ import annotations\n)", r"\1\nfrom openai_replies import stored\n"),
)
"""Pattern in the sources of the tests -> what replaces it."""


def fill_in(file: Path) -> None:
    """Change the tests of responses in `file`: a stored reply for each id, and an input where there is none."""
    text = file.read_text(encoding="utf-8")
    for pattern, sample in _SAMPLES:
        text = re.sub(pattern, sample, text)
    file.write_text(text, encoding="utf-8")


def stored() -> str:
    """Return the id of a new stored reply."""
    with openai.OpenAI(base_url=os.environ["TEST_API_BASE_URL"], api_key=KEY) as client:
        return client.responses.create(model="any", input="string", max_output_tokens=16).id
