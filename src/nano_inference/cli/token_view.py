"""Display of token probabilities on stderr: as colours, or as numbers without colour support."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from rich.style import Style
from rich.text import Text

from nano_inference.cli.conversation import ShownToken
from nano_inference.cli.printable import printable
from nano_inference.cli.render import console_of
from nano_inference.cli.terminal import note

_COLOURS = ((0.8, "green"), (0.4, "cyan"), (0.1, "yellow"), (0.0, "red"))  # lowest probability of each colour
_FORCED = Style(dim=True, underline=True)


def show_tokens(tokens: tuple[ShownToken, ...]) -> None:
    """Print an answer's tokens with their probabilities."""
    if not tokens:
        note("[this answer has no probabilities]")
        return
    console = console_of(sys.stderr)
    if console.color_system is None or console.no_color:
        note("tokens: " + " ".join(f"{_quoted(token.text)}{_share(token)}" for token in tokens))
    else:
        console.print(coloured(tokens))


def coloured(tokens: Iterable[ShownToken]) -> Text:
    """Return tokens coloured by probability, after a legend."""
    legend = (part for low, colour in _COLOURS for part in (" ", (f"≥{low:.0%}", colour)))
    body = ((_visible(token.text), _style(token)) for token in tokens)
    return Text.assemble("tokens,", *legend, " ", ("forced", _FORCED), ":\n", *body)


def table(tokens: tuple[ShownToken, ...], number: int) -> str:
    """Return the alternatives of token `number` (counted from 1) as a table."""
    token = tokens[number - 1]
    head = f"token {number} of {len(tokens)}: {_quoted(token.text)}{_share(token)}"
    if token.is_forced:
        return head
    rows = [f"  {rank}. {logprob:9.4f} {math.exp(logprob):7.2%}  {_quoted(text)}{' <- drawn' * (text == token.text)}"
            for rank, (text, logprob) in enumerate(token.top, start=1)]  # fmt: skip
    return "\n".join([f"{head}, logprob {_number(token.logprob)}", *rows])


def _style(token: ShownToken) -> Style:
    if token.is_forced or token.logprob is None:
        return _FORCED
    share = math.exp(token.logprob)
    return Style(color=next(colour for low, colour in _COLOURS if share >= low))


def _share(token: ShownToken) -> str:
    if token.is_forced:
        return " forced"
    return " ?" if token.logprob is None else f" {math.exp(token.logprob):.0%}"


def _number(logprob: float | None) -> str:
    return "unknown" if logprob is None else f"{logprob:.4f}"


def _visible(text: str) -> str:
    """Return a token's text with visible newlines; "·" if it is empty (part of a character)."""
    return printable(text).replace("\n", "⏎\n") or "·"


def _quoted(text: str) -> str:
    return f"'{printable(text).translate({10: '⏎', 9: '⇥'})}'"
