"""Read a pickle as data: plain values, and the classes and calls that it names. Nothing is imported or called.

Interprets the opcodes that CPython writes for plain values, for objects with `__reduce__` and for instances with a dict
(pickletools.py, protocols 2 to 5). Any other opcode is an error, and so is a name that the caller does not list.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nano_inference.loading.fields import shown

MAX_BYTES = 32 << 20  # most bytes of a pickle
MAX_VALUES = 1 << 21  # most values that a pickle may push; a shared tensor takes about 45
MAX_MARKS = 16  # most batches inside each other
_MAX_LONG = 8  # most bytes of an integer
_MAX_LINE = 256


class PickleError(ValueError):
    """The pickle is damaged, or has more than the caller allows; the message says what."""


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function by name: `module attribute`."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call that unpickling would make."""

    function: Named
    arguments: tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Instance:
    """An instance that unpickling would make, without calling `__init__`."""

    cls: Named
    state: Any = None  # what `__setstate__` or the instance's dict would get


def read_data(data: bytes, names: frozenset[str]) -> Any:
    """Return the value of a pickle: None, bool, int, str, bytes, list, dict, tuple, `Named`, `Call` or `Instance`.

    `names` are the classes and functions that it may name. Values may contain themselves, and may be nested deeper than
    recursion can follow: compare their types one level at a time. Keys of dicts are str or `Named`. Raises
    `PickleError`.
    """
    if len(data) > MAX_BYTES:
        raise PickleError(f"it has {len(data)} bytes (limit {MAX_BYTES})")
    if data[:1] != pickle.PROTO or not 2 <= int.from_bytes(data[1:2], "little") <= 5:
        raise PickleError("it is not a pickle of protocol 2 to 5")
    machine = _Machine(data, names)
    while (code := machine.take(1)) != pickle.STOP:
        if code in _BARE:
            _BARE[code](machine)
        elif code in _NUMBERED:
            width, is_signed, operation = _NUMBERED[code]
            operation(machine, int.from_bytes(machine.take(width), "little", signed=is_signed))
        elif code in _COUNTED:
            machine.push_counted(*_COUNTED[code])
        else:
            raise PickleError(f"opcode {code!r} at byte {machine.at - 1} is not one that plain values need")
    return machine.result()


@dataclass(slots=True)
class _Machine:
    """State of the interpreter."""

    data: bytes
    names: frozenset[str]
    at: int = 2  # next byte, after the protocol
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    num_values: int = 0

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        found = self.data[self.at : self.at + count]
        if len(found) < count:
            raise PickleError("it ends too early")
        self.at += count
        return found

    def result(self) -> Any:
        """Return the only value left at the end."""
        value = self.pop()
        if self.stack or self.marks or self.at != len(self.data):
            raise PickleError("it does not end with exactly one value")
        return value

    def push(self, value: Any) -> None:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise PickleError(f"it has more than {MAX_VALUES} values")
        self.stack.append(value)

    def pop(self) -> Any:
        """Pop the top value above the last mark."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise PickleError("an opcode pops from an empty stack")
        return self.stack.pop()

    def mark(self) -> None:
        if len(self.marks) >= MAX_MARKS:
            raise PickleError("its batches are nested too deep")
        self.marks.append(len(self.stack))

    def pop_marked(self) -> list[Any]:
        """Pop the values since the last mark."""
        if not self.marks:
            raise PickleError("it ends a batch without a mark")
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def put(self, index: int) -> None:
        """Memoize the top value."""
        if not self.stack or index > MAX_VALUES:
            raise PickleError("it memoizes a value that is not there")
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise PickleError("it gets a value that was not memoized")
        self.push(self.memo[index])

    def push_tuple(self, count: int) -> None:
        self.push(tuple([self.pop() for _ in range(count)][::-1]))

    def push_counted(self, width: int, is_text: bool) -> None:
        """Push a string of bytes or text, which follows its length."""
        found = self.take(int.from_bytes(self.take(width), "little"))
        try:
            self.push(found.decode("utf-8", "strict") if is_text else found)
        except UnicodeDecodeError:
            raise PickleError("it has text that is not UTF-8") from None

    def push_long(self) -> None:
        width = self.take(1)[0]
        if width > _MAX_LONG:
            raise PickleError(f"it has an integer of {width} bytes (limit {_MAX_LONG})")
        self.push(int.from_bytes(self.take(width), "little", signed=True))

    def push_named(self, text: str) -> None:
        if text not in self.names:
            raise PickleError(f"it names {shown(text)}, which is neither imported nor called")
        self.push(Named(text))

    def stack_global(self) -> None:
        attribute, module = self.pop(), self.pop()
        if not isinstance(attribute, str) or not isinstance(module, str):
            raise PickleError("the name of a class or function is not text")
        self.push_named(f"{module} {attribute}")

    def global_lines(self) -> None:
        self.push_named(f"{self._line()} {self._line()}")

    def _line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + _MAX_LINE)
        if end < 0:
            raise PickleError("the name of a class or function does not end")
        line = self.take(end - self.at)
        self.at += 1
        return line.decode("utf-8", "replace")

    def reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Named) or not isinstance(arguments, tuple):
            raise PickleError("it calls something that is not a named function")
        self.push(Call(function, arguments))

    def new(self) -> None:
        arguments, cls = self.pop(), self.pop()
        if not isinstance(cls, Named) or not isinstance(arguments, tuple) or arguments:
            raise PickleError("it creates an instance of something that is not a named class without arguments")
        self.push(Instance(cls))

    def build(self) -> None:
        state = self.pop()
        target = self.stack[-1] if self.stack else None
        if not isinstance(target, Instance) or target.state is not None:
            raise PickleError("it sets the state of something other than a new instance")
        target.state = state

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1] if self.stack else None
        if not isinstance(target, list):
            raise PickleError("it appends to something other than a list")
        target += values

    def fill(self, items: list[Any]) -> None:
        """Add pairs to the dict on top. Hashing a tuple recurses, so keys are text or names."""
        target = self.stack[-1] if self.stack else None
        if not isinstance(target, dict) or len(items) % 2:
            raise PickleError("it adds pairs to something other than a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | Named) or key in target:
                raise PickleError("a key of a dict is a duplicate, or neither text nor a name")
            target[key] = value


def _set_item(machine: _Machine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.fill([key, value])


_BARE: Mapping[bytes, Callable[[_Machine], None]] = {
    pickle.NONE: lambda machine: machine.push(None),
    pickle.NEWTRUE: lambda machine: machine.push(True),
    pickle.NEWFALSE: lambda machine: machine.push(False),
    pickle.EMPTY_TUPLE: lambda machine: machine.push(()),
    pickle.EMPTY_LIST: lambda machine: machine.push([]),
    pickle.EMPTY_DICT: lambda machine: machine.push({}),
    pickle.MARK: _Machine.mark,
    pickle.TUPLE: lambda machine: machine.push(tuple(machine.pop_marked())),
    pickle.TUPLE1: lambda machine: machine.push_tuple(1),
    pickle.TUPLE2: lambda machine: machine.push_tuple(2),
    pickle.TUPLE3: lambda machine: machine.push_tuple(3),
    pickle.APPEND: lambda machine: machine.append([machine.pop()]),
    pickle.APPENDS: lambda machine: machine.append(machine.pop_marked()),
    pickle.SETITEM: _set_item,
    pickle.SETITEMS: lambda machine: machine.fill(machine.pop_marked()),
    pickle.LONG1: _Machine.push_long,
    pickle.GLOBAL: _Machine.global_lines,
    pickle.STACK_GLOBAL: _Machine.stack_global,
    pickle.REDUCE: _Machine.reduce,
    pickle.NEWOBJ: _Machine.new,
    pickle.BUILD: _Machine.build,
    pickle.MEMOIZE: lambda machine: machine.put(len(machine.memo)),
}
"""Opcodes without an argument, or with one of a form of its own."""
_NUMBERED: Mapping[bytes, tuple[int, bool, Callable[[_Machine, int], None]]] = {
    pickle.BININT: (4, True, _Machine.push),
    pickle.BININT1: (1, False, _Machine.push),
    pickle.BININT2: (2, False, _Machine.push),
    pickle.BINPUT: (1, False, _Machine.put),
    pickle.LONG_BINPUT: (4, False, _Machine.put),
    pickle.BINGET: (1, False, _Machine.get),
    pickle.LONG_BINGET: (4, False, _Machine.get),
    pickle.FRAME: (8, False, lambda machine, size: None),
}
"""Opcodes with a little-endian number: its bytes, and whether it is signed."""
_COUNTED: Mapping[bytes, tuple[int, bool]] = {
    pickle.SHORT_BINBYTES: (1, False),
    pickle.BINBYTES: (4, False),
    pickle.BINBYTES8: (8, False),
    pickle.SHORT_BINUNICODE: (1, True),
    pickle.BINUNICODE: (4, True),
    pickle.BINUNICODE8: (8, True),
}
"""Opcodes with a length and a string: bytes of the length, and whether the string is text."""
