"""Layout of `--help`: flags in the left column, texts in the right one.

Plain text, because rich's tables and cyclopts' help pages would double the time of `--help`.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

from cyclopts import App, Argument

from nano_inference.cli.arguments import DEFAULT, heading_of, key_of, kind_of, options_of, takes_list
from nano_inference.cli.config_file import NOT_IN_FILES
from nano_inference.cli.help_texts import EXAMPLES, KINDS, SAMPLING, VALUES
from nano_inference.text.generation_config import MODELS_OWN

LEFT = 30  # width of the left column
_WIDEST = 110
_NARROWEST = 60

Lines = list[str]

_NOTE = "nano-inference COMMAND --help shows a command's options."
_SOURCES = (
    "Every option can be set by an environment variable (--model: NANO_INFERENCE_MODEL) and in a file (--config); "
    "--print-config prints the values. NANO_INFERENCE_TRACEBACK=1 prints the traceback of an error."
)


def page(app: App, commands: tuple[str, ...], usage: str) -> str:
    """Return a command's help page."""
    width = max(_NARROWEST, min(shutil.get_terminal_size().columns, _WIDEST))
    about = "\n".join(textwrap.wrap(app.help, width))
    parts = [[usage, "", about]]
    if app.default_command is None:
        version = [] if commands else entry_lines("--version", "print the version", width)
        parts += [[*_commands(app, width), *version], _wrapped(_NOTE if commands else f"{_NOTE} {_SOURCES}", width)]
    else:
        arguments = app.assemble_argument_collection()
        parts.append(_positionals(arguments, width))
        parts += [_section(heading, options, width) for heading, options in _sections(options_of(arguments)).items()]
        parts += [_examples(commands, width), _wrapped(_SOURCES, width)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def entry_lines(names: str, text: str, width: int) -> Lines:
    """Return the lines of an entry; if the names are wider than the left column, the text starts below them."""
    right = textwrap.wrap(text, max(20, width - LEFT - 2), break_on_hyphens=False) or [""]
    first = f"  {names:<{LEFT - 2}}  {right[0]}" if len(names) <= LEFT - 2 else f"  {names}"
    rest = right[1:] if len(names) <= LEFT - 2 else right
    return [first.rstrip(), *(" " * (LEFT + 2) + line for line in rest)]


def _commands(app: App, width: int) -> Lines:
    lines = ["Commands:"]
    for name in app:
        if not name.startswith("-"):
            lines += entry_lines(name, app[name].help, width)
    return lines


def _sections(options: Iterable[Argument]) -> dict[str, list[Argument]]:
    """Return options by heading; those without one of their own are "Options"."""
    sections: dict[str, list[Argument]] = {}
    for option in options:
        sections.setdefault(heading_of(option), []).append(option)
    return sections


def _positionals(arguments: Iterable[Argument], width: int) -> Lines:
    lines: Lines = []
    for argument in arguments:
        if argument.is_positional_only() and argument.parse:
            lines += entry_lines(argument.name.lstrip("-").upper(), _text(argument), width)
    return ["Arguments:", *lines] if lines else []


def _section(heading: str, options: Iterable[Argument], width: int) -> Lines:
    lines = [line for option in options for line in entry_lines(_names(option), _text(option), width)]
    return [f"{heading}:", *lines] if lines else []


def _names(option: Argument) -> str:
    """Return `-m, --model MODEL`, or `--[no-]quiet` for a flag that can be negated."""
    shorts = [name for name in option.names if not name.startswith("--")]
    if kind_of(option.hint) == "boolean":
        is_switch = any(name.startswith("--no-") for name in option.names) and key_of(option) not in NOT_IN_FILES
        return ", ".join([*shorts, f"--[no-]{key_of(option)}" if is_switch else option.name])
    value = VALUES.get(key_of(option)) or ("CHOICE" if _choices(option) else KINDS[kind_of(option.hint)])
    return ", ".join([*shorts, f"{option.name} {value}"])


def _choices(option: Argument) -> list[str]:
    is_switch = kind_of(option.hint) == "boolean"
    return [] if is_switch else [choice for choice in option.get_choices(force=True) or () if choice]


def _text(option: Argument) -> str:
    """Return an option's help text, choices and default."""
    text = SAMPLING.get(option.field_info.name) if heading_of(option) == "Sampling" else None
    said = " ".join((text or option.parameter.help or "").split())
    choices = f" [{', '.join(_choices(option))}]" if _choices(option) else ""
    return f"{said}{choices}{_default(option, said)}".strip()


def _default(option: Argument, said: str) -> str:
    default: Any = option.field_info.default
    if key_of(option) == "model":
        default = DEFAULT
    is_plain = default is not None and default is not False and default != "" and default != option.field_info.empty
    if not is_plain or "default" in said or isinstance(default, frozenset):
        return ""
    if takes_list(option.hint):
        return f" (default: {' '.join(map(str, default))})" if default else ""
    if default is True:
        return " (on by default)"
    text = f"{default:g}" if isinstance(default, float) else str(default)
    return f" (default: the model's, else {text})" if option.field_info.name in MODELS_OWN else f" (default: {text})"


def _examples(commands: tuple[str, ...], width: int) -> Lines:
    examples = EXAMPLES.get(" ".join(commands), ())
    lines: Lines = []
    for line, what in examples:
        lines += [f"  {line}", *textwrap.wrap(what, width, initial_indent="      ", subsequent_indent="      ")]
    return ["Examples:", *lines] if lines else []


def _wrapped(text: str, width: int) -> Lines:
    return textwrap.wrap(text, width, break_on_hyphens=False)
