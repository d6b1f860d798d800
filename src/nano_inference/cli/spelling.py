"""Rewriting of messages: names of fields become the flags, variables or keys that the user gave."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from nano_inference.cli.arguments import key_of, options_of, source_of, variable_of
from nano_inference.cli.config_file import FROM_FILE
from nano_inference.cli.parsed import ParsedCommand
from nano_inference.server.config import SettingError


class Given(NamedTuple):
    """Name under which the user gave a field's value."""

    name: str  # `--port`, `NANO_INFERENCE_PORT`, or `port` in a file
    file: str = ""  # `file PATH`, if the value is from a file


class Typed(NamedTuple):
    """Options that the user gave to a command."""

    fields: frozenset[str] = frozenset()  # fields whose values are not built-in
    names: Mapping[str, Given] = MappingProxyType({})
    """Maps each field to the name under which it was given, or can be given."""


def names_of(parsed: ParsedCommand) -> Mapping[str, Given]:
    """Map each field of the command's configurations to the name under which it was given.

    Parameters of the command itself are excluded: their names (`prompt`) have other meanings in messages.
    """
    own = {child.field_info.name for parent in parsed.arguments for child in parent.children}
    names = {}
    for option in options_of(parsed.arguments):
        source = source_of(option)
        given = Given(option.name)
        if source.startswith(FROM_FILE):
            given = Given(key_of(option), source)
        elif source == "env":
            given = Given(variable_of(option))
        if option.field_info.name in own:
            names[option.field_info.name] = given
    return names


def error_text(error: Exception, known: Mapping[str, Given]) -> str:
    """Return an error's text on one line, with fields named as the user gave them.

    Replaces the first word, names with an underscore, and the fields that a `SettingError` lists.
    """
    text = " ".join(str(error).split())
    left = list(error.fields) if isinstance(error, SettingError) else []
    file = ""

    def replace(match: re.Match[str]) -> str:
        nonlocal file
        word = match[0]
        if "_" not in word and word not in left and match.start():
            return word
        if word in left:
            left.remove(word)  # later occurrences may be values
        file = file or known[word].file
        return known[word].name

    names_here = "|".join(known) or "(?!)"
    text = re.sub(rf"(?<![\w/.\-'\"])(?:{names_here})(?![\w/.\-'\"])", replace, text)
    return f"{text} ({file})" if file else text
