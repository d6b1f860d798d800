"""The architecture as a test: who may import whom, what may be global, what the package shows to the world."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import nano_inference

HOME = Path(nano_inference.__file__).parent
FILES = sorted(HOME.rglob("*.py"))
FACE = ast.parse((HOME / "__init__.pyi").read_text())
HOMES = {
    alias.name: str(node.module).removeprefix("nano_inference.")
    for node in FACE.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Public name -> the module that declares it."""
LEVELS = (
    "errors frozen registry checks seeds",
    "samples",
    "types memory exclusive children",
    "files packages",
    "kernels",
    "config hub chat_defaults",
    "wheels",
    "drafts logprobs runner",
    "kv text catalog",
    "scheduling matching",
    "sequence",
    "admission appending speculation",
    "models",
    "loader",
    "executors",
    "kinds",
    "weights",
    "parallel",
    "core",
    "mailboxes driving ngram_drafter",
    "assemble",
    "engine rank",
    "spmd",
    "rollout engine_thread compat",
    "async_engine",
    "pool",
    "server",
    "integrations",
    "cli",
    "nanochat",
    "__main__",
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms.split()}
LEVEL["__init__"] = -1  # the package itself: the version, which everybody may read
TORCH_FREE = (
    *(
        "__init__.py",
        "types.py",
        "support/samples.py",
        "config.py",
        "core/sequence.py",
        "core/scheduler.py",
        "core/admission.py",
        "core/core.py",
    ),
    *(
        "support/frozen.py",
        "core/driving.py",
        "core/matchers.py",
        "core/mailboxes.py",
        "engine_thread.py",
        "async_engine.py",
    ),
    "weights/updates.py",
    *("core/speculation.py", "core/appending.py", "parallel/shard.py", "parallel/messages.py", "parallel/processes.py"),
    "core/step.py",
    "core/seeds.py",
    "rl/pool/routing.py",
    "core/drafting.py",
    "core/ngram_drafter.py",
    *(
        "loading/catalog.py",
        "text/generation_config.py",
        "loading/hub.py",
        "loading/wheels.py",
        "support/processes.py",
        "support/files.py",
        "support/packages.py",
        "core/cache/__init__.py",
        "core/cache/hashing.py",
        "core/cache/paged.py",
        "core/cache/pool.py",
        "core/cache/radix.py",
        "models/config.py",
        "models/ops.py",
        "models/program.py",
        "models/parts.py",
        "models/families.py",
        "models/dense.py",
        "models/gemma.py",
    ),
    *("loading/hf_config.py", "loading/gguf_file.py", "loading/gguf_config.py", "loading/ggml.py"),
    "loading/fields.py",
    *("loading/inferred.py", "nanochat/rules.py", "nanochat/configs.py", "nanochat/files.py"),
    *("nanochat/names.py", "nanochat/rendering.py", "nanochat/pickled.py"),
    *("nanochat/convert.py", "nanochat/calculator.py", "nanochat/tool.py", "nanochat/dialogue.py", "nanochat/kinds.py"),
    *("nanochat/terms.py", "nanochat/program.py", "nanochat/builtin.py", "cli/nanochat.py"),
)
"""Modules that do not load torch when they are imported, neither themselves nor through others."""
TORCH_THROUGH_OTHERS = ("engine.py", "rl/rollout.py", "parallel/rank.py", "server/opening.py")
"""Modules that use no torch of their own, but load it with what builds an engine's parts."""
MUTATORS = {
    *("append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "add", "discard"),
    *("appendleft", "popleft", "extendleft", "sort", "reverse", "move_to_end", "__setitem__", "__delitem__"),
}
KINDS = {"KVStore", "KernelStore", "TorchExecutor", "CpuExecutor"}
MAKERS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"}


@functools.cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a tree, which most tests read."""
    return tuple(ast.walk(tree))


def room_of(module: str) -> str:
    """The room of a dotted module name below the package."""
    return module.split(".")[1] if "." in module else "__init__"


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, at any depth; names of the package's face count as where they live."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            if node.module != "nano_inference":
                yield node.module
                continue
            for alias in node.names:
                home = HOMES.get(alias.name, alias.name)
                is_room = (HOME / home).is_dir() or (HOME / f"{home}.py").is_file()
                yield f"nano_inference.{home}" if is_room else "nano_inference"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            name = node.value.partition(":")[0]  # registries name classes as "nano_inference.models.dense:Dense"
            if name.startswith("nano_inference.") and name.replace(".", "").isidentifier():
                yield name


def wrong_imports(room: str, tree: ast.AST) -> list[str]:
    """The imports that do not point down."""
    names = [name for name in imported_modules(tree) if name.partition(".")[0] == "nano_inference"]
    return [name for name in names if room_of(name) != room and not LEVEL[room_of(name)] < LEVEL[room]]


@functools.cache
def early_imports(tree: ast.Module) -> tuple[str, ...]:
    """Return every module that is imported together with the tree's own, not in its functions."""
    found: list[str] = []
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += imported_modules(ast.Module([node], []))
            if isinstance(node, ast.ImportFrom):
                found += (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            waiting += [one for one in ast.walk(node) if isinstance(one, ast.Import | ast.ImportFrom)]
    return tuple(found)


def loaded_with(path: str, trees: Mapping[str, ast.Module]) -> set[str]:
    """Return what an import of a file of the package loads: its files by their paths, other packages by their names."""
    loaded, waiting = {path}, [path]
    while waiting:
        here = waiting.pop()
        found: set[str] = set()
        for name in early_imports(trees[here]):
            first, *parts = name.split(".")
            homes = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
            files = {file for home in homes for file in (f"{home}.py", f"{home}/__init__.py") if file in trees}
            found |= files if first == "nano_inference" else {first}
        waiting += [one for one in found - loaded if one in trees]
        loaded |= found
    return loaded


def globals_written(tree: ast.Module) -> list[str]:
    """Module-level containers that the module changes."""
    bound: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and is_container(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {target.id for target in targets if isinstance(target, ast.Name)}
    written = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            written.append(node.func.value)
        elif isinstance(node, ast.AugAssign):
            written.append(node.target)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            written.append(node.value)
    return sorted({root.id for node in written if isinstance(root := root_of(node), ast.Name) and root.id in bound})


def is_container(node: ast.expr) -> bool:
    displays = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name in MAKERS
    return isinstance(node, displays)


def root_of(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node


def reads_environment(tree: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "putenv"}
    attributes = {n.attr for n in nodes_of(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "os"}
    imported = {a.name for n in nodes_of(tree) if isinstance(n, ast.ImportFrom) and n.module == "os" for a in n.names}
    return bool(names & (attributes | imported))


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield every identifier, module name and string, docstrings left out."""
    bodies = [node.body for node in nodes_of(tree) if isinstance(getattr(node, "body", None), list)]
    docstrings = {id(one.value) for body in bodies for one in body if isinstance(one, ast.Expr)}
    for node in nodes_of(tree):
        if id(node) not in docstrings:
            values = [
                value for _, field in ast.iter_fields(node) for value in (field if isinstance(field, list) else [field])
            ]
            yield from (value for value in values if isinstance(value, str))


def relative(path: Path) -> str:
    return path.relative_to(HOME).as_posix()


@pytest.fixture(scope="module")
def trees() -> Iterator[dict[str, ast.Module]]:
    yield {relative(path): ast.parse(path.read_text()) for path in FILES}
    nodes_of.cache_clear()
    early_imports.cache_clear()


def test_imports_point_one_way(trees: dict[str, ast.Module]) -> None:
    for path, tree in trees.items():
        room = path.partition("/")[0].removesuffix(".py")
        assert room in LEVEL, f"{path}: give the room {room!r} a level"
        assert not wrong_imports(room, tree), path


def test_the_engine_knows_no_text_and_text_no_engine(trees: dict[str, ast.Module]) -> None:
    for path, tree in trees.items():
        rooms = {room_of(name) for name in imported_modules(tree) if name.startswith("nano_inference.")}
        assert not (path == "engine.py" and "text" in rooms)
        assert not (path.startswith("text/") and "engine" in rooms), path


def test_nothing_is_imported_for_the_type_checker_alone(trees: dict[str, ast.Module]) -> None:
    """But in `compat`, most of whose names need no torch."""
    for path, tree in trees.items():
        if path == "compat.py":
            continue
        names = {node.id for node in nodes_of(tree) if isinstance(node, ast.Name)}
        attributes = {node.attr for node in nodes_of(tree) if isinstance(node, ast.Attribute)}
        assert "TYPE_CHECKING" not in names | attributes, path


def test_no_state_lives_in_a_module(trees: dict[str, ast.Module]) -> None:
    for path, tree in trees.items():
        assert not [node for node in nodes_of(tree) if isinstance(node, ast.Global)], f"{path}: global"
        assert not globals_written(tree), path


def test_rooms_without_torch_do_not_import_it(trees: dict[str, ast.Module]) -> None:
    free = [*TORCH_FREE, *(path for path in trees if path.startswith("text/"))]
    for path in free:
        imported = {name.partition(".")[0] for name in imported_modules(trees[path])}
        assert "torch" not in imported | loaded_with(path, trees), path


def test_users_of_engines_load_torch_through_others_alone(trees: dict[str, ast.Module]) -> None:
    for path in TORCH_THROUGH_OTHERS:
        assert "torch" in loaded_with(path, trees), path
        assert "torch" not in {name.partition(".")[0] for name in imported_modules(trees[path])}, path


def test_an_import_through_another_module_is_seen() -> None:
    sources = {
        "a.py": "from nano_inference.b import x",
        "b/__init__.py": "try:\n    from nano_inference.c import d\nexcept ImportError:\n    pass",
        "c/__init__.py": "",
        "c/d.py": "import torch.nn",
        "e.py": "def f():\n    import nano_inference.c.d",
    }
    trees = {path: ast.parse(source) for path, source in sources.items()}
    assert loaded_with("a.py", trees) == {"a.py", "b/__init__.py", "c/__init__.py", "c/d.py", "torch"}
    assert loaded_with("e.py", trees) == {"e.py"}


def test_only_the_cuda_kernels_import_triton_and_their_package_does_not(trees: dict[str, ast.Module]) -> None:
    kernels = "executors/cuda/kernels/"
    users = {path for path, tree in trees.items() if any(name.startswith("triton") for name in imported_modules(tree))}
    assert users and all(path.startswith(kernels) for path in users) and f"{kernels}__init__.py" not in users
    others = [tree for path, tree in trees.items() if not path.startswith("executors/cuda/")]
    tops = [
        ast.Module([one for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom)], []) for tree in others
    ]
    early = {
        name
        for top in tops
        for name in imported_modules(top)
        if name.startswith("nano_inference.executors.cuda.kernels.")
    }
    assert not early, "import executors/cuda/kernels in functions: they need triton"


def test_only_launchers_imports_the_cuda_kernels_and_in_a_function(trees: dict[str, ast.Module]) -> None:
    """The plain launchers, the records and the checks can be imported without Triton."""
    kernels, launchers = "nano_inference.executors.cuda.kernels", "executors/cuda/launchers.py"
    outside = {path: tree for path, tree in trees.items() if not path.startswith("executors/cuda/kernels/")}
    users = {path for path, tree in outside.items() if any(name.startswith(kernels) for name in imported_modules(tree))}
    assert users == {launchers}
    tops = [one for one in trees[launchers].body if isinstance(one, ast.Import | ast.ImportFrom)]
    assert not any(name.startswith(kernels) for name in imported_modules(ast.Module(tops, [])))


def test_the_environment_is_read_by_command_lines_and_by_assemble(trees: dict[str, ast.Module]) -> None:
    readers = {path for path, tree in trees.items() if reads_environment(tree)}
    allowed = {"build.py", "parallel/rank.py", "__main__.py", "support/processes.py"}
    allowed |= {"server/ray_serve.py", "support/packages.py"}  # for `serve run`, and Ray's own RAY_ADDRESS
    assert {path for path in readers if not path.startswith("cli/")} <= allowed


def kinds_asked(tree: ast.AST) -> list[str]:
    """Executors, stores and families that the code asks for by `isinstance` or `.family`."""
    found = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            found += [one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name) and one.id in KINDS]
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "family":
            found.append("family")
    return found


def test_only_executors_ask_what_kind_of_model_or_store_it_is(trees: dict[str, ast.Module]) -> None:
    """Readers of configuration files tell families apart."""
    asked = {name: kinds_asked(tree) for name, tree in trees.items()}
    outside = {name: kinds for name, kinds in asked.items() if kinds and not name.startswith("executors/")}
    assert not {name for name in outside if not name.startswith("loader/")}
    assert kinds_asked(ast.parse("isinstance(a.store, KVStore | int) or c.family == 'gemma'")) == ["KVStore", "family"]


def test_nothing_outside_its_room_names_nanochat(trees: dict[str, ast.Module]) -> None:
    """Formulas may cite it in docstrings and comments; pyproject.toml has the entry points that join it to the rest."""
    outside = {path: tree for path, tree in trees.items() if not path.startswith("nanochat/")}
    naming = {path for path, tree in outside.items() if any("nanochat" in name.lower() for name in names_in(tree))}
    assert not naming
    pages = [path for path in (HOME / "server" / "web").rglob("*") if path.suffix in (".js", ".html", ".css")]
    assert len(pages) > 10 and not [path for path in pages if "nanochat" in path.read_text().lower()]


SERVER_WIRING = {"wiring", "run", "hosted", "replicas", "several"}
"""Modules that join the core to the dialects and to the trainers' routes, and start the whole."""


def part_of(module: str) -> str:
    """The part of the server that a module belongs to: `core`, `wiring`, `rl`, or a dialect by its name."""
    below = module.removeprefix("nano_inference.server").removeprefix(".").split(".")
    if below[0] == "dialects" and below[1:]:
        return f"dialect {below[1].partition('_')[0]}"
    return "rl" if below[0] == "rl" else "wiring" if below[0] in SERVER_WIRING else "core"


def modules_of(tree: ast.AST) -> Iterator[str]:
    """Every module of the server that is imported; `from a.b import c` gives a.b.c when that is a module."""
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("nano_inference.server"):
            for alias in node.names:
                inner = HOME.joinpath(*f"{node.module}.{alias.name}".split(".")[1:])
                is_module = inner.with_suffix(".py").is_file() or inner.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("nano_inference.server"))


def wrong_parts(module: str, tree: ast.AST) -> list[str]:
    """The imports of a server's module that go to a part it must not know: only the wiring knows every part."""
    part = part_of(module)
    return [name for name in modules_of(tree) if part != "wiring" and part_of(name) not in ("core", part)]


def test_the_server_s_core_knows_no_dialect_and_dialects_not_one_another(trees: dict[str, ast.Module]) -> None:
    names = {path: f"nano_inference.{path.removesuffix('.py').replace('/', '.')}" for path in trees}
    served = {names[path]: tree for path, tree in trees.items() if path.startswith("server/")}
    assert not {name: wrong for name, tree in served.items() if (wrong := wrong_parts(name, tree))}
    parts = {part_of(name) for name in served}
    assert {"core", "wiring", "rl", "dialect openai", "dialect messages"} <= parts


def test_a_wrong_part_of_the_server_is_seen() -> None:
    def wrong(module: str, line: str) -> list[str]:
        return wrong_parts(f"nano_inference.server.{module}", ast.parse(line))

    assert wrong("app", "from nano_inference.server.dialects import openai")
    assert wrong("guard", "from nano_inference.server.trainers.routes import ADMIN_PATHS")
    assert wrong("app", "from nano_inference.server.wiring import make_app")
    assert wrong("dialects.sglang", "from nano_inference.server.dialects.llamacpp import props")
    assert wrong("dialects.sglang", "from nano_inference.server import wiring")
    assert wrong("rl.vllm", "import nano_inference.server.dialects.generate")
    assert not wrong("dialects.sglang", "from nano_inference.server.dialects.sglang_reply import SglangReply")
    assert not wrong("dialects.sglang", "from nano_inference.server.calls import completion_call")
    assert not wrong("wiring", "from nano_inference.server.dialects import openai")


def test_no_model_is_a_torch_module(trees: dict[str, ast.Module]) -> None:
    bases = [
        base
        for tree in trees.values()
        for node in nodes_of(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    ]
    assert not [base for base in bases if isinstance(base, ast.Attribute) and base.attr == "Module"]


def test_the_checks_above_see_what_they_look_for() -> None:
    wrong = "from nano_inference.engine import x\ndef f():\n    import nano_inference.cli.app\n"
    assert wrong_imports("kv", ast.parse(wrong)) == ["nano_inference.engine", "nano_inference.cli.app"]
    assert wrong_imports("kv", ast.parse("from nano_inference import InferenceEngine")) == ["nano_inference.engine"]
    assert wrong_imports("kv", ast.parse("from nano_inference import cli, __version__")) == ["nano_inference.cli"]
    assert wrong_imports("kv", ast.parse("HOME = 'nano_inference.models.dense:D'")) == ["nano_inference.models.dense"]
    assert not wrong_imports("models", ast.parse("HOME = 'nano_inference.models.dense:D'"))
    source = "a = []\nb = {}\nc = set()\nd = {1: []}\ne = [1]\nf = dict()\ng: list[int] = []\n"
    body = "def f():\n    a.append(1)\n    b[1] = 2\n    c.add(3)\n    d[1].append(2)\n    del f[1]\n"
    loop = "g += [1]\nx = []\ndef h(y):\n    x = y[1]\n    return e[0]\n"
    assert globals_written(ast.parse(source + body + loop)) == ["a", "b", "c", "d", "f", "g"]
    assert reads_environment(ast.parse("import os\nos.environ['A']"))
    assert reads_environment(ast.parse("from os import getenv"))
    assert not reads_environment(ast.parse("def f(environ):\n    return environ['A']"))


def test_names_are_found_wherever_they_stand() -> None:
    assert set(names_in(ast.parse("'''doc'''"))) == set()
    found = "from a.b import c as d\ndef f(g=1, *h):\n    'doc'\n    global i\n    return j.k('l', m=f'n{o}')\n"
    found += "class P: 'doc'\n"
    assert set(names_in(ast.parse(found))) >= {"a.b", "c", "d", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "P"}
    assert "doc" not in set(names_in(ast.parse(found)))
    assert "q" in set(names_in(ast.parse("match r:\n    case 'q': pass\n")))


def test_every_public_name_imports_and_lives_where_the_face_says() -> None:
    assert nano_inference.__all__ == sorted([*HOMES, "__version__"])
    for name in nano_inference.__all__:
        assert getattr(nano_inference, name) is not None
    for name, home in HOMES.items():
        assert getattr(nano_inference, name) is getattr(importlib.import_module(f"nano_inference.{home}"), name)
    assert dir(nano_inference) == nano_inference.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nano_inference.nothing


def test_type_checkers_see_the_same_names() -> None:
    imports = [node for node in FACE.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    declared = {
        node.target.id for node in FACE.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert declared == {"__all__", "__version__"}


def test_importing_the_package_does_not_wait_for_torch() -> None:
    code = "import sys, nano_inference as n; n.SamplingParams(); n.EngineConfig(model_path='m'); n.schedule;"
    code += "n.RadixKVCache(2, 2); import nano_inference.async_engine, nano_inference.core.core;"
    code += "assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
