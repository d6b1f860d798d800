"""Matchers that constrain a sample to a grammar: a JSON schema, a regex, a choice of texts, Lark, GBNF.

llguidance (the extra `grammar`) computes the allowed tokens; its copy of the vocabulary is built at the first use. An
end token is allowed exactly where the grammar is satisfied; sampling one ends the sample, also with `ignore_eos`, since
nothing could follow. Where only end tokens are allowed, the engine ignores `min_tokens`. With a model without end
tokens the sample ends where no token can follow.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nano_inference.text.grammar_text import Grammar, for_library, reason_of
from nano_inference.text.kinds import Tokenizer
from nano_inference.types import BadRequest, Matcher, StopReason

__all__ = ["ENDED", "Grammar", "GrammarMatcher", "Grammars"]

MAX_CACHED = 64  # number of compiled grammars kept in the LRU cache
ENDED = "grammar"  # the stop reason of a sample of a model without end tokens
STACK_BYTES = 256 << 20
"""Stack size of the thread that compiles: the compiler recurses along references between rules, and a stack overflow
would end the process. 64 KiB of references need a tenth of this."""

_NICENESS = 15
_FORCED_CHARS = 256  # limit on the characters of a forced text that are tokenized; only the first token is used


class Grammars:
    """Owns llguidance's copy of a model's vocabulary and a cache of compiled grammars; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size  # size of the model's vocabulary; ids beyond the tokenizer's are never allowed
        self._eos_ids = frozenset(eos_ids)
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._compile_lock = threading.Lock()

    def matcher(self, grammar: Grammar) -> Callable[[], Matcher]:
        """Return a factory of matchers, one per sample, for `grammar`.

        Compiles a grammar that is not cached, which blocks for up to a second; one grammar is compiled at a time.
        Raises `BadRequest` naming the kind if the grammar exceeds a limit, does not compile, uses an unsupported
        keyword or matches no text, and if the extra is not installed.
        """
        compiled = self._cached(grammar)
        if compiled is None:
            text = for_library(grammar)
            with self._compile_lock:
                compiled = self._cached(grammar) or self._compile(grammar, text)
        return lambda: GrammarMatcher(compiled)

    def known(self, grammar: Grammar) -> Callable[[], Matcher] | None:
        """Return the factory for a cached grammar, without blocking; None for any other."""
        compiled = self._cached(grammar)
        return None if compiled is None else lambda: GrammarMatcher(compiled)

    def _cached(self, grammar: Grammar) -> _Compiled | None:
        with self._cache_lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
            return compiled

    def _compile(self, grammar: Grammar, text: str) -> _Compiled:
        if self._vocabulary is None:
            self._vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
        vocabulary = self._vocabulary
        compiled = _on_deep_stack(lambda: _compile(vocabulary, grammar, text))
        with self._cache_lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return compiled


class GrammarMatcher:
    """Matcher of one sample; raises `ValueError` for a step that exceeds the library's limits."""

    def __init__(self, compiled: _Compiled) -> None:
        self._vocabulary = compiled.vocabulary
        self._inner = compiled.inner.deep_copy()
        self._allowed_bits = compiled.allowed_bits
        self._mask: bytes | None = compiled.mask

    def advance(self, token: int) -> StopReason | None:
        """Add the next token; return the stop reason for an end token, and at the end of the grammar without one."""
        if token in self._vocabulary.eos_ids:
            return token
        self._mask = None
        if not self._inner.consume_token(token):
            raise ValueError(f"grammar: {reason_of(self._inner.get_error())}")
        return ENDED if not self._vocabulary.eos_ids and self._inner.is_stopped() else None

    def mask(self) -> bytes:
        """Return a bit mask of the tokens that the grammar allows next."""
        if self._mask is None:
            self._mask = _mask(self._vocabulary, self._inner, self._allowed_bits)
        return self._mask


class _Vocabulary:
    """A model's vocabulary in the library's form, with the attributes of a tokenizer that the library reads.

    Special tokens have no bytes. The library's end token is an additional id after all others, so that it treats no
    real token specially. Building the library's trie of tokens takes a fraction of a second.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        from llguidance import LLTokenizer

        self._tokenizer = tokenizer
        self.eos_token_id = vocab_size
        self.special_token_ids = [vocab_size]
        no_text = tokenizer.special_ids | eos_ids
        self.tokens = [b""] * (vocab_size + 1)
        for token in range(min(vocab_size, tokenizer.vocab_size)):
            with suppress(BadRequest):  # an id that the tokenizer does not have
                self.tokens[token] = b"" if token in no_text else tokenizer.token_bytes(token)
        self._ids = {data: token for token, data in enumerate(self.tokens) if data}
        self._longest = max(map(len, self._ids), default=1)
        self.num_bytes = -(-vocab_size // 8)  # of a mask
        self.text_bits = _bits((token for token, data in enumerate(self.tokens) if data), vocab_size)
        self.eos_ids = eos_ids
        self.eos_bits = _bits((token for token in eos_ids if token < vocab_size), vocab_size)
        ll: Any = LLTokenizer  # its stub requires the library's wrapper class; any object with these attributes works
        self.library: Any = ll(self, n_vocab=vocab_size + 1, eos_token=vocab_size)

    def __call__(self, text: str) -> Sequence[int]:
        """Tokenize the beginning of a forced text with the tokenizer, or greedily if that gives other bytes."""
        beginning = text[:_FORCED_CHARS]
        data = beginning.encode("utf-8", "replace")
        ids = list(self._tokenizer.encode(beginning, add_special=False, parse_special=False))
        if b"".join(self.tokens[token] for token in ids if token < len(self.tokens)) == data:
            return ids
        # SentencePiece adds a space before a text: take the longest tokens, up to the first byte without a token.
        ids = []
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled grammar in its initial state, which samples copy."""

    vocabulary: _Vocabulary
    inner: Any  # an LLMatcher, which is only copied
    mask: bytes  # the mask of the first token
    allowed_bits: int  # bits of the ids that may ever be allowed: text, and the special tokens that the grammar names


def _bits(ids: Iterable[int], vocab_size: int) -> int:
    data = bytearray(-(-vocab_size // 8))
    for token in ids:
        data[token // 8] |= 1 << token % 8
    return int.from_bytes(data, "little")


def _compile(vocabulary: _Vocabulary, grammar: Grammar, text: str) -> _Compiled:
    """Compile a grammar (`text`: in the library's form) and its first mask, which saves the engine thread that time."""
    from llguidance import LLMatcher, LLParserLimits

    # Lark and GBNF may be ambiguous: the time per token is then quadratic in a row's items.
    is_free = grammar.kind in ("lark", "gbnf")
    limits = LLParserLimits(
        max_items_in_row=250 if is_free else 2000,
        step_max_items=3000 if is_free else 20_000,
        step_lexer_fuel=30_000,
        initial_lexer_fuel=300_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
    inner = LLMatcher(vocabulary.library, text, log_level=0, limits=limits)
    if inner.is_error():
        raise BadRequest(grammar.kind, f"{reason_of(inner.get_error())}")
    allowed_bits = vocabulary.text_bits | _bits(grammar.special, 8 * vocabulary.num_bytes)
    try:
        mask = _mask(vocabulary, inner, allowed_bits)
    except ValueError as error:
        raise BadRequest(grammar.kind, f"{str(error).removeprefix('grammar: ')}") from None
    return _Compiled(vocabulary, inner, mask, allowed_bits)


def _mask(vocabulary: _Vocabulary, inner: Any, allowed_bits: int) -> bytes:
    """Return a bit mask of the next tokens: those of `allowed_bits`, and end tokens if the grammar is satisfied.

    Raises `ValueError` if no token may follow.
    """
    bits = inner.compute_bitmask()
    if inner.is_error():
        raise ValueError(f"grammar: {reason_of(inner.get_error())}")
    allowed = int.from_bytes(bits[: vocabulary.num_bytes], "little") & allowed_bits
    if inner.is_accepting():
        allowed |= vocabulary.eos_bits
    if not allowed:
        raise ValueError("grammar: no token can follow")
    return allowed.to_bytes(vocabulary.num_bytes, "little")


def _on_deep_stack(work: Callable[[], _Compiled]) -> _Compiled:
    """Call a function in a thread with a deep stack and return what it returns or raises."""
    pool, previous = ThreadPoolExecutor(1, "grammar", _lower_priority), threading.stack_size(STACK_BYTES)
    try:
        done = pool.submit(work)  # starts the thread
    finally:  # another model's thread, compiling at the same time, may have set the size
        threading.stack_size(previous if previous != STACK_BYTES else 0)
        pool.shutdown(wait=False)  # Ctrl-C does not wait for it
    return done.result()


def _lower_priority() -> None:
    """Run below the threads that compute, where threads have priorities (Linux)."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
