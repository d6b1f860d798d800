"""`model_config` compared with the models that transformers builds from the same config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nano_inference.loading.fields import Fields, read_json
from nano_inference.loading.hf_config import model_config
from nano_inference.models.config import ModelConfig
from nano_inference.models.families import program_of
from nano_inference.models.qwen35 import DeltaTerms
from nano_inference.models.rope import frequencies
from nano_inference.types import ModelError
from tests.loading.tiny_models import COMMON, FAMILIES, make_config

LLAMA = {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "none": {},
    "null": {"rope_theta": 5e5, "rope_scaling": None},
    "linear": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
    "llama3 new keys": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 64}},
    "llama3 own length": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "original_max_position_embeddings": 32},
    "llama3 no length": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "yarn null factor": {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 64}},
    "yarn options": {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
            "attention_factor": 1.25,
        },
    },
    "yarn mscale": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        }
    },
}


def ours(directory: Path) -> ModelConfig:
    generation = directory / "generation_config.json"
    return model_config(read_json(directory / "config.json"), read_json(generation) if generation.is_file() else None)


def written(directory: Path, values: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def theirs(directory: Path) -> Any:
    """Return the model that transformers builds, without memory for weights."""
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model


def assert_matches(config: ModelConfig, model: Any) -> None:
    """Assert that the configuration agrees with transformers' model."""
    their, decoder = model.config, model.model
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["model.embed_tokens.weight"] == (config.vocab_size, config.hidden_size)
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (config.intermediate_size, config.hidden_size)
    assert ("lm_head.weight" in shapes) == (not config.tie_embeddings)
    assert len(decoder.layers) == config.num_layers
    assert ("model.layers.0.self_attn.q_norm.weight" in shapes) == config.qk_norm
    assert ("model.layers.0.self_attn.q_proj.bias" in shapes) == config.qkv_bias
    assert ("model.layers.0.self_attn.o_proj.bias" in shapes) == config.out_bias
    assert ("model.layers.0.mlp.up_proj.bias" in shapes) == config.mlp_bias
    assert config.norm_eps == their.rms_norm_eps
    assert config.attention_softcap == getattr(their, "attn_logit_softcapping", None)
    assert config.logits_softcap == getattr(their, "final_logit_softcapping", None)
    assert config.embedding_scale == getattr(decoder.embed_tokens, "scalar_embed_scale", None)
    for layer, decoder_layer in zip(config.layers, decoder.layers, strict=True):
        attention = decoder_layer.self_attn
        assert shapes["model.layers.0.self_attn.q_proj.weight"][0] == config.num_heads * config.head_dim
        assert shapes["model.layers.0.self_attn.k_proj.weight"][0] == config.num_kv_heads * config.head_dim
        assert attention.head_dim == config.head_dim
        assert math.isclose(attention.scaling, config.scale)
        assert layer.window == getattr(attention, "sliding_window", getattr(their, "sliding_window", None))
        assert (layer.rope is not None) == bool(getattr(attention, "use_rope", True))


def assert_rotation_matches(config: ModelConfig, directory: Path) -> None:
    """Assert that each layer's rotary frequencies equal those of transformers."""
    their = transformers.AutoConfig.from_pretrained(directory)
    rotary = type(theirs(directory).model.rotary_emb)(their)
    for index, layer in enumerate(config.layers):
        if layer.rope is None:
            continue
        prefix = f"{their.layer_types[index]}_" if hasattr(rotary, "full_attention_inv_freq") else ""
        frequency, scale = frequencies(config.ropes[layer.rope])
        torch.testing.assert_close(frequency, getattr(rotary, f"{prefix}inv_freq"), rtol=1e-6, atol=0)
        assert math.isclose(scale, getattr(rotary, f"{prefix}attention_scaling"))


@pytest.mark.parametrize("family", FAMILIES)
def test_config_matches_transformers(family: str, tmp_path: Path) -> None:
    make_config(family).save_pretrained(tmp_path)
    config = ours(tmp_path)
    assert_matches(config, theirs(tmp_path))
    assert_rotation_matches(config, tmp_path)
    assert (config.eos_token_ids, config.bos_token_id, config.max_positions) == ((2,), 1, 256)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_without_layer_types_matches_transformers(family: str, tmp_path: Path) -> None:
    make_config(family).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    config = ours(tmp_path)
    for name in ("layer_types", "no_rope_layers"):
        values.pop(name, None)
    assert ours(written(tmp_path, values)) == config
    assert_matches(config, theirs(tmp_path))


@pytest.mark.parametrize("name", ROPES)
def test_rope_scalings_match_transformers(name: str, tmp_path: Path) -> None:
    written(tmp_path, {**LLAMA, **ROPES[name]})
    assert_rotation_matches(ours(tmp_path), tmp_path)


def test_old_gemma3_keys_scale_only_full_layers(tmp_path: Path) -> None:
    old = {
        **COMMON,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    config = ours(written(tmp_path, old))
    assert_matches(config, theirs(tmp_path))
    assert_rotation_matches(config, tmp_path)
    assert [layer.window for layer in config.layers] == [24, 24, None] * 2 + [24, 24]
    assert {config.ropes[layer.rope or 0].kind for layer in config.layers if layer.window} == {"default"}


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("llama", "LlamaForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("ministral3", "Ministral3ForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("smollm3", "SmolLM3ForCausalLM"),
        ("gemma2", "Gemma2ForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
    ],
)
def test_missing_fields_have_transformers_defaults(model_type: str, architecture: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 48, "num_hidden_layers": 7, "pad_token_id": 0}
    bare = {"model_type": model_type, "architectures": [architecture], **sizes, "num_attention_heads": 32}
    config = ours(written(tmp_path, bare))
    model = theirs(tmp_path)
    assert_matches(config, model)
    assert_rotation_matches(config, tmp_path)
    longest = 16384 if model_type == "ministral3" else model.config.max_position_embeddings  # queries are not scaled
    assert config.max_positions == longest
    default = model.config.eos_token_id
    assert config.eos_token_ids == ((default,) if default is not None and default < 64 else ())


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("qwen3_5_text", "Qwen3_5ForCausalLM"), ("qwen3_next", "Qwen3NextForCausalLM")]
)
def test_missing_fields_of_linear_layers_have_transformers_defaults(
    model_type: str, architecture: str, tmp_path: Path
) -> None:
    bare = {**COMMON, "model_type": model_type, "architectures": [architecture], "num_experts": 0}
    config = ours(written(tmp_path, bare))
    their = transformers.AutoConfig.from_pretrained(tmp_path)
    assert ["full" if layer.attends else "linear" for layer in config.layers] == [
        kind.removesuffix("_attention") for kind in their.layer_types
    ]
    assert config.terms == DeltaTerms(
        num_k_heads=their.linear_num_key_heads,
        num_v_heads=their.linear_num_value_heads,
        k_dim=their.linear_key_head_dim,
        v_dim=their.linear_value_head_dim,
        taps=their.linear_conv_kernel_dim,
        is_grouped=model_type == "qwen3_next",
    )
    assert config.kv_bytes_per_token(2) == 2 * 2 * 2 * config.num_kv_heads * config.head_dim
    assert_rotation_matches(config, tmp_path)
    assert {spec.name: spec.shape for spec in program_of(config).weights} == {
        name: tuple(value.shape) for name, value in theirs(tmp_path).named_parameters()
    }


def test_end_tokens_of_both_files_are_merged(tmp_path: Path) -> None:
    written(tmp_path, {**LLAMA, "eos_token_id": 2})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 7], "temperature": 0.6}))
    assert ours(tmp_path).eos_token_ids == (2, 5, 7)


def test_null_end_token_means_none(tmp_path: Path) -> None:
    assert ours(written(tmp_path, {**LLAMA, "eos_token_id": None})).eos_token_ids == ()


def test_yarn_extends_max_positions(tmp_path: Path) -> None:
    yarn = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}
    assert ours(written(tmp_path, {**LLAMA, **yarn})).max_positions == 1024


BAD: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": 32.0}, "hidden_size"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": 2**40}, "hidden_size"),
    ({"hidden_size": 10**100}, "a huge integer"),
    ({"hidden_size": 3}, "less than num_attention_heads"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    ({"rope_theta": "10000"}, "rope_theta"),
    ({"rope_scaling": {"type": "longrope", "short_factor": []}}, "longrope"),
    ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "rope_theta"),
    ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
    ({"head_dim": 7}, "rotary_dim"),
    ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "at least 4"),
    ({"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}}, "partial_rotary_factor"),
    ({"eos_token_id": [1, -1]}, "eos_token_id"),
    ({"hidden_act": "relu"}, "relu"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ({"architectures": [{}]}, "architectures"),
    ({"architectures": ["FooForCausalLM"]}, "known: LlamaForCausalLM, MistralForCausalLM"),
    ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "mixture of experts"),
    ({"architectures": ["Qwen3MoeForCausalLM"]}, "mixture of experts"),
    ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config is missing"),
    ({"architectures": ["LlavaForConditionalGeneration"]}, "multimodal"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_invalid_value_is_reported_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        model_config(Fields("a/config.json", {**LLAMA, **change}))
    assert str(caught.value).startswith("a/config.json") and "\n" not in str(caught.value)


SMOLLM3 = {**COMMON, "architectures": ["SmolLM3ForCausalLM"]}
QWEN2 = {**COMMON, "architectures": ["Qwen2ForCausalLM"]}
QWEN35 = {**COMMON, "architectures": ["Qwen3_5ForCausalLM"]}
GEMMA3 = {**COMMON, "architectures": ["Gemma3ForCausalLM"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**SMOLLM3, "no_rope_layers": [1]}, "no_rope_layers has 1 entries for 8"),
        ({**QWEN2, "layer_types": ["full_attention"]}, "layer_types has 1"),
        ({**QWEN2, "layer_types": ["chunked_attention"] * 8}, "chunked_attention"),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 8}, "no sliding_window"),
        ({**GEMMA3, "sliding_window": 0}, "sliding_window"),
        ({**GEMMA3, "rope_parameters": {"rope_theta": 1e4}}, "full_attention"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA3, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({**QWEN35, "layer_types": ["linear_attention"] * 8}, "without full_attention layers"),
        ({**QWEN35, "full_attention_interval": 9}, "without full_attention layers"),
        ({**QWEN35, "layer_types": ["sliding_attention"] * 8}, "known: full_attention, linear_attention"),
        ({**QWEN35, "linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({**QWEN35, "linear_num_value_heads": 24}, "must be a multiple of linear_num_key_heads"),
        ({**QWEN35, "attn_output_gate": False}, "attn_output_gate false"),
        ({**QWEN35, "output_gate_type": "sigmoid"}, "output_gate_type"),
        ({**QWEN35, "hidden_act": "gelu_pytorch_tanh"}, "hidden_act must be silu"),
        ({**QWEN35, "architectures": ["Qwen3NextForCausalLM"]}, "mixture of experts"),
    ],
)
def test_inconsistent_layers_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config(Fields("config.json", values))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must hold a JSON object"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
)
def test_damaged_json_is_rejected(text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=message):
        read_json(tmp_path / "config.json")
