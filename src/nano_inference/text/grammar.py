"""Samples that are written in a grammar: JSON of a schema, a regex, one of several texts, Lark, GBNF.

llguidance (the extra `grammar`) says which tokens may come next; what it knows of the tokenizer is built at the first
use. How an end of the sample is told: an end token is allowed exactly where the grammar is satisfied, and drawing one
ends the sample, whatever `ignore_eos` says: nothing could follow. The engine lifts the ban on end tokens that
`min_tokens` asks for where nothing else is allowed. A model without end tokens ends where nothing can follow.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nano_inference.text.grammar_text import Grammar, check_grammar, for_library, reason_of
from nano_inference.text.kinds import Tokenizer
from nano_inference.types import BadRequest, Matcher, StopReason

__all__ = ["ENDED", "Grammar", "GrammarMatcher", "Grammars"]

MAX_CACHED = 64
"""Compiled grammars that are kept, those used last."""
ENDED = "grammar"
"""The verdict that ends a sample of a model without end tokens."""
STACK_BYTES = 256 << 20
"""Address space of the stack of a thread that compiles: the compiler follows references from rule to rule by calling
itself, and dies with its process where the stack ends. 64 KiB of references need a tenth of this."""

_MAX_ROW_ITEMS = 2000
_MAX_STEP_ITEMS = 20_000
_MAX_ROW_ITEMS_FREE = 250
_MAX_STEP_ITEMS_FREE = 3000
"""Of Lark and GBNF, which may be ambiguous: then a token's time grows with the square of a row's items."""
_STEP_FUEL = 30_000
_COMPILE_FUEL = 300_000
_MAX_STATES = 50_000
_MAX_SYMBOLS = 100_000
_NICENESS = 15
_FORCED_CHARS = 256
"""Characters of a text without alternatives that are cut into tokens: only the first token is ever used."""


class Grammars:
    """Owns what llguidance knows of a model's tokenizer and the grammars that were compiled for it; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        """Of the model: rows beyond the tokenizer's vocabulary are never allowed."""
        self._eos_ids = frozenset(eos_ids)
        self._view: _View | None = None
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._books = threading.Lock()
        self._compiling = threading.Lock()

    def matcher(self, grammar: Grammar) -> Callable[[], Matcher]:
        """Return a maker of matchers, one for each sample, that hold samples to `grammar`.

        Compiles, which may take a second, unless it was compiled lately: not for an event loop. One is compiled at a
        time. Raises `BadRequest` naming the kind for a grammar that passes a limit or does not compile, for a keyword
        that is not supported, for one that no text satisfies, and when the extra is not installed.
        """
        compiled = self._lately(grammar)
        if compiled is None:
            check_grammar(grammar)
            with self._compiling:
                compiled = self._lately(grammar) or self._compile(grammar)
        return lambda: GrammarMatcher(compiled)

    def known(self, grammar: Grammar) -> Callable[[], Matcher] | None:
        """Return the same for a grammar that was compiled lately, at once; None for any other."""
        compiled = self._lately(grammar)
        return None if compiled is None else lambda: GrammarMatcher(compiled)

    def _lately(self, grammar: Grammar) -> _Compiled | None:
        with self._books:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
            return compiled

    def _compile(self, grammar: Grammar) -> _Compiled:
        if self._view is None:
            _check_installed(grammar.kind)
            self._view = _View.of(self._tokenizer, self._vocab_size, self._eos_ids)
        view = self._view
        compiled = _on_deep_stack(lambda: _compile(view, grammar))
        with self._books:
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return compiled


class GrammarMatcher:
    """Follows one sample through its grammar; a step that the limits do not suffice for is a `ValueError`."""

    def __init__(self, compiled: _Compiled) -> None:
        self._view = compiled.view
        self._inner = compiled.inner.deep_copy()
        self._allowed_bits = compiled.allowed_bits
        self._mask: bytes | None = compiled.mask

    def advance(self, token: int) -> StopReason | None:
        """Take the next token; an end token, and an end without one, stop the sample."""
        if token in self._view.eos_ids:
            return token
        self._mask = None
        if not self._inner.consume_token(token):
            raise ValueError(f"grammar: {reason_of(self._inner.get_error())}")
        return ENDED if not self._view.eos_ids and self._inner.is_stopped() else None

    def mask(self) -> bytes:
        """Return the tokens that the grammar allows next."""
        if self._mask is None:
            self._mask = _mask(self._view, self._inner, self._allowed_bits)
        return self._mask


@dataclass(frozen=True, slots=True)
class _View:
    """A model's vocabulary as the library has it."""

    tokenizer: Any  # an LLTokenizer; the library is imported late
    num_bytes: int
    """Of a mask."""
    text_bits: int
    """The ids that write text."""
    eos_ids: frozenset[int]
    eos_bits: int

    @staticmethod
    def of(tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> _View:
        """Build the library's trie of tokens; a fraction of a second.

        Its end token is an id of its own behind all others, so that real ones are nothing but what they are here.
        """
        from llguidance import LLTokenizer

        words = _Words(tokenizer, vocab_size, eos_ids)
        ll: Any = LLTokenizer  # its stub asks for the library's own wrapper; it takes whatever has these attributes
        return _View(
            tokenizer=ll(words, n_vocab=vocab_size + 1, eos_token=vocab_size),
            num_bytes=-(-vocab_size // 8),
            text_bits=_bits(words.text_ids, vocab_size),
            eos_ids=eos_ids,
            eos_bits=_bits((token for token in eos_ids if token < vocab_size), vocab_size),
        )


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar at its start; samples copy it."""

    view: _View
    inner: Any  # an LLMatcher, of which nobody but a copier makes use
    mask: bytes
    allowed_bits: int
    """The ids that may ever be allowed: those that write text, and the special ones that the grammar names."""


class _Words:
    """The tokenizer as the library asks for it: these names are its own. Special tokens write nothing."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = vocab_size
        self.special_token_ids = [vocab_size]
        no_text = tokenizer.special_ids | eos_ids
        self.tokens = [
            b"" if token in no_text or token >= tokenizer.vocab_size else _bytes_of(tokenizer, token)
            for token in range(vocab_size)
        ] + [b""]
        self.text_ids = [token for token, data in enumerate(self.tokens) if data]
        self._ids = {data: token for token, data in enumerate(self.tokens) if data}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> Sequence[int]:
        """Cut the beginning of a text that must follow into tokens, as the tokenizer would where that spells it."""
        beginning = text[:_FORCED_CHARS]
        data = beginning.encode("utf-8", "replace")
        ids = self._tokenizer.encode(beginning, add_special=False, parse_special=False)
        spelled = b"".join(self.tokens[token] for token in ids if token < len(self.tokens))
        return ids if spelled == data else self._greedy(data)  # SentencePiece puts a space before a text

    def _greedy(self, data: bytes) -> list[int]:
        """Cut bytes into the longest tokens; ends where there is none."""
        ids: list[int] = []
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


def _bits(ids: Iterable[int], vocab_size: int) -> int:
    """Return a number with the bits of these ids set."""
    data = bytearray(-(-vocab_size // 8))
    for token in ids:
        data[token // 8] |= 1 << token % 8
    return int.from_bytes(data, "little")


def _bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """Return what a token writes; nothing for an id that the tokenizer skips."""
    try:
        return tokenizer.token_bytes(token)
    except BadRequest:
        return b""


def _check_installed(kind: str) -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        message = "needs the extra 'grammar': pip install 'nano-inference[grammar]'"
        raise BadRequest(f"{kind}: structured output {message}") from None


def _compile(view: _View, grammar: Grammar) -> _Compiled:
    """Compile a grammar and find its first mask, so that neither is left to the engine's thread."""
    from llguidance import LLMatcher, LLParserLimits

    is_free = grammar.kind in ("lark", "gbnf")
    limits = LLParserLimits(
        max_items_in_row=_MAX_ROW_ITEMS_FREE if is_free else _MAX_ROW_ITEMS,
        step_max_items=_MAX_STEP_ITEMS_FREE if is_free else _MAX_STEP_ITEMS,
        step_lexer_fuel=_STEP_FUEL,
        initial_lexer_fuel=_COMPILE_FUEL,
        max_lexer_states=_MAX_STATES,
        max_grammar_size=_MAX_SYMBOLS,
        verbose_errors=False,
    )
    inner = LLMatcher(view.tokenizer, for_library(grammar), log_level=0, limits=limits)
    if inner.is_error():
        raise BadRequest(f"{grammar.kind}: {reason_of(inner.get_error())}")
    allowed_bits = view.text_bits | _bits(grammar.special, 8 * view.num_bytes)
    try:
        mask = _mask(view, inner, allowed_bits)
    except ValueError as error:
        raise BadRequest(f"{grammar.kind}: {str(error).removeprefix('grammar: ')}") from None
    return _Compiled(view, inner, mask, allowed_bits)


def _mask(view: _View, inner: Any, allowed_bits: int) -> bytes:
    """Return which tokens of `allowed_bits` may follow, and every end token where the grammar is satisfied."""
    bits = inner.compute_bitmask()
    if inner.is_error():
        raise ValueError(f"grammar: {reason_of(inner.get_error())}")
    allowed = int.from_bytes(bits[: view.num_bytes], "little") & allowed_bits
    if inner.is_accepting():
        allowed |= view.eos_bits
    if not allowed:
        raise ValueError("grammar: no token can follow")
    return allowed.to_bytes(view.num_bytes, "little")


def _step_back() -> None:
    """Let this thread run behind those that compute answers, where threads have priorities of their own (Linux)."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _on_deep_stack(work: Callable[[], _Compiled]) -> _Compiled:
    """Call a function in a thread with a deep stack and return what it returns or raises."""
    done: list[_Compiled] = []
    failed: list[BaseException] = []

    def run() -> None:
        _step_back()
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="grammar")
    usual = threading.stack_size(STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(usual if usual != STACK_BYTES else 0)  # of another model's that compiles just now
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
