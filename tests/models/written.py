"""A tiny model of the commonest family, written once for all files that only read it; and the default model's shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.models.families import make_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny Llama with separate heads of keys and a separate output matrix."""
    directory = tmp_path_factory.mktemp("tiny_llama")
    make_model("llama-ratio1-untied", directory)
    return directory


def smollm2_config() -> transformers.LlamaConfig:
    """Return Transformers' configuration of the default model, SmolLM2 135M, as in its `config.json`."""
    return transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
