"""nanochat's calculator as a token program.

The model writes an expression between <|python_start|> and <|python_end|>; the result is then forced between
<|output_start|> and <|output_end|> (nanochat's engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nano_inference.nanochat.calculator import MAX_EXPRESSION, calculate, result_text
from nano_inference.text.kinds import Tokenizer
from nano_inference.text.tools import special_tokens

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
OUTPUT_START, OUTPUT_END = "<|output_start|>", "<|output_end|>"

_MAX_TOKENS = 4 * MAX_EXPRESSION
"""Most tokens of an expression: each has at least one byte, and a character at most four."""


@dataclass(frozen=True, slots=True)
class PythonTool:
    """nanochat's calculator as a `types.TokenProgram`; one object can serve any number of samples.

    The state is None outside a python block, and the block's tokens inside.
    """

    python_start: int
    python_end: int
    output_start: int
    output_end: int
    decode: Callable[[Sequence[int]], str]  # tokens -> text, including that of special tokens
    encode: Callable[[str], Sequence[int]]  # text -> tokens, none of them special

    @property
    def call(self) -> tuple[int, int]:
        """The tokens that start and end an expression."""
        return self.python_start, self.python_end

    @property
    def result(self) -> tuple[int, int]:
        """The tokens that start and end a result."""
        return self.output_start, self.output_end

    def start(self) -> object:
        """Return the state before the first sampled token: outside a block."""
        return None

    def step(self, state: object, token: int) -> tuple[object, tuple[int, ...]]:
        """Return the state after a sampled token and the tokens to force, if it ends an expression with a result.

        A start token inside a block restarts it; an end token outside a block has no effect. After an empty block or an
        expression without a result, no token is forced.
        """
        if token == self.python_start:
            return (), ()
        if not isinstance(state, tuple):
            return None, ()
        if token != self.python_end:
            return (state if len(state) > _MAX_TOKENS else (*state, token)), ()
        text = result_text(calculate(self.decode(state))) if len(state) <= _MAX_TOKENS else None
        return None, () if text is None else (self.output_start, *self.encode(text), self.output_end)


def python_tool(tokenizer: Tokenizer) -> PythonTool | None:
    """Return the calculator for a tokenizer with nanochat's four tool tokens, else None."""
    special = special_tokens(tokenizer)
    names = (PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END)
    if not all(name in special for name in names):
        return None
    start, end, out, out_end = (special[name] for name in names)
    return PythonTool(
        python_start=start,
        python_end=end,
        output_start=out,
        output_end=out_end,
        decode=lambda tokens: tokenizer.decode(tokens, skip_special=False),
        encode=lambda text: tokenizer.encode(text, add_special=False, parse_special=False),
    )
