"""A format, a family and a tokenizer that another package adds by entry points, and the engine that runs them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nano_inference import EngineConfig, InferenceEngine, ModelError, SamplingParams
from nano_inference.build import assemble
from nano_inference.loading.checkpoint import OWN_FORMATS, open_checkpoint
from nano_inference.loading.kinds import ModelKinds, installed_kinds
from nano_inference.models.families import OWN_FAMILIES, program_of
from nano_inference.support.plugins import PluginError
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import OWN_TOKENIZERS, load_tokenizer
from tests.server.tiny import make_tiny

CODE = """
import json
from dataclasses import dataclass, replace
from pathlib import Path

from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.loading.formats import ModelFormat
from nano_inference.models import dense
from nano_inference.models.families import Family
from nano_inference.text.fast import hf_tokenizer
from nano_inference.text.kinds import TokenizerKind
from nano_inference.text.kinds import TokenizerSource


@dataclass(frozen=True)
class Shallow:
    num_layers: int


def program(config):
    return dense.program(replace(config, layers=config.layers[: config.terms.num_layers]))


def open_shallow(path, overrides):
    num_layers = json.loads((path / "shallow.json").read_text())["num_layers"]
    whole = open_checkpoint(path / "whole", (), None)
    config = replace(whole.config, family="shallow", terms=Shallow(num_layers))
    last = len(whole.config.layers) - 1
    sources = {name: one for name, one in whole.sources.items() if f".layers.{last}." not in name}
    return replace(whole, path=path, config=config, sources=sources, tokenizer=TokenizerSource(str(path)))


def is_shallow(path):
    return (path / "shallow.json").is_file()


FORMAT = ModelFormat(title="a shallow directory", recognises=is_shallow, open=open_shallow)
FAMILY = Family(program=program)
TOKENIZER = TokenizerKind(
    title="shallow.json",
    description="shallow",
    reads=is_shallow,
    load=lambda directory: hf_tokenizer(directory / "whole"),
)
"""
POINTS = """
[nano_inference.formats]
shallow = shallow_models:FORMAT
[nano_inference.families]
shallow = shallow_models:FAMILY
[nano_inference.tokenizers]
shallow = shallow_models:TOKENIZER
"""
OPTIONS = {"device": "cpu", "num_threads": 1, "kv_cache_bytes": 4 << 20}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package that adds a row to each table; return the directory that it is in."""
    directory = tmp_path / "site"
    info = directory / "shallow_models-1.0.dist-info"
    info.mkdir(parents=True)
    (directory / "shallow_models.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shallow_models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.delitem(sys.modules, "shallow_models", raising=False)
    return directory


@pytest.fixture
def shallow(tmp_path: Path) -> Path:
    """A model of the package's format: a Llama of two layers, of which the family computes one."""
    directory = tmp_path / "model"
    directory.mkdir()
    make_tiny(directory / "whole")
    (directory / "shallow.json").write_text(json.dumps({"num_layers": 1}))
    return directory


def one_layer(shallow: Path, directory: Path) -> Path:
    """Write the same weights as a Llama of one layer; Transformers leaves out the second's."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(shallow / "whole", num_hidden_layers=1)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shallow / "whole" / name, directory / name)
    return directory


def answer(path: Path, kernels: str) -> tuple[int, ...]:
    config = EngineConfig(model_path=str(path), kernels=kernels, **OPTIONS)
    with InferenceEngine(config) as engine:
        return tuple(engine.generate([PROMPT], GREEDY)[0].completion_tokens)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_the_engine_runs_a_family_of_another_package(
    package: Path, shallow: Path, tmp_path: Path, kernels: str
) -> None:
    found = answer(shallow, kernels)
    assert found == answer(one_layer(shallow, tmp_path / "one"), kernels)
    assert found != answer(shallow / "whole", kernels), "the second layer changes what is said"


def test_without_the_package_its_models_are_refused(shallow: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json and no \.gguf file"):
        open_checkpoint(shallow)
    with pytest.raises(ModelError, match=r"no tokenizer: neither .*tokenizer\.json"):
        load_tokenizer(TokenizerSource(str(shallow)))


def test_tables_are_given_as_an_argument(package: Path, shallow: Path) -> None:
    """What is installed does not matter then, and nothing is kept from one call to the next."""
    installed = installed_kinds()
    own = ModelKinds(formats=OWN_FORMATS, families=OWN_FAMILIES, tokenizers=OWN_TOKENIZERS)
    config = EngineConfig(model_path=str(shallow), **OPTIONS)
    assert assemble(config).checkpoint == assemble(config, kinds=installed).checkpoint
    with pytest.raises(ModelError, match=r"has no config\.json"):
        assemble(config, kinds=own)
    with pytest.raises(ModelError, match="no installed package has the family shallow, only dense, gemma"):
        assemble(config, kinds=replace(installed, families=OWN_FAMILIES))
    assert program_of(open_checkpoint(shallow / "whole").config, OWN_FAMILIES).vocab_size == 260


def test_a_row_of_the_wrong_kind_is_refused_with_its_package(package: Path, shallow: Path) -> None:
    code = (package / "shallow_models.py").read_text()
    (package / "shallow_models.py").write_text(code.replace("FAMILY = Family(program=program)", "FAMILY = program"))
    with pytest.raises(PluginError, match=r"families shallow of the package shallow_models: .* not a Family"):
        InferenceEngine(EngineConfig(model_path=str(shallow), **OPTIONS))


def test_nanochat_is_registered_by_entry_points() -> None:
    kinds = installed_kinds()
    tables: tuple[tuple[Mapping[str, object], Mapping[str, object]], ...] = (
        (kinds.formats, OWN_FORMATS),
        (kinds.families, OWN_FAMILIES),
        (kinds.tokenizers, OWN_TOKENIZERS),
    )
    for installed, own in tables:
        assert "nanochat" in installed and "nanochat" not in own


def test_nanochat_rows_do_not_import_torch() -> None:
    code = "from nano_inference.models.families import installed_families; "
    code += "from nano_inference.text.tokenizer import installed_tokenizers; "
    code += "from nano_inference.cli.command import installed_commands; "
    code += "installed_families(), installed_tokenizers(), installed_commands(); "
    code += "import sys; assert not {'torch', 'tiktoken'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_nanochats_python_interface_needs_no_entry_points() -> None:
    code = "import importlib.metadata as m; m.entry_points = lambda **_: (); "
    code += "from nano_inference.loading.kinds import installed_kinds; "
    code += "assert 'nanochat' not in installed_kinds().families; "
    code += "from nano_inference.nanochat.__main__ import main; "
    code += "assert main(['--max-tokens', '2', '--device', 'cpu']) == 0"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)
