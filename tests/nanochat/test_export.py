"""Export of nanochat checkpoints: bit-equal weights, the same tokens and logits, or an error."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
import torch
import transformers
from safetensors import safe_open
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from nano_inference.executors.opening import load_model
from nano_inference.executors.step_input import ForwardInput, Span
from nano_inference.executors.torch.executor import new_store
from nano_inference.loading.checkpoint import Checkpoint, open_checkpoint
from nano_inference.loading.pt_file import read_pt
from nano_inference.loading.safetensors_file import read_header
from nano_inference.nanochat.convert import SAMPLES, check_same, to_hf
from nano_inference.nanochat.export import export_hf, export_nanochat, export_safetensors
from nano_inference.nanochat.pickled import PickledEncoding, nanochat_tokenizer, read_fields
from nano_inference.text.chat import chat_template
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import ModelError
from tests.nanochat.tiny import GENERATIONS, PATTERN, SPECIALS, model_config, state_dict, write_checkpoint

pytestmark = pytest.mark.slow

TEXTS = (
    "the quick brown fox jumps over the lazy dog 12345 hello world, it's don't we'll they've 1999 2026\n",
    "def main(args):\n    return [x ** 2 for x in range(10)]\n\n\nclass A:\n\tpass\n",
    "naïve café über straße 日本語 中文 العربية हिन्दी emoji 😀 👩‍👩‍👧\r\n",
)
WEIGHTS = "model.safetensors"
Exporter = Callable[[Checkpoint, Path | None, Path], Path]


@cache
def trained_tokenizer(num_ranks: int = 691) -> PickledEncoding:
    """Return a nanochat tokenizer: the 256 bytes, merges, then the nine special tokens."""
    core = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=num_ranks, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([*TEXTS, *SAMPLES] * 3, trainer)
    core.decoder = decoders.ByteLevel()
    words = {token: tokenizers_bytes(piece) for piece, token in core.get_vocab().items()}
    merged = [words[token] for token in sorted(words) if len(words[token]) > 1]
    ranks = {word: rank for rank, word in enumerate([*(bytes([i]) for i in range(256)), *merged])}
    special = {f"<|{name}|>": len(ranks) + i for i, name in enumerate(SPECIALS)}
    return PickledEncoding(name="rustbpe", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def tokenizers_bytes(piece: str) -> bytes:
    """Return the bytes of a token in the library's byte-level alphabet."""
    table = {char: byte for byte, char in transformers_table().items()}
    return bytes(table[char] for char in piece)


def transformers_table() -> dict[int, str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table: dict[int, str] = bytes_to_unicode()
    return table


def encoding_of(fields: PickledEncoding) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        fields.name,
        pat_str=fields.pat_str,
        mergeable_ranks=dict(fields.mergeable_ranks),
        special_tokens=dict(fields.special_tokens),
    )


def write(directory: Path, generation: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a flat nanochat directory: padded vocabulary, embeddings optionally bfloat16."""
    fields = trained_tokenizer()
    vocab_size = len(fields.mergeable_ranks) + len(fields.special_tokens)
    config = model_config(generation, vocab_size=vocab_size, **changes)
    state = state_dict(generation, config)
    assert state["lm_head.weight"].size(0) > vocab_size
    for name, tensor in state.items():
        if name.startswith(("transformer.wte", "value_embeds")):
            state[name] = tensor.to(dtype)
    write_checkpoint(directory, generation, config=config, state=state)
    (directory / "tokenizer.pkl").write_bytes(pickle.dumps(encoding_of(fields), protocol=4))
    return directory


def weights_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    out = {}
    for name, source in checkpoint.tensors():
        out[name] = torch.empty(source.shape, dtype=getattr(torch, source.dtype))
        source.read_into(out[name])
    return out


def assert_same_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def logits_of(checkpoint: Checkpoint, ids: list[int]) -> torch.Tensor:
    """Return our float32 logits of every position."""
    cpu = torch.device("cpu")
    model = load_model(checkpoint, cpu, torch.float32, checkpoint.config.max_positions)
    store = new_store(model.program, -(-len(ids) // 16), 16, torch.float32, cpu)
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))
    span = Span(0, len(ids), 0, tuple(range(store.num_blocks)))
    previous = torch.cat([torch.tensor([-1]), tokens[:-1]])
    step = ForwardInput(token_T=tokens, prev_T=previous, position_T=positions, slot_T=positions, spans=(span,))
    return model.forward(step, store)


def some_ids(size: int, count: int = 120) -> list[int]:
    rng = random.Random(5)
    return [rng.randrange(size) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_safetensors_export_is_bit_equal(tmp_path: Path, generation: str, dtype: torch.dtype) -> None:
    source = write(tmp_path / "a", generation, dtype=dtype)
    overrides = ("generation=G2s", "softcap=20") if generation == "G2s" else ()
    checkpoint = open_checkpoint(source, overrides)
    out = export_safetensors(checkpoint, source, tmp_path / "b")
    again = open_checkpoint(out)
    assert again.config == checkpoint.config and again.config.terms is not None
    assert again.config.terms.generation == generation
    assert_same_bits(weights_of(again), weights_of(checkpoint))
    assert (out / "tokenizer.pkl").read_bytes() == (source / "tokenizer.pkl").read_bytes()
    assert int.from_bytes((out / WEIGHTS).read_bytes()[:8], "little") % 8 == 0
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == f"nanochat_{generation.lower()}"
    assert config["architectures"] == [f"Nanochat{generation}"]
    with safe_open(out / WEIGHTS, framework="pt") as theirs:
        assert_same_bits({name: theirs.get_tensor(name) for name in theirs.keys()}, weights_of(checkpoint))  # noqa: SIM118


@pytest.mark.parametrize("generation", [name for name in GENERATIONS if name != "G2s"])
def test_safetensors_convert_back_to_nanochat_files(tmp_path: Path, generation: str) -> None:
    source = write(tmp_path / "a", generation, dtype=torch.bfloat16)
    middle = export_safetensors(open_checkpoint(source), source, tmp_path / "b")
    out = export_nanochat(open_checkpoint(middle), middle, tmp_path / "c")
    names = ["meta_000000.json", "model_000000.pt", "token_bytes.pt", "tokenizer.pkl"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert_same_bits(read_pt(out / "model_000000.pt"), read_pt(source / "model_000650.pt"))
    assert open_checkpoint(out).config == open_checkpoint(source).config
    # Required by upstream's loader.
    meta = json.loads((out / "meta_000000.json").read_text())
    given = json.loads((source / "meta_000650.json").read_text())["model_config"]
    assert {name: meta["model_config"][name] for name in given if name != "window_pattern"} == {
        name: value for name, value in given.items() if name != "window_pattern"
    }
    state = torch.load(out / "model_000000.pt", weights_only=True)
    assert type(state) is dict and state["transformer.wte.weight"].dtype == torch.bfloat16


def rounded_to_bfloat16(_module: object, _inputs: object, tables: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Round Transformers' cos and sin to bfloat16, as G0 does."""
    return tuple(table.bfloat16().float() for table in tables)


@pytest.mark.parametrize("rope_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_transformers_computes_the_same_logits(tmp_path: Path, num_kv_heads: int, rope_dtype: str) -> None:
    """G0's tables are bfloat16; Transformers rounds them only when it computes in bfloat16."""
    source = write(tmp_path / "a", "G0", n_kv_head=num_kv_heads)
    checkpoint = open_checkpoint(source, () if rope_dtype == "bfloat16" else ("rope_dtype=float32",))
    out = export_hf(checkpoint, source, tmp_path / "b")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    assert type(theirs).__name__ == "NanoChatForCausalLM" and theirs.dtype == torch.float32
    ids = some_ids(checkpoint.config.vocab_size)
    if rope_dtype == "bfloat16":
        theirs.model.rotary_emb.register_forward_hook(rounded_to_bfloat16)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    ours = logits_of(checkpoint, ids)
    assert ours.shape == wanted.shape and wanted.std() > 0.5
    assert (ours - wanted).abs().max() <= 1e-5
    assert (logits_of(open_checkpoint(out), ids) - wanted).abs().max() <= 1e-5


def test_non_default_constants_are_written_to_the_port(tmp_path: Path) -> None:
    source = write(tmp_path / "a", "G0")
    out = export_hf(open_checkpoint(source), source, tmp_path / "b")
    config = transformers.AutoConfig.from_pretrained(out)
    special = trained_tokenizer().special_tokens
    assert config.intermediate_size == 4 * config.hidden_size
    assert config.rms_norm_eps == pytest.approx(1.1920929e-07)
    assert (config.eos_token_id, config.bos_token_id) == (special["<|assistant_end|>"], special["<|bos|>"])
    assert config.rope_parameters["rope_theta"] == 10000.0 and config.final_logit_softcapping == 15.0
    generation = transformers.GenerationConfig.from_pretrained(out)
    assert generation.eos_token_id == [special["<|assistant_end|>"], special["<|bos|>"]]
    assert generation.bos_token_id == special["<|bos|>"]


def test_vocabulary_padding_is_not_exported(tmp_path: Path) -> None:
    source = write(tmp_path / "a", "G0", dtype=torch.bfloat16)
    checkpoint = open_checkpoint(source)
    out = export_hf(checkpoint, source, tmp_path / "b")
    again, mine = weights_of(open_checkpoint(out)), read_pt(source / "model_000650.pt")
    size = checkpoint.config.vocab_size
    for theirs, ours in (("model.embed_tokens", "transformer.wte"), ("lm_head", "lm_head")):
        assert mine[f"{ours}.weight"].size(0) > size
        assert_same_bits({"w": again[f"{theirs}.weight"]}, {"w": mine[f"{ours}.weight"][:size]})
    assert again["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert again["lm_head.weight"].dtype == torch.float32
    # Transformers computes in the widest precision by default.
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_exported_tensors_are_aligned(tmp_path: Path) -> None:
    source = write(tmp_path / "a", "G4")
    # Cloned, because the tensors are mapped from the file that is overwritten.
    state = {name: tensor.clone() for name, tensor in read_pt(source / "model_000650.pt").items()}
    state["smear_lambda"] = state["smear_lambda"].bfloat16()  # two bytes, before a tensor with four-byte values
    torch.save(state, source / "model_000650.pt")
    out = export_safetensors(open_checkpoint(source), source, tmp_path / "b")
    for part in read_header(out / WEIGHTS).values():
        assert part.offset % getattr(torch, part.dtype).itemsize == 0
    assert_same_bits(weights_of(open_checkpoint(out)), state)


def test_port_converts_to_nanochat_files_and_back(tmp_path: Path) -> None:
    source = write(tmp_path / "a", "G0", dtype=torch.bfloat16)
    port = export_hf(open_checkpoint(source), source, tmp_path / "b")
    own = export_nanochat(open_checkpoint(port), port, tmp_path / "c")
    state, size = read_pt(source / "model_000650.pt"), len(trained_tokenizer().mergeable_ranks) + 9
    for name in ("transformer.wte.weight", "lm_head.weight"):
        state[name] = state[name][:size]
    assert_same_bits(read_pt(own / "model_000000.pt"), state)
    assert read_fields(own / "tokenizer.pkl") == trained_tokenizer()
    port_again = export_hf(open_checkpoint(own), own, tmp_path / "d")
    for name in (WEIGHTS, "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (port_again / name).read_bytes() == (port / name).read_bytes(), name
    tensors = export_safetensors(open_checkpoint(port), port, tmp_path / "e")
    assert_same_bits(weights_of(open_checkpoint(tensors)), state)
    assert load_tokenizer(TokenizerSource(str(tensors))).vocab_size == size


def test_port_saved_by_transformers_is_read(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.NanoChatConfig(
        vocab_size=265,
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=256,
        eos_token_id=260,
        pad_token_id=260,
    )
    theirs = transformers.NanoChatForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "a")
    out = export_nanochat(open_checkpoint(tmp_path / "a"), None, tmp_path / "b")
    found = read_pt(out / "model_000000.pt")
    assert torch.equal(found["transformer.h.1.mlp.c_proj.weight"], theirs.model.layers[1].mlp.fc2.weight)
    ids = some_ids(265, 40)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    # The port's default epsilon, 1e-6, differs from nanochat's.
    assert (logits_of(open_checkpoint(out), ids) - wanted).abs().max() <= 1e-3


def corpus() -> list[str]:
    rng = random.Random(11)
    alphabet = "abc ABC 0123456789 \n\t\r'\"!,.éßſß日本語한👍\u0301\u200d\u00a0٣½"
    odd = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 60))) for _ in range(400)]
    codes = ["".join(chr(rng.randrange(1, 0xD800)) for _ in range(20)) for _ in range(100)]
    words = [word.decode() for word in trained_tokenizer().mergeable_ranks if word.isascii()]
    return [*TEXTS, *SAMPLES, *odd, *codes, *("".join(rng.choices(words, k=12)) for _ in range(400))]


def test_exported_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    source = write(tmp_path / "a", "G0")
    out = export_hf(open_checkpoint(source), source, tmp_path / "b")
    raw = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    ours, theirs = nanochat_tokenizer(source), load_tokenizer(TokenizerSource(str(out)))
    for text in corpus():
        ids = encoding_of(trained_tokenizer()).encode_ordinary(text)
        assert raw.encode(text, add_special_tokens=False).ids == ids, text
        assert theirs.encode(text) == ours.encode(text) == [ours.bos_id, *ids]
        assert theirs.decode(ids) == ours.decode(ids)
    hostile = "a<|bos|>b<|assistant_end|>"
    assert theirs.encode(hostile) == ours.encode(hostile)
    assert theirs.encode(hostile, parse_special=False) == ours.encode(hostile, parse_special=False)
    assert (theirs.bos_id, theirs.eos_ids, theirs.vocab_size) == (ours.bos_id, ours.eos_ids, ours.vocab_size)
    assert theirs.special_ids == ours.special_ids


def test_exported_chat_template_renders_the_same_ids(tmp_path: Path) -> None:
    source = write(tmp_path / "a", "G0")
    out = export_hf(open_checkpoint(source), source, tmp_path / "b")
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    special = trained_tokenizer().special_tokens
    messages = [{"role": "user", "content": "hello 日本 123"}]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    text = encoding_of(trained_tokenizer()).encode_ordinary("hello 日本 123")
    names = ("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>")
    bos, start, end, answer = (special[name] for name in names)
    assert list(ids) == [bos, start, *text, end, answer]
    assert theirs.eos_token_id == special["<|assistant_end|>"] and theirs.model_max_length == 256
    assert theirs("hello")["input_ids"][0] == special["<|bos|>"]
    template = chat_template((out / "chat_template.jinja").read_text(), where="x")
    assert template.source


def test_word_without_merges_keeps_its_id(tmp_path: Path) -> None:
    """tiktoken looks a word up before it merges, so it finds a token that no merge produces."""
    ranks = {bytes([i]): i for i in range(256)} | {b"abc": 256, "日本".encode(): 257}
    fields = replace(trained_tokenizer(), mergeable_ranks=ranks, special_tokens={"<|bos|>": 258})
    core = to_hf(fields, "<|bos|>", "x")
    assert core.encode("abc", add_special_tokens=False).ids == [256]
    assert core.encode("abcd", add_special_tokens=False).ids == encoding_of(fields).encode_ordinary("abcd")


def test_alternative_merges_of_a_token_are_exported(tmp_path: Path) -> None:
    words = [b"bc", b"ab", b"abc", b"xa", b"xabc"]
    ranks = {bytes([i]): i for i in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    fields = replace(trained_tokenizer(), mergeable_ranks=ranks, special_tokens={"<|bos|>": 261})
    core, original = to_hf(fields, "<|bos|>", "x"), encoding_of(fields)
    rng = random.Random(2)
    for _ in range(2000):
        text = "".join(rng.choice("abcx") for _ in range(rng.randrange(1, 12)))
        assert core.encode(text, add_special_tokens=False).ids == original.encode_ordinary(text), text


def test_tokenizer_with_different_results_is_rejected(tmp_path: Path) -> None:
    core = to_hf(trained_tokenizer(), "<|bos|>", "x")
    other = replace(trained_tokenizer(), pat_str=PATTERN.replace("{1,2}", "{1,3}"))
    with pytest.raises(ModelError, match=r"x: tokenizer\.json and tiktoken would give different ids for"):
        check_same(core, encoding_of(other), "x")
    # The two regex engines fold cases differently: one treats "ss" and "ß" as equal.
    ranks = {bytes([i]): i for i in range(256)} | {"ß".encode(): 256, "ßb".encode(): 257}
    folded = replace(other, pat_str=r"(?i:ss)b|[\s\S]", mergeable_ranks=ranks, special_tokens={"<|bos|>": 258})
    with pytest.raises(ModelError, match=r"different ids for '.xdfb'"):
        to_hf(folded, "<|bos|>", "x")
    with pytest.raises(ModelError, match=r"pat_str cannot be used in a tokenizer\.json"):
        to_hf(replace(trained_tokenizer(), pat_str="("), "<|bos|>", "x")
    with pytest.raises(ModelError, match="cannot have the id 900"):
        to_hf(replace(trained_tokenizer(), special_tokens={"<|bos|>": 900}), "<|bos|>", "x")


def changed(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.update(changes)


def without_byte(state: dict[str, Any]) -> None:
    state["model"]["merges"] = []
    state["model"]["vocab"] = {("Aa" if piece == "A" else piece): i for piece, i in state["model"]["vocab"].items()}


def with_gap(state: dict[str, Any]) -> None:
    state["model"]["vocab"] |= {"zzzzzzzz": 5000}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(normalizer={"type": "NFC"}), "have no normalizer"),
        (changed(pre_tokenizer={"type": "Whitespace"}), "one pattern"),
        (lambda state: state["pre_tokenizer"]["pretokenizers"].pop(), "one pattern"),
        (lambda state: state["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "must not add spaces"),
        (lambda state: state["model"].update(merges=state["model"]["merges"][:-9][::-1]), "different ids"),
        (without_byte, "not every byte"),
        (with_gap, "must be 0 to"),
        (changed(added_tokens=[]), "neither of the special tokens"),
        (lambda state: state["added_tokens"].pop(), "has 699 tokens, the model 700"),
        (lambda state: state["added_tokens"][4].update(special=False), "is not special"),
    ],
)
def test_other_tokenizer_json_is_rejected(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    source = write(tmp_path / "a", "G0")
    port = export_hf(open_checkpoint(source), source, tmp_path / "b")
    state = json.loads((port / "tokenizer.json").read_text())
    change(state)
    state["post_processor"] = None
    (port / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ModelError, match=message):
        export_nanochat(open_checkpoint(port), port, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("generation", [name for name in GENERATIONS if name not in ("G0", "G2s")])
def test_later_generations_cannot_be_exported_to_transformers(tmp_path: Path, generation: str) -> None:
    source = write(tmp_path / "a", generation)
    with pytest.raises(ModelError, match=f"of generation {generation}, and Transformers supports G0 only"):
        export_hf(open_checkpoint(source), source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_constants_not_supported_by_a_format_are_rejected(tmp_path: Path) -> None:
    source = write(tmp_path / "a", "G0")
    with pytest.raises(ModelError, match="Transformers does not support qk_scale"):
        export_hf(open_checkpoint(source, ("qk_scale=1.2",)), source, tmp_path / "b")
    with pytest.raises(ModelError, match="Transformers does not support long_window, windows"):
        export_hf(open_checkpoint(source, ("window_pattern=SL", "short_window=9")), source, tmp_path / "b")
    with pytest.raises(
        ModelError, match=r"cannot be exported in this format: logits_softcap 20\.0 would be read as 15\.0"
    ):
        export_nanochat(open_checkpoint(source, ("softcap=20",)), source, tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    with pytest.raises(ModelError, match="cannot be exported in this format: ropes"):
        export_nanochat(open_checkpoint(source, ("rope_dtype=float32",)), source, tmp_path / "c")
    with pytest.raises(ModelError, match="Transformers does not support has_full_decode"):
        export_hf(open_checkpoint(source, ("decode_window=full",)), source, tmp_path / "c")
    other = open_checkpoint(source, ("softcap=20", "rope_base=500", "rope_dtype=float32"))
    for export in (export_hf, export_safetensors):
        again = open_checkpoint(export(other, source, tmp_path / export.__name__)).config
        assert again.logits_softcap == 20.0 and again.ropes[0].theta == 500.0
        assert again.ropes[0].table_dtype == "float32"


EXPORTERS = (export_hf, export_safetensors, export_nanochat)


@pytest.mark.parametrize("export", EXPORTERS)
def test_missing_or_other_tokenizer_is_rejected(tmp_path: Path, export: Exporter) -> None:
    source = write(tmp_path / "a", "G0")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty: has neither tokenizer\.pkl nor tokenizer\.json"):
        export(open_checkpoint(source), tmp_path / "empty", tmp_path / "b")
    other = replace(trained_tokenizer(), special_tokens={"<|bos|>": 691, "<|assistant_end|>": 692})
    (tmp_path / "empty" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding_of(other)))
    with pytest.raises(ModelError, match="empty: the tokenizer has 693 tokens, the model 700"):
        export(open_checkpoint(source), tmp_path / "empty", tmp_path / "b")
    mark = tmp_path / "mark"
    (tmp_path / "empty" / "tokenizer.pkl").write_bytes(b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
    with pytest.raises(ModelError, match=r"tokenizer\.pkl"):
        export(open_checkpoint(source), tmp_path / "empty", tmp_path / "b")
    assert not mark.exists() and not (tmp_path / "b").exists()


@pytest.mark.parametrize("export", EXPORTERS)
def test_existing_target_is_rejected(tmp_path: Path, export: Exporter) -> None:
    source = write(tmp_path / "a", "G0")
    target = tmp_path / "b"
    target.mkdir()
    (target / "mine").write_text("x")
    with pytest.raises(ModelError, match="exists and is not an empty directory"):
        export(open_checkpoint(source), source, target)
    assert [path.name for path in target.iterdir()] == ["mine"]
    with pytest.raises(ModelError, match="exists and is not"):
        export(open_checkpoint(source), source, target / "mine")
    with pytest.raises(ModelError, match="cannot be written"):
        export(open_checkpoint(source), source, target / "mine" / "deeper")
    (target / "mine").unlink()
    assert export(open_checkpoint(source), source, target) == target and (target / "mine").parent.is_dir()
    assert export(open_checkpoint(source), source, tmp_path / "x" / "y").is_dir()


@pytest.mark.parametrize("export", EXPORTERS)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_export_is_atomic(
    tmp_path: Path, export: Exporter, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a", "G0")
    before = sorted(path.name for path in tmp_path.iterdir())

    def fail(descriptor: int) -> None:
        assert not (tmp_path / "b").exists()
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ModelError if isinstance(error, OSError) else KeyboardInterrupt):
        export(open_checkpoint(source), source, tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
