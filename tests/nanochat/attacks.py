"""Attacks on the calculator and on the reader of tokenizer.pkl. They are harmless: if run, they create a file."""

from __future__ import annotations

import builtins
import os
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.nanochat.samples import PATTERN, RANKS, SPECIAL, encoding
from tests.pickles import Runs

HEAD = b"\x80\x04\x8c\x0dtiktoken.core\x8c\x08Encoding\x93)\x81"
"""Opcodes of protocol 4 for an empty instance."""


class Odd:
    """An object with tiktoken's state and another name."""

    def __init__(self, state: object) -> None:
        self.state = state

    def __getstate__(self) -> object:
        return self.state


def state(**changes: object) -> dict[str, object]:
    """Return the state of a valid encoding with some fields changed; None removes a field."""
    ranks = {word: rank for rank, word in enumerate(RANKS)}
    special = {text: len(ranks) + index for index, text in enumerate(SPECIAL)}
    fields = {"name": "rustbpe", "pat_str": PATTERN, "mergeable_ranks": ranks, "special_tokens": special} | changes
    return {key: value for key, value in fields.items() if value is not None}


def with_state(content: object, protocol: int = 4) -> bytes:
    """Return a pickle of an Encoding with this state."""
    data = pickle.dumps(Odd(content), protocol=protocol)
    module, name = Odd.__module__.encode(), b"Odd"
    if protocol >= 4:
        body = data[11:] if data[2:3] == b"\x95" else data[2:]
        old = b"\x8c" + bytes([len(module)]) + module + b"\x94\x8c\x03Odd"
        assert body.count(old) == 1
        return data[:2] + body.replace(old, b"\x8c\x0dtiktoken.core\x94\x8c\x08Encoding")
    return data.replace(b"c" + module + b"\n" + name + b"\n", b"ctiktoken.core\nEncoding\n")


def calls(marker: Path) -> dict[str, bytes]:
    """Return pickles that would create the file `marker` if unpickled."""
    touch = f"touch {marker}"
    opened = Runs(builtins.open, str(marker), "w")
    good = {word: rank for rank, word in enumerate(RANKS)}
    out = {
        "os.system": pickle.dumps(Runs(os.system, touch)),
        "builtins.eval": pickle.dumps(Runs(eval, f"open({str(marker)!r}, 'w').close()")),
        "open": pickle.dumps(opened),
        "open in protocol 2": pickle.dumps(opened, protocol=2),
        "open as the state": with_state(opened),
        "open as the state, protocol 2": with_state(opened, 2),
        "open as a rank": with_state(state(mergeable_ranks=good | {b"zz": opened})),
        "open as the name": with_state(state(name=opened)),
        "open as a special id": with_state(state(special_tokens={"<|bos|>": opened})),
        "open before the encoding": pickle.dumps((opened, encoding())),
        "inst": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "obj": b"\x80\x02(cos\nsystem\nX" + struct.pack("<I", len(touch)) + touch.encode() + b"o.",
        "newobj_ex": b"\x80\x04cbuiltins\nopen\n\x8c"
        + bytes([len(str(marker))])
        + str(marker).encode()
        + b"\x85}\x92.",
        "_codecs.encode of something else": b"\x80\x02c_codecs\nencode\nX\x01\0\0\0aX\x05\0\0\0rot13\x86R.",
        "_codecs.encode as the object": b"\x80\x02c_codecs\nencode\n)\x81}b.",
        "tiktoken.get_encoding": b"\x80\x02ctiktoken.registry\nget_encoding\nX\x04\0\0\0gpt2\x85R.",
        "Encoding called": b"\x80\x02ctiktoken.core\nEncoding\nX\x01\0\0\0aX\x06\0\0\0latin1\x86R.",
        "persistent id": b"\x80\x04P1\n.",
        "extension": b"\x80\x04\x82\x01.",
        "dotted name": b"\x80\x04\x8c\x0dtiktoken.core\x8c\x11Encoding.__init__\x93)\x81.",
    }
    return out


def wrong_states() -> Mapping[str, tuple[object, str]]:
    """Return invalid states with a part of their error messages."""
    ranks: dict[Any, Any] = {word: rank for rank, word in enumerate(RANKS)}
    first = len(ranks)
    return {
        "a name alone": ("cl100k_base", "only names the registered encoding 'cl100k_base'"),
        "one more": (state(explicit_n_vocab=5), "its state is not name, pat_str"),
        "a pattern of bytes": (state(pat_str=b"x"), "pat_str is bytes, not str"),
        "a pattern that does not compile": (state(pat_str="(x"), "tiktoken refuses it: .*parenthesis"),
        "ranks that are text": (state(mergeable_ranks="x"), "mergeable_ranks is str, not dict"),
        "no ranks": (state(mergeable_ranks={}), "0x00 has no token"),
        "a gap": (state(mergeable_ranks=ranks | {b"zz": first + 1}), f"the ranks are not 0 to {first}"),
        "a rank twice": (state(mergeable_ranks=ranks | {b"zz": 7}), f"the ranks are not 0 to {first}"),
        "an empty word": (state(mergeable_ranks=ranks | {b"": first}), "does not map bytes to integers"),
        "a byte without token": (
            state(mergeable_ranks={w: (r if r < 9 else r - 1) for w, r in ranks.items() if r != 9}),
            "the byte 0x09 has no token",
        ),
        "a special id among the ranks": (state(special_tokens={"<|bos|>": 5}), "'<|bos|>' is not among"),
        "a special id twice": (state(special_tokens={"<|bos|>": first, "<|b|>": first}), "two special tokens"),
        "a special token of bytes": (state(special_tokens={b"<|bos|>": first}), "does not map text to integers"),
        "an empty special token": (state(special_tokens={"": first}), "does not map text to integers"),
    }
