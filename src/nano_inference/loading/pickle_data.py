"""Read a pickle as data: plain values, and records of the classes and calls that it names. Nothing is run.

The opcodes are checked before Python's unpickler reads them: only those that CPython writes for plain values, for
objects with `__reduce__` and for instances with a dict (pickletools.py, protocols 2 to 5), within limits of size.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any, ClassVar

from nano_inference.loading.fields import shown

MAX_BYTES = 32 << 20  # most bytes of a pickle
MAX_VALUES = 1 << 21  # most values that a pickle may push; a shared tensor takes about 45
MAX_DEPTH = 64  # most tuples inside each other; hashing a tuple recurses
_MAX_LONG = 8  # most bytes of an integer
_PUTS = frozenset({"BINPUT", "LONG_BINPUT", "MEMOIZE"})
_OPCODES = _PUTS | {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"),
}


class PickleError(ValueError):
    """The pickle is damaged, or has more than the caller allows; the message says what."""


class Named:
    """A class or function that a pickle names, as a class of its own; an instance is a call or an instance of it."""

    name: ClassVar[str]  # `module attribute`
    arguments: tuple[Any, ...]
    state: Any = None  # what `__setstate__` or the instance's dict would get

    def __new__(cls, *arguments: Any) -> Named:
        """Record a call of it, or an instance that unpickling would make without calling `__init__`."""
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        if self.state is not None:
            raise PickleError("it sets the state of an instance twice")
        self.state = state


def name_of(value: object) -> str:
    """Return the name of a class or function; empty for any other value."""
    return value.name if isinstance(value, type) and issubclass(value, Named) else ""


def read_data(data: bytes, names: frozenset[str]) -> Any:
    """Return the value of a pickle: None, bool, int, str, bytes, list, dict, tuple, or a class or record of `Named`.

    `names` are the classes and functions that it may name. Values may contain themselves, and may be nested deeper than
    recursion can follow: compare their types one level at a time. Raises `PickleError`.
    """
    if len(data) > MAX_BYTES:
        raise PickleError(f"it has {len(data)} bytes (limit {MAX_BYTES})")
    if data[:1] != pickle.PROTO or not 2 <= int.from_bytes(data[1:2], "little") <= 5:
        raise PickleError("it is not a pickle of protocol 2 to 5")
    try:
        _check_opcodes(data)
        return _Unpickler(data, names).load()
    except PickleError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        reason = (str(error).splitlines() or [""])[0]
        raise PickleError(f"it is damaged ({shown(reason)})") from None


def _check_opcodes(data: bytes) -> None:
    """Raise an error for an opcode that is not listed, and for sizes over the limits."""
    depths: list[int | None] = []  # how deep each value of the stack nests tuples; None for a mark
    memo: dict[int, int] = {}
    num_values = end = 0
    for info, argument, at in pickletools.genops(data):
        name, end = info.name, at or 0
        if name not in _OPCODES or (name == "PROTO" and at):
            raise PickleError(f"opcode {info.code!r} at byte {at} is not one that plain values need")
        if isinstance(argument, str):
            argument.encode()  # halves of surrogate pairs raise an error
        elif isinstance(argument, int) and argument.bit_length() > 8 * _MAX_LONG:
            raise PickleError(f"it has an integer of more than {_MAX_LONG} bytes")
        if name in _PUTS:
            index = len(memo) if argument is None else argument
            if index > MAX_VALUES or not depths or depths[-1] is None:
                raise PickleError("it memoizes a value that is not there")
            memo[index] = depths[-1]
            continue
        popped = _popped(depths, info)
        depth = memo.get(argument or 0, 0) if name in ("BINGET", "LONG_BINGET") else 0
        if name.startswith("TUPLE"):
            depth = 1 + max(popped, default=0)
        depths += [None if name == "MARK" else depth] * len(info.stack_after)
        num_values += len(info.stack_after)
        if num_values > MAX_VALUES:
            raise PickleError(f"it has more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise PickleError(f"its tuples are nested more than {MAX_DEPTH} deep")
    if depths or end + 1 != len(data):
        raise PickleError("it does not end with exactly one value")


def _popped(depths: list[int | None], info: pickletools.OpcodeInfo) -> list[int]:
    found: list[int] = []
    for kind in reversed(info.stack_before):
        if kind is pickletools.markobject:
            continue
        while depths and depths[-1] is not None:
            found.append(depths.pop() or 0)
            if kind is not pickletools.stackslice:
                break
        else:
            if kind is not pickletools.stackslice or not depths:
                raise PickleError("an opcode pops from an empty stack, or ends a batch without a mark")
            depths.pop()
    return found


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, whose classes and functions are records."""

    def __init__(self, data: bytes, names: frozenset[str]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names
        self._found: dict[str, type[Named]] = {}

    def find_class(self, module: str, name: str, /) -> type[Named]:
        """Return a record's class for a listed name."""
        text = f"{module} {name}"
        if text not in self._names:
            raise PickleError(f"it names {shown(text)}, which is neither imported nor called")
        if text not in self._found:
            self._found[text] = type(text, (Named,), {"name": text})
        return self._found[text]
