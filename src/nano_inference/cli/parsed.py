"""The command line that was parsed last, and the output of `--print-config`, which is a valid configuration file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cyclopts import App, Argument, ArgumentCollection, Token

from nano_inference.cli.arguments import BUILT_IN, heading_of, is_secret, key_of, options_of, source_of
from nano_inference.cli.config_file import FROM_FILE, NOT_IN_FILES
from nano_inference.text.generation_config import CHAT_FIELDS, MODELS_OWN


@dataclass(slots=True)
class ParsedCommand:
    """The command line that was parsed last: the command's words, and its arguments with their tokens."""

    commands: tuple[str, ...] = ()
    arguments: ArgumentCollection = field(default_factory=ArgumentCollection)

    def __call__(self, _app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Store the arguments; called by cyclopts after all other sources of values."""
        self.commands, self.arguments = commands, arguments
        if self.wants_print:
            for argument in arguments:
                if argument.is_positional_only() and argument.required and not argument.tokens:
                    argument.append(Token(value="-", source=BUILT_IN))  # not used

    @property
    def wants_print(self) -> bool:
        """True if --print-config was given."""
        option = next((a for a in options_of(self.arguments) if key_of(a) == "print-config"), None)
        return option is not None and bool(option.tokens) and option.convert() is True

    @property
    def given(self) -> frozenset[str]:
        """Names of the fields whose values are not built-in."""
        return frozenset(a.field_info.name for a in options_of(self.arguments) if source_of(a) != BUILT_IN)

    def as_toml(self, bound: Mapping[str, Any]) -> str:
        """Return the values as a table of a configuration file; those that the user did not set are comments."""
        owner = {id(child): parent.field_info.name for parent in self.arguments for child in parent.children}
        open_fields = CHAT_FIELDS if self.commands == ("chat",) else MODELS_OWN
        lines, heading = [f"[{'.'.join(self.commands)}]"], ""
        for option in options_of(self.arguments):
            if key_of(option) in NOT_IN_FILES:
                continue
            if heading_of(option) != heading:
                heading = heading_of(option)
                lines += ["", f"# {heading}"]
            name, parent = option.field_info.name, owner.get(id(option))
            value = bound[name] if parent is None else getattr(bound[parent], name)
            lines.append(_line(option, value, is_open=name in open_fields))
        return "\n".join(lines)


def _line(option: Argument, value: Any, *, is_open: bool) -> str:
    """Return `key = value`; a comment for a secret and for a value that the user did not set.

    `is_open`: unless it is set, the value depends on the model.
    """
    key, source = key_of(option), source_of(option)
    is_set = source in ("cli", "env") or source.startswith(FROM_FILE)
    if is_secret(option):
        return f"# {key} is {'set, and not shown' if value else 'not set'}"
    if is_open and not is_set:
        return f"# {key} depends on the model"
    if value is None:
        return f'{key} = "none"' if is_set else f"# {key} is not set"
    return f"{'' if is_set else '# '}{key} = {_toml(value)}"


def _toml(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, Collection) and not isinstance(value, str):
        return f"[{', '.join(map(_toml, value if isinstance(value, tuple | list) else sorted(value)))}]"
    if isinstance(value, str | Path):
        # TOML has JSON's escapes, and also forbids U+007F.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)
