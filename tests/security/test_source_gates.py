"""The package's source does not run code of files, start programs in other places, unpickle, or use weak hashes."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import nano_inference
from nano_inference import PagedKVCache, RadixKVCache
from nano_inference.core.cache import hashing

HOME = Path(nano_inference.__file__).parent
PICKLE_NAMES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "_codecs"}
STARTERS = {"subprocess", "pty", "cffi", "multiprocessing", "pexpect"}
RUNNERS = {"eval", "exec", "compile", "__import__"}
SHELLS = {
    *("system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp"),
    *(f"{how}{which}" for how in ("spawn", "exec") for which in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
}
ALLOWED = {
    ("loading/pickle_data.py", "import pickle"),  # reads data, with records in place of what a pickle names
    ("loading/pickle_data.py", "pickle.Unpickler"),
    ("loading/pt_file.py", "import pickle"),  # the name of an error
    ("nanochat/export.py", "import pickle"),  # writes one, and so does the next
    ("nanochat/export.py", "pickle.dumps"),
    ("nanochat/tokenizer.py", "import pickle"),
    ("nanochat/tokenizer.py", "pickle.dumps"),
    ("parallel/links.py", "import pickle"),  # messages between ranks, read with a list of classes
    ("parallel/links.py", "pickle.dumps"),
    ("parallel/links.py", "pickle.Unpickler"),
    ("support/processes.py", "import subprocess"),
    ("support/processes.py", "subprocess.run"),
    ("support/processes.py", "subprocess.Popen"),
}


def found_in(source: str) -> set[str]:
    """Return what a module does of the things that no module may do."""
    tree, found = ast.parse(source), set[str]()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [f"{node.module}"] if isinstance(node, ast.ImportFrom) else []
        found |= {f"import {name}" for name in names if name.partition(".")[0] in PICKLE_NAMES | STARTERS}
        if isinstance(node, ast.Attribute):
            before = ast.unparse(node.value)
            if before in PICKLE_NAMES | {"subprocess"} and node.attr in (
                *("Unpickler", "Pickler", "loads", "load", "dumps", "dump"),
                *("run", "Popen", "call", "check_call", "check_output"),
            ):
                found.add(f"{before}.{node.attr}")
            if (before == "os" and node.attr in SHELLS) or node.attr in ("recv_pyobj", "read_pickle"):
                found.add(f"{before}.{node.attr}")
        elif isinstance(node, ast.Name) and node.id in RUNNERS:
            found.add(node.id)
        elif isinstance(node, ast.Call):
            function, words = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if function == "torch.load" and words.get("weights_only") != "True":
                found.add(function)
            if function in ("np.load", "numpy.load") and words.get("allow_pickle") != "False":
                found.add(function)
            if "trust_remote_code" in words or function in ("yaml.load", "yaml.unsafe_load"):
                found.add(function)
            if words.get("shell") == "True":
                found.add("shell")
    return found


@cache
def findings() -> set[tuple[str, str]]:
    files = {path.relative_to(HOME).as_posix(): path.read_text() for path in HOME.rglob("*.py")}
    return {(name, what) for name, source in files.items() for what in found_in(source)}


def test_no_module_unpickles_evaluates_or_starts_programs() -> None:
    assert findings() <= ALLOWED


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("from pickle import loads", "import pickle"),
        ("x.recv_pyobj()", "x.recv_pyobj"),
        ("map(eval, x)", "eval"),
        ("os.system('x')", "os.system"),
        ("torch.load(x, weights_only=False)", "torch.load"),
        ("run(x, shell=True)", "shell"),
    ],
)
def test_violation_is_found(source: str, what: str) -> None:
    assert found_in(source) == {what}


def test_blocks_are_named_by_a_hash_of_128_bits() -> None:
    """That different contents, salts and versions have different names: tests/core/test_kv.py."""
    assert max(hashing.compute_block_hash([i]).bit_length() for i in range(99)) == 128


@pytest.mark.parametrize("kind", [RadixKVCache, PagedKVCache])
def test_tokens_with_equal_python_hashes_are_no_hit(kind: type[RadixKVCache | PagedKVCache]) -> None:
    """The tree compares the tokens themselves, the table their digests; neither trusts `hash`."""
    ours, theirs = [0] * 9, [2**61 - 1] * 9
    assert hash(tuple(ours)) == hash(tuple(theirs))
    cache = kind(8, 4)
    cache.deallocate(cache.allocate(ours).block_ids)
    found = cache.allocate(theirs)
    assert found.cached_length == 0
    cache.deallocate(found.block_ids)
    assert cache.allocate(ours).cached_length == 8
