"""Model directories that bring code along: nothing of it is imported or run, and what costs much is bounded.

Elsewhere: `.pt` files that call os.system (tests/loading/test_pt_file.py), tokenizer.pkl that does
(tests/nanochat/test_pickled.py), pickled weights and tokenizers by name (tests/loading/test_bad_files.py,
tests/text/test_tokenizer.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.executors.opening import load_model
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.support.files import MAX_JSON_BYTES
from nano_inference.text.chat import load_chat_template
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import BadRequest, ModelError
from tests.nanochat.tiny import state_dict
from tests.security.model_seeds import (
    byte_level_vocabulary,
    configs,
    hf_files,
    llama_shapes,
    own_nanochat,
    safetensors,
    tokenizer_config,
    tokenizer_json,
)

pytestmark = pytest.mark.slow

EVIL = "modeling_evil_for_tests"
"""The name of the Python file that a model brings."""
AUTO_MAP = {
    "AutoConfig": f"{EVIL}.EvilConfig",
    "AutoModelForCausalLM": f"{EVIL}.EvilModel",
    "AutoTokenizer": [f"{EVIL}.EvilTokenizer", None],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "auto_map of another repository": {"auto_map": {"AutoModelForCausalLM": f"evil/repo--{EVIL}.EvilModel"}},
    "trust_remote_code": {"auto_map": AUTO_MAP, "trust_remote_code": True},
    "_attn_implementation_internal": {"_attn_implementation_internal": "evil/repo:evil", "_attn_implementation": EVIL},
    "attn_implementation": {"attn_implementation": f"{EVIL}/kernel@main"},
    "tokenizer_class": {"tokenizer_class": f"{EVIL}.EvilTokenizer"},
}


@pytest.fixture
def model(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A whole model with Python files beside it that would make the file `marker`."""
    directory, marker = tmp_path / "model", tmp_path / "marker"
    directory.mkdir()
    files = hf_files(configs()[0])
    rows = llama_shapes(2, len(byte_level_vocabulary()[0]))
    values = {name: ("F32", shape, torch.ones(shape).numpy().tobytes()) for name, shape in rows.items()}
    head = torch.ones(rows["model.embed_tokens.weight"])
    values["lm_head.weight"] = ("F32", tuple(head.shape), head.numpy().tobytes())
    files["model.safetensors"] = safetensors(values)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    code = (
        f"open({str(marker)!r}, 'w').close()\nclass EvilConfig: ...\nclass EvilModel: ...\nclass EvilTokenizer: ...\n"
    )
    names = (EVIL, "configuration_evil", "tokenization_evil", "__init__", "custom_generate/generate", "setup")
    for name in names:
        path = directory / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    yield directory, marker
    assert not marker.exists()


def use(directory: Path) -> None:
    """Open, load and use a model as the engine does."""
    checkpoint = open_checkpoint(directory)
    load_model(checkpoint, torch.device("cpu"), torch.float32, 64)
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    assert tokenizer.decode(tokenizer.encode("hello", add_special=False)) == "hello"
    load_chat_template(checkpoint.tokenizer, tokenizer)


def strangers(before: set[str]) -> set[str]:
    """Modules that were imported since and are not the package's nor a library's."""
    new = {name: sys.modules[name] for name in set(sys.modules) - before}
    homes = {name: getattr(module, "__file__", None) or "" for name, module in new.items()}
    return {name for name, home in homes.items() if "evil" in name or "transformers_modules" in name or EVIL in home}


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_code_beside_a_model_is_not_imported(name: str, file: str, model: tuple[Path, Path]) -> None:
    directory, _ = model
    path = directory / file
    path.write_text(json.dumps(json.loads(path.read_text()) | CONFIGS[name]))
    before, path_before = set(sys.modules), list(sys.path)
    use(directory)
    assert not strangers(before) and sys.path == path_before


def test_a_python_tokenizer_is_refused_by_name(model: tuple[Path, Path]) -> None:
    directory, _ = model
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenization_evil\.py: Python code is not run"):
        use(directory)


def test_a_nanochat_with_code_beside_it_is_read_as_data(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for name, data in own_nanochat().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "gpt.py").write_text(f"open({str(marker)!r}, 'w')")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "gpt.GPT"}}))
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.sources) == set(state_dict("G4", config["model_config"], pad=1))
    assert not marker.exists() and "gpt" not in sys.modules


def with_tokenizer(directory: Path, change: Callable[[dict[str, Any]], None]) -> TokenizerSource:
    """A tokenizer's directory whose tokenizer.json is changed."""
    whole = tokenizer_json()
    change(whole)
    (directory / "tokenizer.json").write_text(json.dumps(whole))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config()))
    return TokenizerSource(str(directory))


@pytest.mark.parametrize("pattern", ["(a|aa)+$", "(a|a?)+$", ".*.*.*.*=!$"])
def test_a_pattern_that_backtracks_without_end_is_a_refusal(pattern: str, tmp_path: Path) -> None:
    """The library gives up after ten million steps, with a panic; or it finds an answer before."""

    def change(whole: dict[str, Any]) -> None:
        whole["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}

    tokenizer = load_tokenizer(with_tokenizer(tmp_path, change))
    for parse_special in (True, False):
        try:
            assert tokenizer.encode("a" * 40 + "?", parse_special=parse_special)
        except BadRequest as error:
            assert "a text of 41 characters that the tokenizer's pattern cannot cut" in str(error)
    assert tokenizer.encode("fox")


def test_ten_thousand_merges_load(tmp_path: Path) -> None:
    """A million take two seconds and half a gigabyte, thirteen times the file, so the file's size is limited."""

    def change(whole: dict[str, Any]) -> None:
        vocab, merges = whole["model"]["vocab"], whole["model"]["merges"]
        chars = [piece for piece in vocab if len(piece) == 1][:100]
        for pair in ((a, b) for a in chars for b in chars):
            if "".join(pair) not in vocab:
                vocab["".join(pair)] = len(vocab)
                merges.append(" ".join(pair))

    source = with_tokenizer(tmp_path, change)
    (tmp_path / "tokenizer_config.json").unlink()  # its added token has the id after the last
    assert load_tokenizer(source).vocab_size > 9_900


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizer_file_of_more_than_64_megabytes_is_refused_unread(name: str, tmp_path: Path) -> None:
    assert MAX_JSON_BYTES == 64 << 20
    source = with_tokenizer(tmp_path, lambda whole: None)
    with (tmp_path / name).open("ab") as file:
        file.truncate(MAX_JSON_BYTES + 1)  # a hole: nothing is written
    with pytest.raises(ModelError, match=f"{name}: 67108865 bytes are too many"):
        load_tokenizer(source)
