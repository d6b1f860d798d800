"""Write a checkpoint of llama2.c and its tokenizer as a GGUF file: the model of llama.cpp's tests.

    python benchmarks/foreign_suites/stories_gguf.py stories260K.bin tok512.bin OUT.gguf [--context 128]

The checkpoint is seven int32 (width, hidden width, layers, heads, heads of keys, vocabulary, positions) and float32
matrices; the tokenizer is the length of the longest piece, then score, length and bytes of each. Needs `gguf`.
"""

from __future__ import annotations

import argparse
import re
import struct
from pathlib import Path

import gguf
import numpy as np

KINDS = {0: gguf.TokenType.UNKNOWN, 1: gguf.TokenType.CONTROL, 2: gguf.TokenType.CONTROL}
NAMED = (b"<unk>", b"<s>", b"</s>")


def main() -> None:
    """Convert the files named by the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--context", type=int, default=128)
    given = parser.parse_args()
    data = given.checkpoint.read_bytes()
    width, hidden, layers, heads, key_heads, vocabulary, _ = struct.unpack_from("<7i", data)
    writer = gguf.GGUFWriter(given.out, "llama")
    writer.add_name("llama")
    add_tokenizer(writer, given.tokenizer.read_bytes(), vocabulary)
    writer.add_context_length(given.context)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_block_count(layers)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    keys = key_heads * width // heads
    shapes = {  # in the order of the checkpoint; those of the layers are stacked
        "token_embd": (vocabulary, width),
        "attn_norm": (layers, width),
        "attn_q": (layers, width, width),
        "attn_k": (layers, keys, width),
        "attn_v": (layers, keys, width),
        "attn_output": (layers, width, width),
        "ffn_norm": (layers, width),
        "ffn_gate": (layers, hidden, width),
        "ffn_down": (layers, width, hidden),
        "ffn_up": (layers, hidden, width),
        "output_norm": (width,),
    }
    values, at, matrices = np.frombuffer(data[28:], np.float32), 0, {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        matrices[name] = values[at : at + size].reshape(shape)
        at += size
        if name.startswith(("attn", "ffn")):
            for layer, part in enumerate(matrices[name]):
                writer.add_tensor(f"blk.{layer}.{name}.weight", part)
        else:
            writer.add_tensor(f"{name}.weight", matrices[name])
    writer.add_tensor("output.weight", matrices["token_embd"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, data: bytes, count: int) -> None:
    """Add the pieces, with `▁` for spaces as SentencePiece writes them."""
    texts, scores, kinds, at = [], [], [], 4
    for index in range(count):
        score, size = struct.unpack_from("<fi", data, at)
        text = data[at + 8 : at + 8 + size]
        at += 8 + size
        is_byte = re.fullmatch(rb"<0x[0-9A-F]{2}>", text) is not None
        plain = gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL
        kinds.append(int(KINDS.get(index, plain if text else gguf.TokenType.CONTROL)))
        texts.append(NAMED[index] if index < len(NAMED) else text.replace(b" ", "▁".encode()))
        scores.append(score)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


if __name__ == "__main__":
    main()
