"""Opens files that others wrote, checks who may write to a directory, and replaces files atomically."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
from contextlib import suppress
from pathlib import Path

from nano_inference.types import BadRequest, ModelError

MAX_PATH = 4095
"""Bytes of a path on Linux; other systems allow fewer, and say so when the path is used."""
MAX_NAME = 255
"""Bytes of a file's name."""
_MAX_LINKS = 40
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file to read, unbuffered. Raises `OSError`, also for a FIFO, socket, device or directory.

    Never waits: opening a FIFO would wait for its writer. Symbolic links are followed: hub caches consist of them.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a path cannot contain a zero byte")
    _require_regular(path.stat(), path)  # before opening: opening a device can have effects
    file = io.FileIO(path, opener=_without_waiting)
    try:
        _require_regular(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def open_buffered(path: Path) -> io.BufferedReader:
    """Do as `open_regular`, with a buffer."""
    return io.BufferedReader(open_regular(path))


def read_file(path: Path, limit: int, what: str = "this file") -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes. Raises `ModelError` naming the path.

    `what` completes the message "… bytes are too many for …".
    """
    try:
        with open_buffered(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise ModelError(f"{path}: {size} bytes are too many for {what} (limit {limit})")
            return file.read(size)  # `limit` would be allocated whole, and a file may grow meanwhile
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


def is_present(path: Path) -> bool:
    """Whether a regular file is there; False also for a path too long to exist.

    Raises `ModelError` if something else has the name (a FIFO, a directory, …): it must not count as a missing file.
    """
    found = status_of(path)
    if found is None:
        return False
    try:
        _require_regular(found, path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    return True


def path_of(text: str | Path, name: str) -> Path:
    """Return the path that a user wrote, with `~` expanded. `name` is the flag or field.

    Raises `BadRequest` if no path can be spelled so: it holds a zero byte, is longer than the system allows, or names
    a home directory that is not known.
    """
    size = _num_bytes(str(text))
    if "\0" in str(text):
        raise BadRequest(f"{name}: a path cannot contain a zero byte")
    if size > MAX_PATH:
        raise BadRequest(f"{name}: a path of {size} bytes is too long (limit {MAX_PATH})")
    longest = max((_num_bytes(part) for part in Path(text).parts), default=0)
    if longest > MAX_NAME:
        raise BadRequest(f"{name}: a path has a part of {longest} bytes (limit {MAX_NAME})")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise BadRequest(f"{name}: {text}: {error}") from None


def status_of(path: Path) -> os.stat_result | None:
    """Return the status of what a path leads to, None where nothing is or can be (also a path longer than allowed)."""
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def exists(path: Path) -> bool:
    """Whether anything is there. Unlike `Path.exists`, returns False for a path that is too long."""
    return status_of(path) is not None


def untrusted_part(path: Path, user: int | None = None) -> str | None:
    """Return why others than `user` (default: this process's) and root could replace what lies in a directory.

    Every directory from the root down, also of symbolic links, must belong to one of the two and be writable by no one
    else; a sticky one, such as /tmp, may lie on the way. None if that holds. Raises `OSError` if the path is missing.
    """
    owners = {0, os.getuid() if user is None else user}
    here = Path("/")
    rest = [part for part in reversed(path.absolute().parts) if part != "/"]
    links = 0
    while True:
        reason = _why_open(here, os.lstat(here), owners, is_last=not rest)
        if reason is not None or not rest:
            return reason
        part = rest.pop()
        found = os.lstat(here / part)
        if part == "..":
            here = here.parent
        elif stat.S_ISLNK(found.st_mode):
            links += 1
            if found.st_uid not in owners or links > _MAX_LINKS:
                return f"{here / part} is a link that belongs to user {found.st_uid}"
            target = (here / part).readlink()
            here = Path("/") if target.is_absolute() else here
            rest += [name for name in reversed(target.parts) if name != "/"]
        else:
            here /= part


def why_untrusted_file(status: os.stat_result, user: int | None = None) -> str | None:
    """Return why others than `user` and root could have written a file, None if they could not."""
    if status.st_uid not in {0, os.getuid() if user is None else user}:
        return f"belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"is writable by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def digest_of(file: io.FileIO) -> str:
    """Return the SHA-256 of an open file, in 64 hexadecimal digits."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Write a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_into(made: Path, target: Path) -> None:
    """Give a finished file its name: on the disk first, so that a crash leaves it whole or absent."""
    sync(made)
    made.replace(target)
    with suppress(OSError):  # some network file systems refuse it for directories
        sync(target.parent)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a regular file", str(path))


def _why_open(directory: Path, status: os.stat_result, owners: set[int], *, is_last: bool) -> str | None:
    """Return why others could change the entries of a directory."""
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is not a directory"
    if status.st_uid not in owners:
        return f"{directory} belongs to user {status.st_uid}"
    is_sticky = bool(status.st_mode & stat.S_ISVTX) and not is_last
    is_group_open = bool(status.st_mode & 0o020) and not _is_private_group(status.st_gid, owners)
    if (is_group_open or status.st_mode & 0o002) and not is_sticky:
        return f"{directory} is writable by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _is_private_group(group: int, owners: set[int]) -> bool:
    """Whether a group has only one of the owners: systems that give each user a group make directories open to it."""
    import grp
    import pwd

    try:
        found = grp.getgrgid(group)
        users = [pwd.getpwuid(owner) for owner in owners]
    except KeyError:
        return False
    return any(
        user.pw_gid == group and user.pw_name == found.gr_name and set(found.gr_mem) <= {user.pw_name} for user in users
    )


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
