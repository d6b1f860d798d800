"""Origin of each option's value, and the output of `--print-config`, which is a valid configuration file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from cyclopts import App, Argument, ArgumentCollection, Token

from nano_inference.chat_defaults import CHAT_FIELDS, MODELS_OWN
from nano_inference.cli.arguments import heading_of, is_secret, key_of, options_of
from nano_inference.cli.config_file import NOT_IN_FILES

BUILT_IN = "built-in"
UNLESS_MODEL = "built-in, unless the model has its own"
CHAT_DEFAULT = "the model's default for chats, else that of all chats"
_ORIGIN_NAMES = {"cli": "command line"}
_WIDEST_VALUE = 48


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
        return frozenset(a.field_info.name for a in options_of(self.arguments) if origin_of(a) != BUILT_IN)


class Setting(NamedTuple):
    """An option's value and its origin."""

    key: str
    group: str
    value: Any
    origin: str
    is_secret: bool


def origin_of(option: Argument) -> str:
    """Return the origin of an option's value as text."""
    if not option.tokens:
        return BUILT_IN
    token = option.tokens[-1]
    return f"environment {token.keyword}" if token.source == "env" else _ORIGIN_NAMES.get(token.source, token.source)


def settings_of(commands: tuple[str, ...], arguments: ArgumentCollection, bound: Mapping[str, Any]) -> list[Setting]:
    """Return every option with its value and origin."""
    open_origin, open_names = (CHAT_DEFAULT, CHAT_FIELDS) if commands == ("chat",) else (UNLESS_MODEL, MODELS_OWN)
    owner = {id(child): parent.field_info.name for parent in arguments for child in parent.children}
    settings = []
    for option in options_of(arguments):
        name = option.field_info.name
        parent = owner.get(id(option))
        value = bound[name] if parent is None else getattr(bound[parent], name)
        if key_of(option) not in NOT_IN_FILES:
            origin = origin_of(option)
            origin = open_origin if origin == BUILT_IN and name in open_names else origin
            settings.append(Setting(key_of(option), heading_of(option), value, origin, is_secret(option)))
    return settings


def as_toml(commands: tuple[str, ...], settings: list[Setting]) -> str:
    """Return the settings as a table of a configuration file, with origins as comments."""
    width = min(_WIDEST_VALUE, max((len(_assignment(one)) for one in settings), default=0))
    lines = [f"[{'.'.join(commands)}]"]
    for group, members in groupby(settings, key=lambda one: one.group):
        lines += ["", f"# {group}", *(f"{_assignment(one):<{width}}  # {one.origin}" for one in members)]
    return "\n".join(lines)


def as_json(settings: list[Setting]) -> str:
    """Return the settings as one JSON object; a secret's value is "set" or null."""
    return json.dumps(
        {
            one.key: {
                "value": ("set" if one.value else None) if one.is_secret else _plain(one.value),
                "origin": one.origin,
            }
            for one in settings
        }
    )


def _assignment(setting: Setting) -> str:
    """Return `key = value`; a comment for secrets and for options without a value."""
    if setting.is_secret:
        return f"# {setting.key} is {'set, and not shown' if setting.value else 'not set'}"
    if setting.value is None and setting.origin != BUILT_IN:
        return f'{setting.key} = "none"'
    if setting.value is None:
        return f"# {setting.key} is not set"
    if setting.origin == CHAT_DEFAULT:
        return f"# {setting.key} depends on the model"
    line = f"{setting.key} = {toml_value(_plain(setting.value))}"
    return f"# {line}" if setting.origin == UNLESS_MODEL else line  # in a file, the value would override the model's


def toml_value(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, list):
        return f"[{', '.join(toml_value(one) for one in value)}]"
    if isinstance(value, str):
        # TOML has JSON's escapes, and also forbids U+007F.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)


def _plain(value: Any) -> Any:
    """Convert paths and collections to types of TOML and JSON."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Collection) and not isinstance(value, str):
        return list(value) if isinstance(value, tuple | list) else sorted(value)
    return value
