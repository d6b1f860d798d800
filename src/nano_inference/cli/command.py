"""`Command`, a command of the application, and the table of commands that installed packages can extend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cyclopts import App, ArgumentCollection

from nano_inference.registry import table

COMMANDS_GROUP = "nano_inference.commands"
"""Entry-point group by which a package adds a command or replaces a built-in one."""
_HERE = "nano_inference.cli.commands"
_LAST = "models rm"
"""Listed after the commands of other packages."""

Fill = Callable[[App, tuple[str, ...], ArgumentCollection], None]
"""Sets unset options; called for every command, before `fallback.fill_defaults`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command. Raises `ValueError` if `words` is neither NAME nor models NAME."""

    words: str
    """Name as typed: "chat", or "models export"."""
    target: str
    """Function as "module:name"; imported when the command runs."""
    text: str
    """One line for --help."""
    arguments: str = ""
    """Positional arguments in the usage line, each preceded by a space."""
    headings: tuple[str, ...] = ()
    """Headings in --help that the application does not define."""
    fill: Fill | None = None

    def __post_init__(self) -> None:
        *group, name = self.words.split() or [""]
        if not name or group not in ([], ["models"]):
            raise ValueError(f"a command's words must be NAME or models NAME, got {self.words!r}")


OWN_COMMANDS = (
    Command(words="chat", target=f"{_HERE}:chat", text="Chat with a model in the terminal."),
    Command(
        words="generate",
        target=f"{_HERE}:generate",
        arguments=" [PROMPT]",
        text="Answer or continue one prompt, or many as one batch.",
    ),
    Command(words="serve", target=f"{_HERE}:serve", text="Serve a model behind an OpenAI-compatible URL."),
    Command(words="bench", target=f"{_HERE}:bench", text="Measure this engine on the benchmark workloads."),
    Command(
        words="tokenize",
        target=f"{_HERE}:tokenize",
        arguments=" [TEXT]",
        text="Show a text's token ids, or the text of ids.",
    ),
    Command(words="doctor", target=f"{_HERE}:doctor", text="Show what this machine can run, and how fast."),
    Command(words="completion", target=f"{_HERE}:completion", text="Install shell completion."),
    Command(words="models list", target=f"{_HERE}:models_list", text="List the models on this machine."),
    Command(
        words="models pull", target=f"{_HERE}:models_pull", arguments=" NAME", text="Fetch a model into the cache."
    ),
    Command(
        words="models info",
        target=f"{_HERE}:models_info",
        arguments=" [NAME]",
        text="Show a model's facts and memory use.",
    ),
    Command(words=_LAST, target=f"{_HERE}:models_rm", arguments=" NAME", text="Delete a model from the cache."),
)


def installed_commands() -> tuple[Command, ...]:
    """Return built-in commands and those of installed packages, in the order of --help. Raises `PluginError`."""
    rows = {one.words: one for one in OWN_COMMANDS}
    rows |= {one.words: one for one in table(COMMANDS_GROUP, {}, Command).values()}
    rows[_LAST] = rows.pop(_LAST)
    return tuple(rows.values())
