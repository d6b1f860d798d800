"""How `--help` looks: names on the left, texts on the right. Plain text, because rich's tables take too long."""

from __future__ import annotations

import textwrap

from cyclopts.help import HelpEntry, HelpPanel
from rich.console import Console, ConsoleOptions

_LEFT = 30
_WIDEST = 100


def print_panel(console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
    """Print the entries of one heading."""
    if not panel.entries:
        return
    width = min(options.max_width, _WIDEST)
    lines = [f"{panel.title}:"]
    for entry in panel.entries:
        lines += entry_lines(_names(entry), _text(console, entry), width)
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True, end="\n\n")


def entry_lines(names: str, text: str, width: int) -> list[str]:
    """Return an entry's lines; a text that does not fit beside its names begins below them."""
    right = textwrap.wrap(text, max(20, width - _LEFT - 2)) or [""]
    first = f"  {names:<{_LEFT - 2}}  {right[0]}" if len(names) <= _LEFT - 2 else f"  {names}"
    rest = right[1:] if len(names) <= _LEFT - 2 else right
    return [first.rstrip(), *(" " * (_LEFT + 2) + line for line in rest)]


def _names(entry: HelpEntry) -> str:
    shorts = (*entry.positive_shorts, *entry.negative_shorts)
    parts = [*shorts, entry.positional_label or "", *entry.positive_names, *entry.negative_names]
    names = ", ".join(part for part in parts if part)
    return f"{names} {entry.metavar}" if entry.metavar and not entry.positional_label else names


def _text(console: Console, entry: HelpEntry) -> str:
    text = "".join(part.text for part in console.render(entry.description)) if entry.description else ""
    choices = f" [{', '.join(entry.choices)}]" if entry.choices else ""
    has_default = entry.default not in (None, "()", "False")
    return text.strip() + choices + (f" [default: {entry.default}]" if has_default else "")
