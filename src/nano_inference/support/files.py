"""Open files from untrusted sources, parse JSON, check who can write to a directory, and replace files atomically."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nano_inference.support.errors import BadRequest, ModelError

MAX_PATH = 4095
"""Limit on the bytes of a path on Linux; a system with a lower limit raises an error when the path is used."""
MAX_NAME = 255  # limit on the bytes of a file's name
MAX_JSON_BYTES = 64 << 20
"""Limit on a file of JSON; the largest known vocabularies have half. In memory it takes 13 times as many."""
_MAX_LINKS = 40
_SHOWN, _SHOWN_ERROR = 80, 200  # characters
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file to read, unbuffered. Raises `OSError`, also for a FIFO, socket, device or directory.

    Never blocks, although opening a FIFO would. Symbolic links are followed, because hub caches consist of them.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a path cannot contain a zero byte")
    _require_regular(path.stat(), path)  # before opening: opening a device can have effects
    without_waiting = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | without_waiting))
    try:
        _require_regular(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def open_buffered(path: Path) -> io.BufferedReader:
    """Open a regular file like `open_regular`, buffered."""
    return io.BufferedReader(open_regular(path))


def read_file(path: Path, limit: int, what: str = "this file") -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes. Raises `ModelError` naming the path.

    `what` completes the message "… bytes are too many for …".
    """
    return read_with_status(path, limit, what)[0]


def read_with_status(path: Path, limit: int, what: str) -> tuple[bytes, os.stat_result]:
    """Return a file's bytes as `read_file` does, and the status of the file that was opened."""
    try:
        with open_buffered(path) as file:
            status = os.fstat(file.fileno())
            if status.st_size > limit:
                raise ModelError(f"{path}: {status.st_size} bytes are too many for {what} (limit {limit})")
            return file.read(status.st_size), status  # not `limit`, which would be allocated in full
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


def read_json_object(path: Path, *, has_unique_names: bool = True) -> dict[str, Any]:
    """Return the JSON object in a file of at most 64 MiB. Raises `ModelError` as `read_file` and `json_object` do."""
    return json_object(str(path), read_file(path, MAX_JSON_BYTES, "a JSON file"), has_unique_names=has_unique_names)


def json_object(origin: str, data: bytes, *, has_unique_names: bool = True) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. Raises `ModelError`, also for lone surrogates and, unless allowed, equal names."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique if has_unique_names else None)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ModelError(f"{origin}: the JSON is nested too deeply") from error
    except ValueError as error:
        raise ModelError(f"{origin}: not valid JSON: {shown(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{origin}: must hold a JSON object, got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the name {shown(twice)} occurs twice")
    return out


def shown(value: object) -> str:
    """Return a file's value, or the message of a library's error about it, as one line of limited length."""
    limit = _SHOWN
    if isinstance(value, BaseException):
        text, limit = " ".join(str(value).split()) or type(value).__name__, _SHOWN_ERROR
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**_SHOWN:
        text = "a huge integer"
    elif isinstance(value, float) and not math.isfinite(value):
        text = str(value)
    else:  # cut before it is formatted: a file may hold megabytes where a number is expected
        text = ascii(value[:_SHOWN] if isinstance(value, str | list | tuple) else value)
    return text if len(text) <= limit else text[:limit] + "…"


def is_present(path: Path) -> bool:
    """Return True if a regular file exists at the path; False also for a path that is too long.

    Raises `ModelError` if the path is anything else (a FIFO, a directory, …), which must not count as a missing file.
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
    """Return the path that a user entered, with `~` expanded. `name` is the flag or field for error messages.

    Raises `BadRequest` if it contains a zero byte, is too long, or refers to an unknown home directory.
    """
    size = _num_bytes(str(text))
    if "\0" in str(text):
        raise BadRequest(name, "a path cannot contain a zero byte")
    if size > MAX_PATH:
        raise BadRequest(name, f"a path of {size} bytes is too long (limit {MAX_PATH})")
    longest = max((_num_bytes(part) for part in Path(text).parts), default=0)
    if longest > MAX_NAME:
        raise BadRequest(name, f"a path has a part of {longest} bytes (limit {MAX_NAME})")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise BadRequest(name, f"{text}: {error}") from None


def user_directory(environ: Mapping[str, str], named: str | None, default: str) -> Path:
    """Return this package's directory below `named`, the value of an XDG variable, else below ~/`default`.

    Raises `RuntimeError` if there is no home directory.
    """
    base = Path(named or "")
    if not base.is_absolute():  # by the specification a relative path is ignored
        base = Path(environ.get("HOME") or environ.get("USERPROFILE") or Path.home()) / default
    return base / "nano-inference"


def status_of(path: Path) -> os.stat_result | None:
    """Return the status of a path's target; None if it does not exist, also for a path that is too long."""
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def exists(path: Path) -> bool:
    """Return True if the path exists. Unlike `Path.exists`, returns False for a path that is too long."""
    return status_of(path) is not None


def untrusted_part(path: Path, user: int | None = None) -> str | None:
    """Return why users other than `user` (default: this process's) and root can replace a directory's files, else None.

    Every directory from the root to `path`, including those of symbolic links, must belong to one of the two and be
    writable by no other user; parent directories may be sticky, such as /tmp. Raises `OSError` if `path` is missing.
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
    """Return why users other than `user` (default: this process's) and root could have written a file, else None."""
    if status.st_uid not in {0, os.getuid() if user is None else user}:
        return f"belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"is writable by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def digest_of(file: io.FileIO) -> str:
    """Return the SHA-256 of an open file as hexadecimal digits."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_into(made: Path, target: Path) -> None:
    """Rename a finished file to `target`, after flushing it to disk, so that a crash leaves it complete or absent."""
    sync(made)
    made.replace(target)
    with suppress(OSError):  # some network file systems refuse it for directories
        sync(target.parent)


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a regular file", str(path))


def _why_open(directory: Path, status: os.stat_result, owners: set[int], *, is_last: bool) -> str | None:
    """Return why other users can change the entries of a directory, else None."""
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
    """Return True for an owner's personal group, to which some systems make the user's directories writable."""
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
