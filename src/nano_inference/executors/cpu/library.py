"""The compiled library: ctypes structures and function signatures, and its thread pool.

Shapes: N outputs and K inputs of a matrix, B rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_long, c_void_p
from pathlib import Path

F32, BF16, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, INT8 = range(9)  # weight formats (c/formats.h)

_SPIN_NS = 500_000  # how long an idle thread polls for work before it sleeps: longer than the time between two steps


class MatrixStruct(ctypes.Structure):
    """One packed matrix."""

    _fields_ = (
        *((name, c_int32) for name in ("format", "num_out", "num_in", "column", "rounds", "by_rows")),
        ("data", c_void_p),
    )


class OpStruct(ctypes.Structure):
    """One operation; c/program.c documents the fields."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "flags", "in_", "in2", "out", "matrix", "num_matrices", "layer")),
        *((name, c_int32) for name in ("rope", "choice")),
        ("count", c_int64),
        ("state", c_int64),
        *((name, c_float) for name in ("eps", "offset", "scale", "cap")),
        *((name, c_int32) for name in ("column", "column2", "dim", "num_keys", "num_values")),
        *((name, c_void_p) for name in ("weight", "weight2", "pieces")),
    )


class RopeStruct(ctypes.Structure):
    """Cosines and signed sines [P, R] of every position."""

    _fields_ = (("cosine", c_void_p), ("sine", c_void_p), ("turning", c_int64))


class ProgramStruct(ctypes.Structure):
    """A list of operations with their matrices, rotary tables and buffers."""

    _fields_ = (
        ("ops", POINTER(OpStruct)),
        ("num_ops", c_int64),
        ("matrices", POINTER(MatrixStruct)),
        ("ropes", POINTER(RopeStruct)),
        ("widths", POINTER(c_int32)),
        ("strides", POINTER(c_int32)),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim")),
    )


class TokensStruct(ctypes.Structure):
    """The tokens of a step: positions, block tables, and crews (tokens that share cache reads)."""

    _fields_ = (
        *((name, c_int32) for name in ("num_tokens", "block_size", "num_crews")),
        *((name, c_void_p) for name in ("position", "table_of", "tables", "order", "crews")),
    )


class RowsStruct(ctypes.Structure):
    """Tokens that are computed together, the number of splits of their keys, and the adapter of each."""

    _fields_ = (("tokens", TokensStruct), ("num_splits", c_int64), ("adapter", c_void_p))


class LowRankStruct(ctypes.Structure):
    """What an adapter has for one matrix; c/adapters.h documents the fields."""

    _fields_ = (
        *((name, c_int32) for name in ("rank", "column", "format")),
        ("scale", c_float),
        ("a", c_void_p),
        ("b", c_void_p),
    )


class StatesStruct(ctypes.Structure):
    """The slots of recurrent states, and those that a step's rows use; c/delta.h documents the fields."""

    _fields_ = (
        ("slots", c_void_p),
        *((name, c_int64) for name in ("slot_floats", "num_rows")),
        *((name, c_void_p) for name in ("row", "begin", "source", "first", "end", "slot")),
    )


class StepStruct(ctypes.Structure):
    """One step's arguments."""

    _fields_ = (
        ("all", RowsStruct),
        ("kept", RowsStruct),
        *((name, c_void_p) for name in ("keep", "token", "previous", "buffers", "k", "v")),
        ("block_bytes", c_int64),
        ("is_short", c_int64),
        ("parts", c_void_p),
        ("bytes", c_void_p),
        ("byte_stride", c_int64),
        ("states", StatesStruct),
        ("adapters", c_void_p),
        ("low", c_void_p),
        ("low_stride", c_int64),
        ("failed", c_int),
    )


class DrawsStruct(ctypes.Structure):
    """Rows of logits and their sampling parameters."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("vocab_size", c_int64),
        *((name, c_void_p) for name in ("temperature", "uniform", "is_raw", "special", "token", "logprob")),
    )


class SpecialStruct(ctypes.Structure):
    """Options of one row's draw; c/sample.h documents the fields."""

    _fields_ = (
        *((name, c_double) for name in ("top_p", "min_p")),
        *((name, c_float) for name in ("repetition", "presence", "frequency")),
        *((name, c_int32) for name in ("top_k", "report", "wants_raw", "wants_kept")),
        *((name, c_int32) for name in ("num_seen", "num_biased", "num_named", "num_tops")),
        ("mask_bytes", c_int64),
        *((name, c_void_p) for name in ("seen", "times", "biased", "bias", "mask", "named", "named_logprob")),
        *((name, c_void_p) for name in ("top_id", "top_logprob")),
        ("raw_logprob", c_float),
    )


class SumsStruct(ctypes.Structure):
    """Rows of logits whose log-sum-exp is computed."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("vocab_size", c_int64),
        *((name, c_void_p) for name in ("temperature", "best", "log_mass")),
    )


STRUCTS = (
    *(OpStruct, ProgramStruct, StepStruct, MatrixStruct, RopeStruct, DrawsStruct, TokensStruct, SumsStruct),
    *(SpecialStruct, LowRankStruct),
)
"""In the order of `nano_sizes`, which returns the size of each in C."""


class Library:
    """Owns the loaded code and its thread pool, which ends with it.

    Several engines may share the pool from different threads: the C code serialises their calls. A forked child has no
    threads; it creates its own pool at first use.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        self.code = ctypes.CDLL(str(path))
        self.num_threads = num_threads
        self._pool: int | None = None
        self._owner = 0
        self._ending: weakref.finalize[..., Library] | None = None
        _declare(self.code)
        for which, struct in enumerate(STRUCTS):
            assert self.code.nano_sizes(which) == ctypes.sizeof(struct), f"{struct.__name__} differs from the C side"

    @property
    def isa(self) -> str:
        """Return the instruction set that the library was compiled for."""
        return str(self.code.nano_isa().decode())

    @property
    def has_vnni(self) -> bool:
        """Return True if eight-bit products use VNNI instructions."""
        return bool(self.code.nano_has_vnni())

    @property
    def pool(self) -> int:
        """Return the address of the thread pool; create it at first use. Raises `MemoryError`."""
        if self._pool is None or self._owner != os.getpid():
            self._pool = self.code.nano_pool_new(self.num_threads, _SPIN_NS)
            self._owner = os.getpid()
            if not self._pool:
                self._pool = None
                raise MemoryError("no memory for the kernels' threads")
            self._ending = weakref.finalize(self, _end_threads, self.code, self._pool, self._owner)
            self._ending.atexit = False  # at exit another thread may still be running a step
        return self._pool

    def close(self) -> None:
        """End the threads; the next use creates a new pool."""
        if self._ending is not None:
            self._ending()
        self._pool = None


def _end_threads(code: ctypes.CDLL, pool: int, owner: int) -> None:
    """Free the pool of a library that is no longer referenced; a forked child does not own it."""
    if owner == os.getpid():
        code.nano_pool_free(pool)


def _declare(code: ctypes.CDLL) -> None:
    program, arrays = (POINTER(ProgramStruct), POINTER(StepStruct)), (c_void_p,) * 4
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "nano_isa": (c_char_p, ()),
        "nano_has_vnni": (c_int, ()),
        "nano_sizes": (c_int64, (c_int,)),
        "nano_pool_new": (c_void_p, (c_int, c_long)),
        "nano_pool_free": (None, (c_void_p,)),
        "nano_packed_bytes": (c_long, (c_int, c_long, c_long)),
        "nano_pack": (None, (c_int, c_void_p, c_void_p, c_long, c_long, c_long, c_void_p)),
        "nano_pack_short": (None, (c_void_p, c_long, c_long, c_long, c_void_p)),
        "nano_scan": (c_int, (c_int, c_void_p, c_int64)),
        "nano_int8_row_bytes": (c_int64, (c_int64,)),
        "nano_pack_int8": (None, (c_void_p, c_long, c_long, c_long, c_long, c_void_p)),
        "nano_pack_low": (None, (c_int, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p)),
        "nano_unpack": (None, (c_int, c_void_p, c_long, c_long, c_long, c_void_p)),
        "nano_split_size": (c_int64, (c_int64,)),
        "nano_plan": (c_int64, (*program, c_int32, c_int64, *arrays, c_int32, c_void_p, c_int32, c_int32, c_void_p)),
        "nano_run": (c_int, (c_void_p, *program, *program)),
        "nano_populate": (c_int, (c_void_p, c_int64)),
        "nano_draw": (c_int, (c_void_p, POINTER(DrawsStruct), c_int64)),
        "nano_normalise": (None, (c_void_p, POINTER(SumsStruct), c_int64)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(code, name)
        function.restype, function.argtypes = result, arguments
