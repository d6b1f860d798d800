"""`Command`, a command of the application, and the table of commands that installed packages can extend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cyclopts import App, ArgumentCollection

from nano_inference.support.plugins import table

COMMANDS_GROUP = "nano_inference.commands"
"""Entry-point group by which a package adds a command or replaces a built-in one."""

Fill = Callable[[App, tuple[str, ...], ArgumentCollection], None]
"""Sets unset options; called for every command, before `arguments.fill_defaults`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command. Raises `ValueError` if `words` is neither NAME nor models NAME."""

    words: str  # name as typed: "chat", or "models export"
    target: str  # function as "module:name"; imported when the command runs
    text: str = ""  # text of --help; by default the function's docstring
    arguments: str = ""  # positional arguments in the usage line, each preceded by a space
    fill: Fill | None = None

    def __post_init__(self) -> None:
        *group, name = self.words.split() or [""]
        if not name or group not in ([], ["models"]):
            raise ValueError(f"a command's words must be NAME or models NAME, got {self.words!r}")


def _own(words: str, arguments: str = "") -> Command:
    """Return a command of this package; its function has the name of its words."""
    target = f"nano_inference.cli.commands:{words.replace(' ', '_').replace('-', '_')}"
    return Command(words=words, target=target, arguments=arguments)


OWN_COMMANDS = (
    *(_own("chat"), _own("generate", " [PROMPT]"), _own("serve"), _own("bench"), _own("tokenize", " [TEXT]")),
    *(_own("rl-check", " URL"), _own("doctor"), _own("completion"), _own("models list"), _own("models pull", " NAME")),
    *(_own("models info", " [NAME]"), _own("models rm", " NAME")),
)


def installed_commands() -> tuple[Command, ...]:
    """Return built-in commands and those of installed packages. Raises `PluginError`."""
    rows = {one.words: one for one in OWN_COMMANDS}
    rows |= {one.words: one for one in table(COMMANDS_GROUP, {}, Command).values()}
    rows["models rm"] = rows.pop("models rm")  # is the last one
    return tuple(rows.values())
