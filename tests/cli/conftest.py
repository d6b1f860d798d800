"""Fixtures: a tiny random model with a tokenizer and a chat template, and a clean environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.text.tokenizer_samples import byte_level, save

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights whose end token is <|im_end|>."""
    tokenizer = byte_level()
    directory = save(tokenizer, tmp_path_factory.mktemp("tiny"), eos_token="<|im_end|>", chat_template=TEMPLATE)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32768,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        bos_token_id=None,
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # no two greedy logits are equal
    model.save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def own_logging(restored_logging: None) -> None:
    """Restore the logging that `serve` configures in this process."""


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set one thread, since two are slow on a busy machine, and hide the user's configuration file."""
    monkeypatch.setenv("NANO_INFERENCE_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/no/such/directory")
