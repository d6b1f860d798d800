"""Read nanochat's tokenizer.pkl, a pickled tiktoken.Encoding, without unpickling it.

Interprets only the opcodes that CPython writes for this object (pickletools.py, protocols 2 to 5): its class by name,
an empty instance, and its state, a dict of name, pat_str, mergeable_ranks and special_tokens. Protocol 2 also encodes
bytes as a call of `_codecs.encode` on Latin-1 text. Any other opcode, global or call is an error.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import tiktoken

from nano_inference.support.files import open_buffered
from nano_inference.text.fast import no_panic
from nano_inference.types import MissingFile, ModelError

MAX_FILE = 1 << 23  # most bytes of a file; a vocabulary of 65,536 takes about 1 MB, in protocol 2 about 2 MB
MAX_ENTRIES = 1 << 18  # most entries of all dicts together
MAX_STACK = 1 << 12  # most values on the stack; CPython writes at most 1,000 pairs per batch
MAX_SPECIAL = 1 << 16  # ids after the ranks among which special tokens must be
_PROBES = ("What is 12 + 34?\n\n  It's 3 r's in strawberry.", "naïve 世界 🙂\t\r\n 1234567", " " * 50 + "a" * 200)
"""Texts that the pattern must preserve."""

_FIELDS = ("name", "pat_str", "mergeable_ranks", "special_tokens")


class _Refused(Exception):
    """The file is not a pickled encoding; the message says why."""


class _Global(Enum):
    """The globals that a file may name; they are never imported."""

    ENCODING = "tiktoken.core Encoding"
    TO_BYTES = "_codecs encode"


@dataclass(slots=True)
class _Instance:
    """A tiktoken.core.Encoding being built."""

    state: object = None


@dataclass(slots=True)
class _Machine:
    """State of the interpreter."""

    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    dicts: int = 0
    entries: int = 0
    instances: int = 0
    is_new: bool = False  # True if the last opcode pushed the top value, which is not memoized yet

    def push(self, value: Any) -> None:
        if len(self.stack) >= MAX_STACK:
            raise _Refused("the stack has more values than an encoding needs")
        self.stack.append(value)
        self.is_new = True

    def pop(self) -> Any:
        """Pop the top value above the last mark."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise _Refused("an opcode pops from an empty stack")
        self.is_new = False
        return self.stack.pop()

    def put(self, index: int) -> None:
        """Memoize the top value; CPython does so at once and counts from 0."""
        if index != len(self.memo) or not self.is_new:
            raise _Refused("values are memoized out of order")
        self.memo[index] = self.stack[-1]
        self.is_new = False

    def mark(self) -> None:
        """Start a batch of pairs: at most one for the state and one inside it."""
        if len(self.marks) >= 2:
            raise _Refused("it is nested deeper than an encoding")
        self.marks.append(len(self.stack))
        self.is_new = False

    def empty_dict(self) -> None:
        """Push a dict: the state, the ranks or the special tokens."""
        self.dicts += 1
        if self.dicts > 3:
            raise _Refused("it has more dicts than an encoding has")
        self.push({})

    def get(self, index: int) -> None:
        """Push a memoized value."""
        if index not in self.memo:
            raise _Refused("it gets a value that was not memoized")
        self.push(self.memo[index])

    def named(self, text: str) -> None:
        """Push one of the two allowed globals."""
        try:
            self.push(_Global(text))
        except ValueError:
            raise _Refused(f"it names {_shown(text)}, which is not run") from None

    def stack_global(self) -> None:
        """Push the global whose module and attribute are on the stack."""
        attribute, module = self.pop(), self.pop()
        if not isinstance(attribute, str) or not isinstance(module, str):
            raise _Refused("the name of a global is not text")
        self.named(f"{module} {attribute}")

    def pair(self) -> None:
        """Push a tuple of two texts."""
        second, first = self.pop(), self.pop()
        if not isinstance(first, str) or not isinstance(second, str):
            raise _Refused("a tuple has an item that is not text")
        self.push((first, second))

    def new(self) -> None:
        """Push the empty instance."""
        arguments, cls = self.pop(), self.pop()
        self.instances += 1
        if cls is not _Global.ENCODING or arguments != () or self.instances > 1:
            raise _Refused("it creates an object other than one tiktoken.Encoding")
        self.push(_Instance())

    def reduce(self) -> None:
        """Evaluate `_codecs.encode(text, "latin1")`, the only call allowed."""
        arguments, function = self.pop(), self.pop()
        if function is not _Global.TO_BYTES or not isinstance(arguments, tuple) or arguments[1:] != ("latin1",):
            raise _Refused("it calls a function, which is not run")
        try:
            self.push(arguments[0].encode("latin-1"))
        except UnicodeEncodeError:
            raise _Refused("it has bytes above 255") from None

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self._fill([key, value])

    def set_items(self) -> None:
        """Add the pairs since the last mark to a dict."""
        if not self.marks:
            raise _Refused("it ends a batch of pairs without a mark")
        start = self.marks.pop()
        items = self.stack[start:]
        self.is_new = False
        del self.stack[start:]
        self._fill(items)

    def build(self) -> None:
        """Set the state of the instance."""
        state, instance = self.pop(), self.pop()
        if not isinstance(instance, _Instance) or instance.state is not None:
            raise _Refused("it sets the state of something other than a new tiktoken.Encoding")
        instance.state = state
        self.push(instance)

    def _fill(self, items: list[Any]) -> None:
        target = self.stack[-1] if self.stack else None
        if not isinstance(target, dict) or len(items) % 2:
            raise _Refused("it adds pairs to something other than a dict")
        self.entries += len(items) // 2
        if self.entries > MAX_ENTRIES:
            raise _Refused(f"its dicts have more than {MAX_ENTRIES} entries")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | bytes) or key in target:
                raise _Refused(f"the key {_shown(key)} of a dict is a duplicate or not text")
            target[key] = value


_BARE: Mapping[bytes, Callable[[_Machine], None]] = {
    pickle.EMPTY_DICT: _Machine.empty_dict,
    pickle.EMPTY_TUPLE: lambda machine: machine.push(()),
    pickle.MARK: _Machine.mark,
    pickle.SETITEM: _Machine.set_item,
    pickle.SETITEMS: _Machine.set_items,
    pickle.STACK_GLOBAL: _Machine.stack_global,
    pickle.TUPLE2: _Machine.pair,
    pickle.REDUCE: _Machine.reduce,
    pickle.NEWOBJ: _Machine.new,
    pickle.BUILD: _Machine.build,
    pickle.MEMOIZE: lambda machine: machine.put(len(machine.memo)),
}
"""Opcodes without an argument."""
_NUMBERED: Mapping[bytes, tuple[int, Callable[[_Machine, int], None]]] = {
    pickle.BININT: (4, _Machine.push),
    pickle.BININT1: (1, _Machine.push),
    pickle.BININT2: (2, _Machine.push),
    pickle.BINPUT: (1, _Machine.put),
    pickle.LONG_BINPUT: (4, _Machine.put),
    pickle.BINGET: (1, _Machine.get),
    pickle.LONG_BINGET: (4, _Machine.get),
    pickle.FRAME: (8, lambda machine, size: None),
}
"""Opcodes with a little-endian number, and its bytes. BININT is read as unsigned: ids are not negative."""
_COUNTED: Mapping[bytes, tuple[int, bool]] = {
    pickle.SHORT_BINBYTES: (1, False),
    pickle.BINBYTES: (4, False),
    pickle.SHORT_BINUNICODE: (1, True),
    pickle.BINUNICODE: (4, True),
}
"""Opcodes with a length and a string: bytes of the length, and whether the string is text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledEncoding:
    """Fields of a tiktoken.Encoding."""

    name: str
    pat_str: str
    mergeable_ranks: Mapping[bytes, int]
    special_tokens: Mapping[str, int]


def read_encoding(path: Path) -> tiktoken.Encoding:
    """Return the encoding in a tokenizer.pkl. Raises `ModelError` naming the file and the problem."""
    fields = read_fields(path)
    try:
        encoding = encoding_of(fields)
    except (ValueError, TypeError, OverflowError) as error:
        raise ModelError(f"{path}: tiktoken refuses it: {error}") from None
    _check_cuts(path, encoding)
    return encoding


def encoding_of(fields: PickledEncoding) -> tiktoken.Encoding:
    """Return a tiktoken.Encoding with these fields."""
    return tiktoken.Encoding(
        fields.name,
        pat_str=fields.pat_str,
        mergeable_ranks=dict(fields.mergeable_ranks),
        special_tokens=dict(fields.special_tokens),
    )


def token_sizes(fields: PickledEncoding) -> list[int]:
    """Return the number of bytes of each id, 0 for special tokens: the contents of nanochat's token_bytes.pt."""
    sizes = [0] * (max(*fields.mergeable_ranks.values(), *fields.special_tokens.values()) + 1)
    for word, token in fields.mergeable_ranks.items():
        sizes[token] = len(word)
    return sizes


def _check_cuts(path: Path, encoding: tiktoken.Encoding) -> None:
    """Raise `ModelError` if the pattern fails on ordinary texts or loses parts of them."""
    for text in _PROBES:
        try:
            with no_panic(f"a text of {len(text)} characters"):
                is_whole = encoding.decode(encoding.encode_ordinary(text)) == text
        except Exception as error:  # ValueError at the limit of backtracking
            raise ModelError(f"{path}: its pattern fails: {error}") from None
        if not is_whole:
            raise ModelError(f"{path}: its pattern loses parts of a text")


def read_fields(path: Path) -> PickledEncoding:
    """Return the checked fields of a tokenizer.pkl. Raises `ModelError` naming the file and the problem."""
    try:
        with open_buffered(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE:
                raise _Refused(f"the file has more than {MAX_FILE} bytes")
            return _checked(_walk(file, size))
    except OSError as error:
        kind = MissingFile if isinstance(error, FileNotFoundError) else ModelError
        raise kind(f"{path}: cannot be read: {error.strerror}") from None
    except _Refused as error:
        raise ModelError(f"{path}: not nanochat's pickled tiktoken.Encoding: {error}") from None


def _walk(file: BinaryIO, size: int) -> object:
    """Interpret the opcodes; return the state of the object."""
    if _exactly(file, 1) != pickle.PROTO or not 2 <= _exactly(file, 1)[0] <= 5:
        raise _Refused("it is not a pickle of protocol 2 to 5")
    machine = _Machine()
    for code in _codes(file):
        if code in _BARE:
            _BARE[code](machine)
        elif code in _NUMBERED:
            width, operation = _NUMBERED[code]
            operation(machine, int.from_bytes(_exactly(file, width), "little"))
        elif code in _COUNTED:
            machine.push(_counted(file, *_COUNTED[code], size))
        elif code == pickle.GLOBAL:
            machine.named(f"{_line(file)} {_line(file)}")
        else:
            raise _Refused(f"opcode {code!r} at byte {file.tell() - 1} does not occur in a pickled encoding")
    result = machine.pop()
    if machine.stack or machine.marks or not isinstance(result, _Instance) or file.read(1):
        raise _Refused("it does not end with exactly one object")
    return result.state


def _codes(file: BinaryIO) -> Iterator[bytes]:
    while (code := _exactly(file, 1)) != pickle.STOP:
        yield code


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise _Refused("it ends too early")
    return data


def _counted(file: BinaryIO, width: int, is_text: bool, size: int) -> str | bytes:
    count = int.from_bytes(_exactly(file, width), "little")
    if count > size - file.tell():
        raise _Refused("it ends too early")
    data = _exactly(file, count)
    try:
        return data.decode("utf-8") if is_text else data
    except UnicodeDecodeError:
        raise _Refused("it has text that is not UTF-8") from None


def _line(file: BinaryIO) -> str:
    return file.readline(256).decode("utf-8", "replace").removesuffix("\n")


def _checked(state: object) -> PickledEncoding:
    if isinstance(state, str):
        raise _Refused(f"it only names the registered encoding {_shown(state)}, whose ranks tiktoken would download")
    if not isinstance(state, dict) or set(state) != set(_FIELDS):
        raise _Refused(f"its state is not {', '.join(_FIELDS)}")
    for name, kind in zip(_FIELDS, (str, str, dict, dict), strict=True):
        if not isinstance(state[name], kind):
            raise _Refused(f"{name} is {type(state[name]).__name__}, not {kind.__name__}")
    if not state["pat_str"]:
        raise _Refused("pat_str is empty")
    _check_ranks(state["mergeable_ranks"])
    _check_special(state["special_tokens"], len(state["mergeable_ranks"]))
    return PickledEncoding(**state)


def _check_ranks(ranks: dict[Any, Any]) -> None:
    if not all(type(word) is bytes and word and type(rank) is int for word, rank in ranks.items()):
        raise _Refused("mergeable_ranks does not map bytes to integers")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise _Refused(f"the ranks are not 0 to {len(ranks) - 1}, each once")
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise _Refused(f"the byte {lacking[0]:#04x} has no token")


def _check_special(special: dict[Any, Any], first: int) -> None:
    if not all(type(text) is str and text and type(token) is int for text, token in special.items()):
        raise _Refused("special_tokens does not map text to integers")
    if len(set(special.values())) != len(special):
        raise _Refused("two special tokens have one id")
    outside = [text for text, token in special.items() if not first <= token < first + MAX_SPECIAL]
    if outside:
        raise _Refused(f"the id of special token {_shown(outside[0])} is not among the {MAX_SPECIAL} after the ranks")


def _shown(value: object) -> str:
    return repr(value[:80] if isinstance(value, str | bytes) else type(value).__name__)
