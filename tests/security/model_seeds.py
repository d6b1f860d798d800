"""Small whole model files of every format that is read, the same bytes on every machine: what is damaged on purpose.

The GGUF files are written here, so that it is known where each of their numbers lies.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from nano_inference.text.fast import CHAR_OF_BYTE
from nano_inference.text.gguf_vocab import GPT2_WORDS
from tests.nanochat.tiny import base_meta, byte_encoding, model_config, state_dict

WORDS = ("hello", " world", " the", " fox", "ing", "\n\n", " 日本")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HIDDEN, INNER = 32, 256

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
LAYOUTS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", "", "", "<Q", "<q", "<d")))


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a GGUF file's metadata."""

    name: bytes
    kind: int
    value: Any
    """A number or bytes; of an array the list of them."""
    item_kind: int = 0
    """What an array holds."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a GGUF file's table of tensors."""

    name: bytes
    sizes: tuple[int, ...]
    """The row's length first, as the file has it."""
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufParts:
    """A GGUF file before it is written."""

    keys: tuple[Key, ...]
    table: tuple[Entry, ...]
    data: bytes


@dataclass(slots=True)
class Writer:
    """Bytes that are being written, and where numbers lie among them."""

    data: bytearray = field(default_factory=bytearray)
    numbers: list[tuple[int, int]] = field(default_factory=list)
    """Offset and width of each count, length, type, size and value."""

    def number(self, layout: str, value: float) -> None:
        """Write a number."""
        self.numbers.append((len(self.data), struct.calcsize(layout)))
        self.data += struct.pack(layout, value)

    def text(self, value: bytes) -> None:
        """Write a string with its length."""
        self.number("<Q", len(value))
        self.data += value


def write_gguf(parts: GgufParts) -> Writer:
    """Return a GGUF file of version 3 (ggml-org/ggml, docs/gguf.md)."""
    out = Writer(bytearray(b"GGUF"))
    out.number("<I", 3)
    out.number("<Q", len(parts.table))
    out.number("<Q", len(parts.keys))
    for key in parts.keys:
        out.text(key.name)
        out.number("<I", key.kind)
        _write_value(out, key)
    for entry in parts.table:
        out.text(entry.name)
        out.number("<I", len(entry.sizes))
        for size in entry.sizes:
            out.number("<Q", size)
        out.number("<I", entry.kind)
        out.number("<Q", entry.offset)
    out.data += bytes(-len(out.data) % 32) + parts.data
    return out


def _write_value(out: Writer, key: Key) -> None:
    if key.kind == STRING:
        out.text(key.value)
    elif key.kind != ARRAY:
        out.number(LAYOUTS[key.kind], key.value)
    else:
        out.number("<I", key.item_kind)
        out.number("<Q", len(key.value))
        for item in key.value:
            _write_value(out, Key(b"", key.item_kind, item))


def byte_level_vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Return the pieces and merges of a byte-level BPE: the bytes, and each word from its left to its right."""
    pieces, merges = [CHAR_OF_BYTE[byte] for byte in range(256)], []
    for word in WORDS:
        whole, *rest = [CHAR_OF_BYTE[byte] for byte in word.encode()]
        for char in rest:
            if whole + char not in pieces:
                merges.append((whole, char))
                pieces.append(whole + char)
            whole += char
    return [*pieces, *SPECIALS], merges


def packed(kind: Kind, rows: int, columns: int, seed: int) -> bytes:
    """Return rows of random blocks of a quantisation, or random values of a plain type."""
    rng = np.random.default_rng(seed)
    if kind in (Kind.F32, Kind.F16):
        values = rng.standard_normal((rows, columns), np.float32)
        return values.astype(np.float32 if kind == Kind.F32 else np.float16).tobytes()
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return rng.integers(0, 256, rows * columns // block * block_bytes, dtype=np.uint8).tobytes()


def table_of(tensors: Sequence[tuple[str, int, int, Kind]]) -> tuple[tuple[Entry, ...], bytes]:
    """Lay tensors (name, rows or 0 for a vector, columns, type) one after the other."""
    table, data = [], bytearray()
    for seed, (name, rows, columns, kind) in enumerate(tensors):
        sizes = (columns, rows) if rows else (columns,)
        table.append(Entry(name.encode(), sizes, int(kind), len(data)))
        data += packed(kind, rows or 1, columns, seed)
        data += bytes(-len(data) % 32)
    return tuple(table), bytes(data)


def numbers(prefix: str, **values: float) -> Iterable[Key]:
    """Yield an architecture's keys; `__` in a name is a dot."""
    for name, value in values.items():
        kind = F32 if isinstance(value, float) else U32
        yield Key(f"{prefix}.{name.replace('__', '.')}".encode(), kind, value)


def sizes_of(prefix: str, layers: int, head_dim: int) -> list[Key]:
    """Return the keys that every architecture has."""
    keys = numbers(
        prefix,
        context_length=256,
        embedding_length=HIDDEN,
        block_count=layers,
        feed_forward_length=INNER,
        attention__head_count=4,
        attention__head_count_kv=2,
        attention__layer_norm_rms_epsilon=1e-5,
        attention__key_length=head_dim,
        attention__value_length=head_dim,
        rope__dimension_count=head_dim,
        rope__freq_base=10000.0,
    )
    return [Key(b"general.architecture", STRING, prefix.encode()), *keys]


def llama_gguf() -> GgufParts:
    """Return a Llama of three layers in a dozen packings, with a byte-level vocabulary and a chat template."""
    pieces, merges = byte_level_vocabulary()
    packings = (
        (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K),
        (Kind.Q5_0, Kind.Q5_1, Kind.Q6_K),
        (Kind.Q8_0, Kind.IQ4_NL, Kind.Q2_K),
    )
    tensors = [("token_embd.weight", len(pieces), HIDDEN, Kind.Q4_0), ("output_norm.weight", 0, HIDDEN, Kind.F32)]
    for i, (gate, up, down) in enumerate(packings):
        part = f"blk.{i}."
        tensors += [(f"{part}{name}.weight", 0, HIDDEN, Kind.F32) for name in ("attn_norm", "ffn_norm")]
        tensors += [(f"{part}attn_q.weight", HIDDEN, HIDDEN, Kind.F16)]
        tensors += [(f"{part}attn_k.weight", HIDDEN // 2, HIDDEN, Kind.Q8_0)]
        tensors += [(f"{part}attn_v.weight", HIDDEN // 2, HIDDEN, Kind.BF16)]
        tensors += [(f"{part}attn_output.weight", HIDDEN, HIDDEN, Kind.Q4_1)]
        tensors += [(f"{part}ffn_gate.weight", INNER, HIDDEN, gate), (f"{part}ffn_up.weight", INNER, HIDDEN, up)]
        tensors += [(f"{part}ffn_down.weight", HIDDEN, INNER, down)]
    tensors.append(("rope_freqs.weight", 0, 4, Kind.F32))
    table, data = table_of(tensors)
    # The last tensor's values are divisors of frequencies, which must be positive.
    data = data[: table[-1].offset] + struct.pack("<4f", 1, 1, 2, 8) + bytes(16)
    return GgufParts((*sizes_of("llama", 3, 8), *byte_level_keys(pieces, merges)), table, data)


def byte_level_keys(pieces: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[Key]:
    """Return a byte-level tokenizer's metadata."""
    first = len(pieces) - len(SPECIALS)
    return [
        Key(b"tokenizer.ggml.model", STRING, b"gpt2"),
        Key(b"tokenizer.ggml.pre", STRING, b"smollm"),
        Key(b"tokenizer.ggml.tokens", ARRAY, [piece.encode() for piece in pieces], STRING),
        Key(b"tokenizer.ggml.token_type", ARRAY, [1] * first + [3] * len(SPECIALS), I32),
        Key(b"tokenizer.ggml.merges", ARRAY, [" ".join(pair).encode() for pair in merges], STRING),
        Key(b"tokenizer.ggml.bos_token_id", U32, first),
        Key(b"tokenizer.ggml.eos_token_id", U32, first + 2),
        Key(b"tokenizer.ggml.unknown_token_id", U32, first),
        Key(b"tokenizer.ggml.padding_token_id", U32, first),
        Key(b"tokenizer.ggml.eot_token_id", U32, first + 2),
        Key(b"tokenizer.ggml.add_bos_token", BOOL, True),
        Key(b"tokenizer.chat_template", STRING, TEMPLATE.encode()),
        Key(b"general.alignment", U32, 32),
    ]


def gemma_gguf() -> GgufParts:
    """Return a Gemma 2 of two layers with a SentencePiece vocabulary, windows, soft caps and a stretched rotation."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrdfxt", "<end_of_turn>"]
    pieces += ["he", "hel", "hell", "hello", "▁w", "wo", "wor", "▁wor", "▁the", "▁▁"]
    types = [2, 3, 3, *[6] * 256, *[1] * 11, 3, *[1] * 9, 4]
    tensors = [("token_embd.weight", len(pieces), HIDDEN, Kind.Q8_0), ("output_norm.weight", 0, HIDDEN, Kind.F32)]
    norms = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    for i, (gate, down) in enumerate(((Kind.IQ4_XS, Kind.Q3_K), (Kind.IQ2_XXS, Kind.Q5_K))):
        part = f"blk.{i}."
        tensors += [(f"{part}{name}.weight", 0, HIDDEN, Kind.F32) for name in norms]
        tensors += [(f"{part}attn_q.weight", 64, HIDDEN, Kind.Q4_0), (f"{part}attn_k.weight", 32, HIDDEN, Kind.Q4_0)]
        tensors += [
            (f"{part}attn_v.weight", 32, HIDDEN, Kind.F16),
            (f"{part}attn_output.weight", HIDDEN, 64, Kind.BF16),
        ]
        tensors += [(f"{part}ffn_gate.weight", HIDDEN, INNER, gate), (f"{part}ffn_up.weight", INNER, HIDDEN, Kind.Q5_1)]
        tensors += [(f"{part}ffn_down.weight", HIDDEN, INNER, down)]
    table, data = table_of(tensors)
    own = numbers(
        "gemma2",
        attention__sliding_window=64,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=64,
    )
    keys = [*sizes_of("gemma2", 2, 16), *own, Key(b"gemma2.rope.scaling.type", STRING, b"yarn")]
    keys += [Key(b"tokenizer.ggml.model", STRING, b"llama"), Key(b"tokenizer.chat_template", STRING, TEMPLATE.encode())]
    keys += [Key(b"tokenizer.ggml.tokens", ARRAY, [piece.encode() for piece in pieces], STRING)]
    keys += [Key(b"tokenizer.ggml.scores", ARRAY, [-float(i) for i in range(len(pieces))], F32)]
    keys += [Key(b"tokenizer.ggml.token_type", ARRAY, types, I32)]
    keys += [Key(b"tokenizer.ggml.bos_token_id", U32, 1), Key(b"tokenizer.ggml.eos_token_id", U32, 2)]
    keys += [Key(b"tokenizer.ggml.add_space_prefix", BOOL, True), Key(b"tokenizer.ggml.add_eos_token", BOOL, False)]
    return GgufParts(tuple(keys), table, data)


def safetensors(tensors: Mapping[str, tuple[str, Sequence[int], bytes]]) -> bytes:
    """Return a safetensors file of (dtype, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    return with_header(json.dumps(header).encode(), b"".join(data for *_, data in tensors.values()))


def with_header(header: bytes, data: bytes) -> bytes:
    """Return a safetensors file with an unchanged header and the tensors' bytes."""
    return struct.pack("<Q", len(header)) + header + data


def llama_shapes(layers: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return a small Llama's weights under Hugging Face's names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, HIDDEN)}
    for i in range(layers):
        part = f"model.layers.{i}."
        shapes |= {f"{part}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{part}self_attn.{name}_proj.weight": (HIDDEN // 2, HIDDEN) for name in "kv"}
        shapes |= {f"{part}mlp.{name}_proj.weight": (64, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{part}mlp.down_proj.weight": (HIDDEN, 64)}
        shapes |= {f"{part}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (HIDDEN,)}


def llama_safetensors(layers: int = 2) -> bytes:
    """Return a small Llama's weights in three precisions."""
    rng, out = np.random.default_rng(5), {}
    vocab_size = len(byte_level_vocabulary()[0])
    for i, (name, shape) in enumerate(llama_shapes(layers, vocab_size).items()):
        dtype, width = (("F32", 4), ("F16", 2), ("BF16", 2))[i % 3]
        out[name] = (dtype, shape, rng.integers(0, 60, int(np.prod(shape)) * width, dtype=np.uint8).tobytes())
    return safetensors(out)


COMMON: Mapping[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": [2],
    "torch_dtype": "float32",
}


def configs() -> list[dict[str, Any]]:
    """Return a config.json of every family, with what is particular to each."""
    common = {**COMMON, "vocab_size": len(byte_level_vocabulary()[0])}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    kinds = ["sliding_attention", "full_attention"]
    both = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    gemma = {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": kinds}
    return [
        {**common, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_scaling": llama3},
        {**common, "architectures": ["MistralForCausalLM"], "sliding_window": 24, "rope_parameters": yarn},
        {**common, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 24},
        {**common, "model_type": "qwen3", "head_dim": 16, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {**common, "model_type": "smollm3", "no_rope_layers": [1, 0], "rope_theta": 2e6, "partial_rotary_factor": 0.5},
        {**common, "model_type": "gemma2", **gemma, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {**common, "model_type": "gemma3_text", **gemma, "rope_parameters": both, "rope_local_base_freq": 1e4},
        {**common, "model_type": "nanochat", "hidden_act": "relu2", "final_logit_softcapping": 15.0, "rope_theta": 1e4},
    ]


def tokenizer_json() -> dict[str, Any]:
    """Return a byte-level tokenizer.json."""
    pieces, merges = byte_level_vocabulary()
    first = len(pieces) - len(SPECIALS)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": GPT2_WORDS}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": first + i, "content": text, **flags} for i, text in enumerate(SPECIALS)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": SPECIALS[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {SPECIALS[0]: {"id": SPECIALS[0], "ids": [first], "tokens": [SPECIALS[0]]}},
        },
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {piece: token for token, piece in enumerate(pieces)},
            "merges": [" ".join(pair) for pair in merges],
        },
    }


def sentencepiece_json() -> dict[str, Any]:
    """Return a tokenizer.json spelled as Llama 2's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helo", "he", "ll"]
    whole = tokenizer_json()
    decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    decoders += [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    vocab = {piece: token for token, piece in enumerate(pieces)}
    model = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab, "merges": ["h e", "l l"]}
    added = [{**whole["added_tokens"][0], "id": i, "content": text} for i, text in enumerate(pieces[:3])]
    return {
        **whole,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**whole["model"], **model},
    }


def tokenizer_config() -> dict[str, Any]:
    """Return a tokenizer_config.json with a token that tokenizer.json does not have."""
    first = len(byte_level_vocabulary()[0])
    more = {"content": "<think>", "lstrip": False, "rstrip": False, "single_word": False, "special": False}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": {"content": SPECIALS[2], "__type": "AddedToken"},
        "pad_token": None,
        "added_tokens_decoder": {str(first): {**more, "normalized": False}},
        "chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TEMPLATE}],
    }


def tiktoken_file() -> bytes:
    """Return ranks in tiktoken's text format."""
    ranks = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell"]
    lines = [base64.b64encode(word) + b" %d\n" % rank for rank, word in enumerate(ranks)]
    return b"".join(lines)


def saved(value: object) -> bytes:
    """Return what torch.save writes."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


NANOCHAT_SIZES: Mapping[str, int] = {"n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32}


@cache
def nanochat_files(generation: str) -> Mapping[str, bytes]:
    """Return a small nanochat's weights, meta and tokenizer."""
    config = model_config(generation, **NANOCHAT_SIZES)
    state = {name: tensor.half() for name, tensor in state_dict(generation, config, pad=1).items()}
    meta = {"step": 650, "model_config": config, **base_meta(generation)}
    return {
        "model_000650.pt": saved(state),
        "meta_000650.json": json.dumps(meta).encode(),
        "tokenizer.pkl": pickle.dumps(byte_encoding(), protocol=4),
    }


def own_nanochat() -> dict[str, bytes]:
    """Return a nanochat of the latest generation as safetensors with every constant in its config.json."""
    config = model_config("G4", **NANOCHAT_SIZES)
    state = {name: tensor.half() for name, tensor in state_dict("G4", config, pad=1).items()}
    constants = {"generation": "G4", "sequence_len": 256, "rope_base": 1e5, "qk_scale": 1.2, "softcap": 15.0}
    constants |= {"gate_scale": 3.0, "window_pattern": "SL", "short_window": 128, "norm_eps": 1.2e-7}
    own = {"model_type": "nanochat_g4", "architectures": ["NanochatG4"], "model_config": config, "constants": constants}
    tensors = {name: ("F16", tuple(value.shape), value.numpy().tobytes()) for name, value in state.items()}
    return {
        "config.json": json.dumps(own).encode(),
        "model.safetensors": safetensors(tensors),
        "tokenizer.pkl": nanochat_files("G4")["tokenizer.pkl"],
    }


Files = Callable[[], Mapping[str, bytes]]


def hf_files(config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a Hugging Face directory."""
    return {
        "config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [2, 3], "temperature": 0.6, "top_p": 0.9}).encode(),
        "model.safetensors": llama_safetensors(),
        "tokenizer.json": json.dumps(tokenizer_json()).encode(),
        "tokenizer_config.json": json.dumps(tokenizer_config()).encode(),
    }


def sharded_files() -> dict[str, bytes]:
    """Return a Hugging Face directory whose weights lie in two shards."""
    out = hf_files(configs()[0])
    del out["model.safetensors"]
    shards = {f"model-0000{i}-of-00002.safetensors": i for i in (1, 2)}
    index: dict[str, str] = {}
    for file, i in shards.items():
        tensors = {f"model.layers.{i}.{name}.weight": ("F16", (8, 8), bytes(128)) for name in "ab"}
        out[file] = safetensors(tensors)
        index |= dict.fromkeys(tensors, file)
    out["model.safetensors.index.json"] = json.dumps({"metadata": {"total_size": 512}, "weight_map": index}).encode()
    return out
