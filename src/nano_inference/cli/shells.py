"""Shell completion scripts and their locations.

cyclopts generates the scripts, which contain commands, options and choices. For names of models they call
`nano-inference __complete WORDS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cyclopts import App
from cyclopts.completion import ShellDetectionError, add_to_rc_file, detect_shell, get_default_completion_path

from nano_inference.types import BadRequest

PROGRAM = "nano-inference"
Shell = Literal["bash", "zsh", "fish"]


def script(app: App, shell: Shell) -> str:
    """Return a shell's completion script."""
    function = f"-F _{PROGRAM.replace('-', '_')} "
    # Without other candidates, bash completes file names: --model, --file and --cache accept paths.
    return app.generate_completion(shell=shell).replace(f"complete {function}", f"complete -o default {function}")


def choose_shell(requested: Shell | None) -> Shell:
    """Return the requested shell, or the one that started this process."""
    try:
        found = requested or detect_shell()
    except ShellDetectionError:
        found = None
    if found not in ("bash", "zsh", "fish"):
        raise BadRequest("", "the shell cannot be detected; give --shell bash, --shell zsh or --shell fish")
    return found


def install(app: App, shell: Shell) -> Path:
    """Write a shell's script to the directory that the shell searches; return its path."""
    path = get_default_completion_path(shell, PROGRAM)
    path.write_text(script(app, shell), encoding="utf-8")
    if shell != "fish":  # fish loads scripts from this directory
        add_to_rc_file(path, PROGRAM, shell)
    return path


def installed(home: Path) -> list[str]:
    """Return the shells with a completion script below a home directory, of any version."""
    places = {
        "bash": home / ".local/share/bash-completion/completions" / PROGRAM,
        "zsh": home / ".zsh/completions" / f"_cyclopts_{PROGRAM}",
        "fish": home / ".config/fish/completions" / f"{PROGRAM}.fish",
    }
    return [shell for shell, path in places.items() if path.is_file()]
