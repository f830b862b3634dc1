"""Open a directory that only this user can change, through a path that nobody else can change.

This protects against other users of the machine. They may create, rename, link or fill
anything that the path passes through. Root, the file server and this user's other processes are
trusted. A POSIX access list is respected, because its mask appears in the group bits of the mode.
Access lists of other kinds are not seen.

The path is opened one name at a time through file descriptors. So the directory that is used is the
one that was checked. Linux only.
"""

import errno
import os
import stat
from contextlib import ExitStack, suppress

MOST_LINKS = 40  # the kernel's own limit


def open_private_directory(parent: str, name: str) -> int:
    """Return a descriptor of directory ``name`` in the absolute path ``parent``.

    Directories that are missing are made. The directory must belong to this user, and its group and
    others must have no permissions. ``parent`` may contain symbolic links. Each link, and each
    directory on the way, must belong to this user or to root. A directory that others may write to
    must have the sticky bit. A PermissionError names the first link or directory that violates
    this.
    """
    with ExitStack() as opened:
        found = _open_or_make(_walk(parent, opened), name, opened)
        status = os.fstat(found)
        if not stat.S_ISDIR(status.st_mode):
            raise PermissionError(f"{_path(found)} must be a directory, which it is not")
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{_path(found)} belongs to another user (uid {status.st_uid})")
        if status.st_mode & 0o077:
            raise PermissionError(f"{_path(found)} is open to others: {_mode(status)} must be 0700")
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=found)


def _walk(path: str, opened: ExitStack) -> int:
    """Open and check each part of an absolute path; return the descriptor of the last one."""
    assert path.startswith("/"), path
    names = path.split("/")[::-1]
    links = 0
    current = root = _open("/", None, opened)
    _check(current)
    while names:
        if (name := names.pop()) in ("", "."):
            continue
        found = _open_or_make(current, name, opened)
        _check(found)
        if not stat.S_ISLNK(os.fstat(found).st_mode):
            current = found
            continue
        if (links := links + 1) > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink("", dir_fd=found)
        names += target.split("/")[::-1]
        current = root if target.startswith("/") else current
    return current


def _open_or_make(above: int, name: str, opened: ExitStack) -> int:
    """Open a name in the directory ``above``; if it is missing, make a private directory."""
    try:
        return _open(name, above, opened)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process has made it; the caller checks its owner
            os.mkdir(name, 0o700, dir_fd=above)
        return _open(name, above, opened)


def _open(name: str, above: int | None, opened: ExitStack) -> int:
    """Open a name without the right to read it; open a symbolic link itself, not its target."""
    flags = os.O_PATH | os.O_NOFOLLOW
    try:
        found = os.open(name, flags | os.O_DIRECTORY, dir_fd=above)  # triggers automount
    except NotADirectoryError:
        found = os.open(name, flags, dir_fd=above)
    opened.callback(os.close, found)
    return found


def _check(found: int) -> None:
    """Raise PermissionError if another user owns this part of the path or can change it."""
    status = os.fstat(found)
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{_path(found)} belongs to another user (uid {status.st_uid})")
    if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise PermissionError(
            f"others can change {_path(found)}: {_mode(status)} lets them write (chmod go-w)"
        )


def _mode(status: os.stat_result) -> str:
    return f"its mode {stat.S_IMODE(status.st_mode):04o}"


def _path(found: int) -> str:
    return os.readlink(f"/proc/self/fd/{found}")
