"""The scripts that make shells complete, and where they lie.

cyclopts writes them. They know commands, options and choices; for the names of models they ask the installed program,
which answers `nano-inference __complete WORDS`.
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
    text = app.generate_completion(shell=shell)
    # Where nothing of ours fits, bash offers files: a model, a prompt file, a cache may be a path.
    return text.replace(
        f"complete -F _{PROGRAM.replace('-', '_')} ", f"complete -o default -F _{PROGRAM.replace('-', '_')} "
    )


def shell_here(asked: Shell | None) -> Shell:
    """Return the shell that was asked for, or the one this process was started from."""
    if asked is not None:
        return asked
    try:
        found = detect_shell()
    except ShellDetectionError:
        found = None
    if found not in ("bash", "zsh", "fish"):
        raise BadRequest("shell cannot be found out; --shell bash, zsh or fish names it")
    return found


def install(app: App, shell: Shell) -> Path:
    """Write a shell's script to where the shell looks for it; return that file."""
    path = get_default_completion_path(shell, PROGRAM)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script(app, shell), encoding="utf-8")
    if shell != "fish":  # which looks there by itself
        add_to_rc_file(path, PROGRAM, shell)
    return path


def installed(home: Path) -> list[str]:
    """Return the shells for which there is a script below a home directory, whether or not it is this version's."""
    places = {
        "bash": home / ".local/share/bash-completion/completions" / PROGRAM,
        "zsh": home / ".zsh/completions" / f"_cyclopts_{PROGRAM}",
        "fish": home / ".config/fish/completions" / f"{PROGRAM}.fish",
    }
    return [shell for shell, path in places.items() if path.is_file()]
