"""Chats in a pseudo-terminal with a scripted server: the screen's contents over time."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("pty", reason="needs a Unix terminal")

from tests.cli.screen import Terminal, terminal
from tests.cli.scripted import Scripted, scripted
from tests.warm import Forker

pytestmark = pytest.mark.slow

WIDE = 120
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as one:
        yield one


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a temporary history."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "nano-inference" / "history"


@contextmanager
def chatting(
    forker: Forker | None, server: Scripted, *options: str, rows: int = 24, columns: int = WIDE, **env: str
) -> Iterator[Terminal]:
    """Run a chat up to its prompt; end it with Ctrl-D after the block."""
    argv = ("chat", "--server", server.url, *options)
    with terminal(*argv, forker=forker, rows=rows, columns=columns, **env) as screen:
        screen.prompt()
        yield screen
        screen.prompt()
        screen.send("\x04")
        assert screen.leave() == 0 and "Traceback" not in screen.text()


def answer_of(screen: Terminal) -> str:
    """Return the text between the last question and the statistics."""
    return screen.text().rpartition("> question\n")[2].partition("\n[first token")[0]


def test_answer_is_rendered_while_streamed(forker: Forker, server: Scripted) -> None:
    with chatting(forker, server) as screen:
        screen.send("question\r")
        server.say("**Bo")
        screen.wait("**Bo")
        server.say("ld** is\n\n| a | b |\n|")
        screen.wait("Bold is")
        screen.wait("| a | b |")
        server.say("---|---|\n| 1 | 2 |\n")
        screen.wait(" 1  2")
        assert "|" not in screen.text() and "**" not in screen.text(), "the incomplete block was overwritten"
        server.say("\n```python\nprint(1)\n")
        screen.wait("print(1)")
        server.say("```\n\nlast")
        server.end(usage=USAGE)
        screen.wait("[7 prompt tokens (5 cached), 3 generated")
        screen.prompt()
        rows = [row.strip() for row in answer_of(screen).partition("\n[7")[0].splitlines()]
        assert rows == ["Bold is", "", "a  b", "────", "1  2", "", "print(1)", "", "last"]


LONG = "# Head\n\n" + "\n\n".join(f"paragraph {i} " + "word " * 30 for i in range(6)) + "\n\n- one\n- two\n\n"
LONG += "```python\n" + "".join(f"line_{i} = {i}\n" for i in range(40)) + "```\n\n"
LONG += "| n | square |\n|---|---|\n" + "".join(f"| row{i} | {i * i} |\n" for i in range(30)) + "\nend"


def marks() -> list[str]:
    """Return texts that the screen must contain once, in this order."""
    paragraphs = [f"paragraph {i} " for i in range(6)]
    return ["Head", *paragraphs, "• one", "• two", *(f"line_{i} " for i in range(40)), *(f"row{i} " for i in range(30))]


def assert_once(text: str) -> None:
    places = [text.index(mark) for mark in marks()]
    assert places == sorted(places) and all(text.count(mark) == 1 for mark in marks()), text


def test_answer_is_shown_once_with_resizes(forker: Forker, server: Scripted) -> None:
    """Resize in the middle of a paragraph and of a table; every row is shown once."""
    cuts = [0, LONG.index("paragraph 2") + 40, LONG.index("row3"), len(LONG)]
    last_words = ["paragraph 2 word word word word word wor", "row2  4", "end"]
    with chatting(forker, server, rows=16, columns=70) as screen:
        screen.send("question\r")
        for (start, end), last, size in zip(pairwise(cuts), last_words, [(8, 60), (20, 40), None], strict=True):
            server.say(LONG[start:end])
            screen.wait(last)
            if size is not None:
                screen.resize(*size)
        server.end()
        screen.wait("[first token")
        screen.prompt()
        assert_once(answer_of(screen))


def test_ctrl_c_ends_answer_and_connection(forker: Forker, server: Scripted) -> None:
    with chatting(forker, server) as screen:
        screen.send("question\r")
        server.say("half an ans")
        screen.wait("half an ans")
        screen.send("\x03")
        screen.wait("[stopped]")
        assert server.left.wait(60), "the server sees the disconnect"
        screen.prompt()
        server.post()
        screen.send("again\r")
        messages = server.post()["messages"]
        assert [message["content"] for message in messages] == ["question", "half an ans", "again"]
        server.answer("whole")
        screen.wait("whole")


def test_ctrl_c_at_the_prompt(forker: Forker, server: Scripted) -> None:
    """It clears a partial line; on an empty line a second Ctrl-C quits with 130."""
    with terminal("chat", "--server", server.url, forker=forker, columns=WIDE) as screen:
        screen.prompt()
        screen.send("half a ques")
        screen.wait("half a ques")
        screen.interrupt()
        screen.prompt()
        screen.interrupt()
        screen.wait("press Ctrl-C again, or Ctrl-D, to quit")
        screen.prompt()
        screen.ask("/seed")  # resets the count of presses
        screen.interrupt()
        screen.wait("press Ctrl-C again", 2)
        screen.prompt()
        screen.interrupt()
        assert screen.leave() == 130 and "Traceback" not in screen.text()


def test_input_during_answer_is_queued_without_echo(forker: Forker, server: Scripted) -> None:
    with chatting(forker, server) as screen:
        screen.send("question\r")
        server.say("first ")
        screen.wait("first")
        screen.send("hasty\r")
        server.answer("second")
        screen.wait("> hasty")
        assert "first second" in screen.text() and screen.text().count("hasty") == 1
        server.answer("third")
        screen.wait("third")


def test_multi_line_messages(forker: Forker, server: Scripted) -> None:
    typed = {
        '"""one\r/two\r\rthree"""\r': "one\n/two\n\nthree",
        '"""onethree\x1b[D\x1b[D\x1b[D\x1b[D\x1b[D\rtwo\r\x1b[F"""\r': "one\ntwo\nthree",
        "one\\\rtwo\r": "one\ntwo",
        "\x1b[200~/pasted\n  text\n\x1b[201~\r": "/pasted\n  text",
    }
    with terminal("chat", "--server", server.url, forker=forker, columns=WIDE) as screen:
        screen.wait_raw("\x1b[?2004h")  # bracketed paste is enabled
        for keys, message in typed.items():
            screen.prompt()
            screen.send(keys)
            assert server.post()["messages"][-1]["content"] == message
            server.answer("ok")
            screen.wait_raw("[first token")
        screen.prompt()
        long = "w" * (WIDE + 10)
        screen.send(long)
        screen.wait("\n  w")  # a wrapped row has no continuation mark
        screen.interrupt()
        screen.prompt()
        screen.send('"""never sent')
        screen.wait("never sent")
        screen.send("\r")
        screen.wait("\n.")
        screen.interrupt()
        screen.prompt()
        screen.send("\x04")
        assert screen.leave() == 0 and server.asked.empty()


def test_history_is_kept_and_tab_completes(forker: Forker, server: Scripted, state: Path, tmp_path: Path) -> None:
    for entry in ("hello\\\rthere\r", "/se\t7\r"):
        with terminal("chat", "--server", server.url, forker=forker, columns=WIDE) as screen:
            screen.prompt()
            screen.send(entry)
            if entry.startswith("hello"):
                server.answer("ok")
                screen.wait("ok")
            else:  # /set and /seed match, so Tab adds nothing
                screen.wait("/se7: no such command")
            screen.prompt()
            screen.send("\x04")
            assert screen.leave() == 0
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    assert [line for line in state.read_text().splitlines() if line.startswith("+")] == ["+hello", "+there", "+/se7"]
    (tmp_path / "kept.json").touch()
    with terminal("chat", "--server", server.url, forker=forker, columns=WIDE) as screen:
        screen.prompt()
        screen.send("\x1b[A\x1b[A\r")
        while (body := server.post())["messages"][-1]["content"] != "hello\nthere":
            pass
        server.answer("fine")
        screen.wait("fine")
        screen.ask("/set tempe\t0.5")
        screen.wait("temperature = 0.5")
        screen.ask(f"/load {tmp_path}/ke\t")
        screen.wait("kept.json: not valid JSON")
        screen.send("\x04")
        assert screen.leave() == 0 and body["model"] == "parrot"


EVIL = "a \x1b[31mred\x1b]0;title\x07 \x9b32m b\r\x08 [red]c[/red] &#27;[33m \u202eturned"
HARMLESS = "a ␛[31mred␛]0;title␇ �32m b␈ [red]c[/red] &#27;[33m �turned"


@pytest.mark.parametrize("options", [(), ("--plain",)])
def test_control_sequences_of_a_model_are_shown_as_text(
    forker: Forker, server: Scripted, options: tuple[str, ...]
) -> None:
    with chatting(forker, server, *options) as screen:
        screen.send("question\r")
        for char in EVIL:
            server.say(char)
        server.end(finish="\x1b[35mstop")
        screen.wait("[first token")
        raw = screen.raw
        screen.prompt()
        screen.wait(HARMLESS)
        screen.send("question\r")
        server.event({"error": {"message": "bad\x1b[36m\nday"}})
        screen.wait("the server failed: bad␛[36m day")
        for sequence in (b"\x1b[31m", b"\x1b]0;", b"\x9b32", b"\x1b[35m", b"\x1b[36m", b"\x08 ["):
            assert sequence not in raw + screen.raw


COLOUR_CODES = [f"\x1b[{code}m".encode() for code in (*range(30, 38), *range(90, 98), "1;36")] + [b"\x1b[38;"]


@pytest.mark.parametrize(
    ("env", "is_coloured", "is_rendered"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, False, True),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, False, False),
        ({"PYTHONIOENCODING": "latin-1"}, False, False),
    ],
)
def test_colours_depend_on_terminal_and_variables(
    forker: Forker, server: Scripted, env: dict[str, str], is_coloured: bool, is_rendered: bool
) -> None:
    own = None if "PYTHONIOENCODING" in env else forker  # Python reads it when it starts
    with terminal("chat", "--server", server.url, forker=own, columns=WIDE, **env) as screen:
        screen.prompt()
        screen.send("question\r")
        screen.wait("question")
        server.answer("**bold** `code`\n\n```python\nx = 1\n```")
        screen.wait("[first token")
        raw = screen.raw
        screen.prompt()
        assert any(code in raw for code in COLOUR_CODES) == is_coloured
        assert ("**" not in answer_of(screen)) == is_rendered and "bold" in answer_of(screen)
        if not is_rendered:
            answer = raw.partition(b"**bold**")[2].partition(b"[first token")[0]
            assert answer and b"\x1b[" not in answer, "only the line editor sends escape sequences"
        assert (b"\x1b" in raw) == (env.get("TERM") != "dumb")
        screen.send("\x04")
        assert screen.leave() == 0


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({"PYTHONIOENCODING": "latin-1"}, b"caf\xe9 ? ?"),
        ({"LC_ALL": "C"}, "café 日 😀".encode()),
    ],
)
def test_unencodable_characters_are_replaced(server: Scripted, env: dict[str, str], shown: bytes) -> None:
    with chatting(None, server, **env) as screen:
        screen.send("question\r")
        for byte in "café 日 😀":
            server.say(byte)
        server.end()
        screen.wait("[first token")
        raw = screen.raw
        screen.prompt()
        assert shown in raw.replace(b"\x1b[K", b"")
