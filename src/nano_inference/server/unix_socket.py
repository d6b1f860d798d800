"""A listening Unix socket: a file to which only its owner may connect."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

from nano_inference.server.config import SettingError


def bind_unix(path: str) -> socket.socket:
    """Return the listening socket; replace a socket file whose server has ended.

    Raises `SettingError` naming `uds` if the path cannot be used, or if another program listens on it.
    """
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(path)
        Path(path).chmod(stat.S_IRUSR | stat.S_IWUSR)  # before `listen`: no connection is accepted until then
        listening.listen()
    except (OSError, ValueError) as error:
        listening.close()
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise SettingError(f"uds {path}: cannot listen on it: {reason}", "uds") from None
    return listening


def remove_socket(path: str) -> None:
    """Delete a socket file; another file stays."""
    try:
        if stat.S_ISSOCK(Path(path).lstat().st_mode):
            Path(path).unlink()
    except OSError:
        pass


def _remove_stale(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            remove_socket(path)
            return
        except (OSError, ValueError):  # no such file, or one that `bind` refuses by its reason
            return
    raise SettingError(f"uds {path}: another program listens on it", "uds")
