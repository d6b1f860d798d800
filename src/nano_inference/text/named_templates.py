"""Chat templates by name: simple formats that `--chat-template` knows, with the names that llama.cpp gives them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_COMMAND_R = (
    "{{ bos_token }}{% for message in messages %}<|START_OF_TURN_TOKEN|>"
    "{% if message.role == 'assistant' %}<|CHATBOT_TOKEN|>{% else %}<|{{ message.role | upper }}_TOKEN|>{% endif %}"
    "{{ message.content | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)

TEMPLATES: Mapping[str, str] = MappingProxyType({"chatml": _CHATML, "command-r": _COMMAND_R, "llama3": _LLAMA3})
"""Name -> template."""
