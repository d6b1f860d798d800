"""The package's source does not run code of files, open ports, unpickle, or use weak hashes."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest

import nano_inference
from nano_inference import PagedKVCache, RadixKVCache
from nano_inference.core.cache import hashing

HOME = Path(nano_inference.__file__).parent
PICKLE_NAMES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "_codecs"}
SENDERS = {"recv_pyobj", "send_pyobj", "read_pickle", "to_pickle"}
RUNNERS = {"eval", "exec", "compile", "__import__", "execfile"}
SHELLS = {
    *("system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp", "startfile"),
    *(f"{how}{which}" for how in ("spawn", "exec") for which in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
}
SERVERS = {"socketserver", "http", "xmlrpc", "zmq", "multiprocessing", "asyncio", "uvicorn", "starlette"}

STARTERS = {"subprocess", "pty", "cffi", "multiprocessing", "pexpect", "sh", "plumbum"}
"""Modules that start processes."""
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "examples", "scripts") for path in (ROOT / folder).rglob("*.py"))

Finding = tuple[str, str]
"""A file and what it does."""

PICKLES = {
    "loading/pickle_data.py",  # reads one, with records in place of the classes and functions that it names
    "loading/pt_file.py",  # the name of an error, and pickletools
    "nanochat/export.py",  # writes one
    "nanochat/tokenizer.py",  # writes one
}
"""Who may import `pickle`."""
PICKLE_USES = {
    ("loading/pickle_data.py", "Unpickler"),
    ("nanochat/export.py", "dumps"),
    ("nanochat/tokenizer.py", "dumps"),
}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {path.relative_to(HOME).as_posix(): ast.parse(path.read_text()) for path in sorted(HOME.rglob("*.py"))}


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return a tree's nodes, which almost every rule reads."""
    return tuple(ast.walk(tree))


@cache
def imports(tree: ast.AST) -> tuple[str, ...]:
    """Every module that is imported, whole names, also by `importlib.import_module("name")`."""
    return tuple(_imports(tree))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node)[1] in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


def called(node: ast.Call) -> tuple[str, str]:
    """What is called: the name before the dot, empty when there is none, and the name after it."""
    function = node.func
    if isinstance(function, ast.Name):
        return "", function.id
    if isinstance(function, ast.Attribute):
        return ast.unparse(function.value), function.attr
    return "", ""


@cache
def calls(tree: ast.AST) -> tuple[tuple[str, str, ast.Call], ...]:
    return tuple((*called(node), node) for node in nodes_of(tree) if isinstance(node, ast.Call))


def importers(trees: dict[str, ast.Module], names: set[str]) -> set[str]:
    """Files that import one of these modules or something out of it."""
    return {path for path, tree in trees.items() if names & {name.partition(".")[0] for name in imports(tree)}}


def pickle_uses(trees: dict[str, ast.Module]) -> set[Finding]:
    """Calls of the pickle module, and of methods that pickle behind one's back."""
    found = set()
    for path, tree in trees.items():
        found |= {(path, name) for before, name, _ in calls(tree) if before in PICKLE_NAMES or name in SENDERS}
        taken = {name for name in imports(tree) if name.startswith(("pickle.", "marshal."))}
        found |= {(path, name) for name in taken}
        found |= {
            (path, node.attr)
            for node in nodes_of(tree)
            if isinstance(node, ast.Attribute) and node.attr in ("Unpickler", "Pickler", "loads", "load")
            if ast.unparse(node.value) in PICKLE_NAMES
        }
    return found


def run_uses(trees: dict[str, ast.Module]) -> set[Finding]:
    """Calls that run a text as a program, or a program."""
    found = set()
    for path, tree in trees.items():
        for before, name, _ in calls(tree):
            if before in ("", "builtins") and name in RUNNERS:
                found.add((path, name))
            if before in ("os", "pty", "posix") and name in SHELLS:
                found.add((path, f"{before}.{name}"))
            if before == "subprocess" or name in ("create_subprocess_exec", "create_subprocess_shell"):
                found.add((path, f"{before}.{name}"))
        # A name that is handed over, `map(eval, …)`, runs as well.
        loaded = {node.id for node in nodes_of(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        found |= {(path, name) for name in loaded & {"eval", "exec", "__import__"}}
    return found


def open_pythons(tree: ast.AST) -> list[str]:
    """Commands by which this Python looks for modules in the current directory first: no -I, no -P, no script.

    A script by its path puts its own directory first. A command handed over whole, behind the program, is not seen.
    """
    found = []
    for node in nodes_of(tree):
        parts = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
        for part, following in zip_longest(parts, parts[1:]):
            if ast.unparse(part) not in ("sys.executable", "str(sys.executable)"):
                continue
            is_named = following is not None and {"HERE", "__file__"} & set(re.findall(r"\w+", ast.unparse(following)))
            if not is_named and not (isinstance(following, ast.Constant) and following.value in ("-I", "-P")):
                found.append(ast.unparse(node))
    return found


def unsafe_loads(trees: dict[str, ast.Module]) -> set[Finding]:
    """Calls that read arrays or tensors without the word that keeps code out."""
    found = set()
    for path, tree in trees.items():
        for before, name, node in calls(tree):
            words = {word.arg: word.value for word in node.keywords}
            if before == "torch" and name == "load" and not is_constant(words.get("weights_only"), True):
                found.add((path, "torch.load"))
            if before in ("np", "numpy") and name == "load" and not is_constant(words.get("allow_pickle"), False):
                found.add((path, "numpy.load"))
            if name in ("yaml_load", "unsafe_load", "full_load") or (before == "yaml" and name == "load"):
                found.add((path, "yaml.load"))
            if any(word == "trust_remote_code" for word in words):
                found.add((path, "trust_remote_code"))
    return found


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def server_uses(trees: dict[str, ast.Module]) -> set[str]:
    """Files that could listen: sockets that are bound, or a module that serves."""
    found = importers(trees, {"socket"}) | importers(trees, SERVERS)
    for path, tree in trees.items():
        if any(name in ("bind", "listen", "create_server", "start_server") for _, name, _ in calls(tree)):
            found.add(path)
    return found


def test_pickles_are_read_as_data_only(trees: dict[str, ast.Module]) -> None:
    assert importers(trees, PICKLE_NAMES) <= PICKLES
    assert pickle_uses(trees) <= PICKLE_USES


def test_nothing_is_evaluated_and_one_room_starts_programs(trees: dict[str, ast.Module]) -> None:
    assert run_uses(trees) == {("support/processes.py", "subprocess.Popen"), ("support/processes.py", "subprocess.run")}
    assert importers(trees, STARTERS) == {"support/processes.py"}
    assert importers(trees, {"ctypes"}) == {"executors/cpu/library.py", "executors/cpu/native.py", "weights/nccl.py"}
    callers = {path for path, tree in trees.items() if "nano_inference.support.processes" in set(imports(tree))}
    starting = {"loading/downloads.py", "executors/cpu/compile.py"}
    assert callers == starting | {"parallel/processes.py", "server/front/process.py"}


def test_programs_are_run_without_a_shell_in_a_named_directory(trees: dict[str, ast.Module]) -> None:
    nodes = [(name, node) for before, name, node in calls(trees["support/processes.py"]) if before == "subprocess"]
    assert sorted(name for name, _ in nodes) == ["Popen", "Popen", "run"]
    for name, node in nodes:
        words = {word.arg: ast.unparse(word.value) for word in node.keywords}
        assert words["cwd"] == "cwd" and words["env"].startswith("environment(") and "stdin" in words
        assert not {"shell", "executable", "preexec_fn", None} & words.keys()
        assert name != "run" or "timeout" in words


def test_pip_only_downloads(trees: dict[str, ast.Module]) -> None:
    texts = {
        n.value
        for n in ast.walk(trees["loading/downloads.py"])
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }
    assert "download" in texts and any("run_module('pip'" in text for text in texts)


def test_scripts_start_python_without_the_current_directory() -> None:
    """Benchmarks, examples and scripts are no part of the package; they name the option themselves."""
    texts = {path: path.read_text() for path in SCRIPTS}
    naming = {path: text for path, text in texts.items() if "sys.executable" in text}
    found = {str(path): problem for path, text in naming.items() if (problem := open_pythons(ast.parse(text)))}
    assert not found
    assert all("PYTHONSAFEPATH" in text for text in texts.values() if "import multiprocessing" in text)


def test_tensors_are_loaded_as_tensors_only(trees: dict[str, ast.Module]) -> None:
    assert not unsafe_loads(trees)
    loads = {(path, before) for path, tree in trees.items() for before, name, _ in calls(tree) if name == "load"}
    assert ("loading/pt_file.py", "torch") in loads


def test_only_the_server_listens(trees: dict[str, ast.Module]) -> None:
    calling = {"weights/member.py", "cli/wire.py"}  # ask whether a trainer is there; talk with a server
    calling |= {"async_engine.py", "core/outbox.py"}  # asyncio without a socket
    # by the functions of the server
    listening = {
        "cli/serve.py",
        "cli/fleet.py",
        "server/verl/server.py",
    }  # by the server's functions
    others = "rl/"  # asyncio, and clients of servers
    calling |= {path for path in server_uses(trees) if path.startswith(others)} - listening
    for path in calling:
        assert not {name for _, name, _ in calls(trees[path])} & {"bind", "listen", "create_server"}
    allowed = {path for path in server_uses(trees) if path.startswith("server/") or path in listening}
    assert server_uses(trees) - calling == allowed


def test_blocks_are_named_by_a_cryptographic_hash_of_128_bits(trees: dict[str, ast.Module]) -> None:
    """That different contents, salts and versions have different names: tests/test_kv.py."""
    for function in (hashing.compute_block_hash, hashing.root_hash):
        assert "hashlib.sha256" in inspect.getsource(function)
    for path, tree in trees.items():
        if path.startswith("core/cache/"):
            assert not [name for before, name, _ in calls(tree) if not before and name == "hash"], path
            assert not {"zlib", "xxhash", "binascii", "random"} & {name.partition(".")[0] for name in imports(tree)}
    assert all(hashing.compute_block_hash([i]).bit_length() <= 128 for i in range(9))
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


def test_checks_detect_violations() -> None:
    bad = {
        "a.py": "import dill\nfrom pickle import loads\nsock.recv_pyobj()\n",
        "b.py": "import pickle as p, pickle\npickle.loads(x)\nf = pickle.Unpickler\n",
        "c.py": "eval('1')\nmap(exec, x)\nimport os\nos.system('x')\nimport builtins\nbuiltins.compile('x')\n",
        "d.py": "import subprocess\nsubprocess.Popen(['x'])\n__import__('os')\n",
        "e.py": "torch.load(x)\nnumpy.load(x)\nf(trust_remote_code=True)\nyaml.load(x)\n",
        "j.py": "torch.load(x, weights_only=False)\n",
        "f.py": "import importlib\nimportlib.import_module('socketserver')\n",
        "g.py": "import socket\n",
        "h.py": "loop.create_server(x)\n",
        "i.py": "torch.load(x, weights_only=True)\nre.compile('x')\nmodel.eval()\njson.loads(x)\n",
    }
    trees = {path: ast.parse(text) for path, text in bad.items()}
    assert importers(trees, PICKLE_NAMES) == {"a.py", "b.py"}
    assert {("a.py", "recv_pyobj"), ("a.py", "pickle.loads"), ("b.py", "loads"), ("b.py", "Unpickler")} <= pickle_uses(
        trees
    )
    assert {"eval", "exec", "os.system", "compile"} == {what for path, what in run_uses(trees) if path == "c.py"}
    assert {"subprocess.Popen", "__import__"} == {what for path, what in run_uses(trees) if path == "d.py"}
    assert not open_pythons(ast.parse("run([sys.executable, '-I', 'x.py'])\nrun(sys.executable, '-P', *more)"))
    assert (
        len(open_pythons(ast.parse("[sys.executable, *more]\nrun(sys.executable)\n(sys.executable, '-m', 'x')"))) == 3
    )
    words = ("torch.load", "numpy.load", "trust_remote_code", "yaml.load")
    assert unsafe_loads(trees) == {("e.py", what) for what in words} | {("j.py", "torch.load")}
    assert server_uses(trees) == {"f.py", "g.py", "h.py"}
