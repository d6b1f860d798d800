"""Templates that take time or memory in ways that cost no fuel: they are ended, and nothing else notices.

Each bomb runs in a process of its own with a limit: code that renders in process would never come back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nano_inference.text.chat import ChatTemplate, chat_template, render
from nano_inference.text.template_worker import BASE_CPU_S, max_cpu_s
from nano_inference.text.templates import TemplateLimit
from nano_inference.types import ModelError

GUARD_S = 120
"""Seconds until a process counts as frozen."""
SLOW = "{% set l = range(99999)|list %}{% for i in range(9999) %}{% if l|tojson|first %}{% endif %}{% endfor %}"
"""Time in a function of ours, which no version of MiniJinja counts."""
BOMBS = {
    "reverse": "{% for i in range(99999) %}{{ (range(99999)|reverse)|first }}{% endfor %}",
    "membership": "{% set l = range(9999)|list %}{% for i in range(99999) %}{% if 'x' in l %}{% endif %}{% endfor %}",
    "sort": "{% set l = range(99999)|list %}{% for i in range(99999) %}{% if l|sort|first %}{% endif %}{% endfor %}",
    "test": "{% set a = range(99999)|list %}{% for i in range(9999) %}{% if a == a|list %}{% endif %}{% endfor %}",
}
FUSE = "{% if messages[0].content == 'bomb' %}" + SLOW + "{% endif %}[{{ messages[0].content }}]"
"""A template that is a bomb for one message only."""
CHILD = """
import json, sys
from nano_inference.text.chat import chat_template, render
from nano_inference.types import ModelError
data = json.loads(sys.argv[1]) * int(sys.argv[2])
try:
    print(render(chat_template(sys.stdin.read(), where="m.gguf"), [{"role": "user", "content": "hello", "data": data}]))
except ModelError as error:
    print(error)
"""


def message(text: str) -> list[dict[str, str]]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def outcome(source: str, data: str = '""', times: int = 1) -> str:
    """What a fresh process says of a template; the message has the text of that JSON so many times."""
    words = [sys.executable, "-c", CHILD, data, str(times)]
    done = subprocess.run(words, input=source, capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def fused() -> Iterator[ChatTemplate]:
    template = chat_template(FUSE, where="m.gguf")
    yield template
    template.close()


def test_a_bomb_ends_after_its_cpu_time_with_one_line() -> None:
    assert outcome(SLOW) == "m.gguf: the chat template takes more than 2 s of CPU time to render these messages\n"


def test_native_iteration_ends_with_one_line() -> None:
    """MiniJinja counts it as steps from 3.1 on; before, only the CPU time ends it."""
    with ThreadPoolExecutor() as threads:
        texts = set(threads.map(outcome, BOMBS.values()))
    assert texts <= {
        "m.gguf: the chat template takes more than 2 s of CPU time to render these messages\n",
        "m.gguf: the chat template takes too many steps\n",
    }


def test_memory_is_bounded() -> None:
    """One character outside the basic plane has a text stored as four bytes a character: 400 MB, beside its JSON."""
    says = outcome("{{ messages|length }}", data=json.dumps("\U0001f600" + "x" * 99), times=1_000_000)
    assert says == "m.gguf: the chat template takes more than 512 MiB of memory to render these messages\n"


def test_a_larger_request_has_more_time() -> None:
    assert max_cpu_s(0) == BASE_CPU_S and max_cpu_s(4 << 20) == BASE_CPU_S + 8


def test_threads_get_their_own_texts(fused: ChatTemplate) -> None:
    with ThreadPoolExecutor(12) as threads:
        names = [str(number) * 1000 for number in range(200)]
        assert list(threads.map(lambda name: render(fused, message(name)), names)) == [f"[{name}]" for name in names]


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> set[int]:
    """Processes whose parent this one is, zombies included."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        if parent == os.getpid():
            found.add(int(path.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_other_renderings_finish_beside_bomb_which_leaves_no_process_and_no_descriptor() -> None:
    files, processes = num_files(), children()
    template = chat_template(FUSE, where="m.gguf")
    with ThreadPoolExecutor(1) as thread:
        bomb = thread.submit(render, template, message("bomb"))
        texts = [render(template, message(str(number))) for number in range(20)]
        assert texts == [f"[{number}]" for number in range(20)]
        with pytest.raises(TemplateLimit, match=r"^m\.gguf: the chat template takes more than 2 s"):
            bomb.result(GUARD_S)
    assert len(children()) == len(processes) + 1, "the worker of the other renderings"
    assert render(template, message("after")) == "[after]"
    template.close()
    assert children() == processes and num_files() == files


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_template_that_is_dropped_ends_its_worker() -> None:
    processes = children()
    template = chat_template(FUSE, where="m")
    render(template, message("a"))
    assert children() > processes
    del template
    assert children() == processes


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_worker_that_was_killed_is_replaced(fused: ChatTemplate) -> None:
    before = children()
    render(fused, message("a"))
    (worker,) = children() - before
    os.kill(worker, signal.SIGTERM)  # ignored: a service manager sends it to all processes of a server that drains
    assert render(fused, message("b")) == "[b]" and worker in children()
    os.kill(worker, signal.SIGKILL)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    assert render(fused, message("c")) == "[c]" and worker not in children()


def test_closing_ends_a_rendering_that_is_under_way(fused: ChatTemplate) -> None:
    with ThreadPoolExecutor(1) as thread:
        render(fused, message("a"))
        bomb = thread.submit(render, fused, message("bomb"))
        while not bomb.running():
            threading.Event().wait(0.01)
        fused.close()
        with pytest.raises((RuntimeError, ModelError)):
            bomb.result(GUARD_S)
    with pytest.raises(RuntimeError, match="closed"):
        render(fused, message("a"))


def test_an_interrupt_leaves_no_reply_behind_for_the_next(fused: ChatTemplate) -> None:
    """The message is so long that the interrupt comes while the reply is awaited or read."""
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay in (0.001, 0.01, 0.05):
            render(fused, message("warm"))
            signal.setitimer(signal.ITIMER_REAL, delay)
            try:
                render(fused, message("x" * 3_000_000))
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
            assert render(fused, message("after")) == "[after]"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt(*_: object) -> None:
    """Do what Ctrl-C does."""
    raise KeyboardInterrupt


def test_a_forked_process_has_workers_of_its_own() -> None:
    code = f"""
import os, sys
from nano_inference.text.chat import chat_template, render
template = chat_template({FUSE!r}, where="m")
def say(text):
    return render(template, [{{"role": "user", "content": text}}])
say("parent")
child = os.fork()
if child == 0:
    ok = all(say(f"child {{i}}") == f"[child {{i}}]" for i in range(50))
    sys.exit(0 if ok else 1)
ok = all(say(f"parent {{i}}") == f"[parent {{i}}]" for i in range(50))
status = os.waitpid(child, 0)[1]
assert ok and status == 0, (ok, status)
assert say("after the child's end") == "[after the child's end]"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=GUARD_S)


NAMES = ("random", "json", "signal", "struct", "minijinja", "typing", "sitecustomize", "usercustomize", "resource")


@pytest.mark.parametrize("has_path", [False, True])
def test_a_worker_imports_nothing_from_the_current_directory(tmp_path: Path, has_path: bool) -> None:
    for name in (*NAMES, "nano_inference"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'a').write('{name} ')")
    code = f"""
import os
from nano_inference.text.chat import chat_template, render
os.chdir({str(tmp_path)!r})
{f"os.environ['PYTHONPATH'] = {str(tmp_path)!r}" if has_path else ""}
print(render(chat_template("{{{{ messages[0].content }}}}", where="m"), [{{"role": "user", "content": "hello"}}]))
"""
    # -P: else this process, whose imports are late, would look in the current directory. Workers do not inherit it.
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=GUARD_S)
    assert done.stdout == "hello\n", done.stderr
    assert not (tmp_path / "marker").exists()


def test_a_worker_imports_neither_torch_nor_tokenizers() -> None:
    code = "import sys, json, nano_inference.text.template_worker; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD_S, check=True)
    assert not {"torch", "tokenizers", "numpy", "tiktoken"} & set(json.loads(done.stdout))
