"""A directory of one's own is opened only where nobody else can change it, or the path to it.

Other users are stood for by another effective user id: to it, all that this user owns is a
stranger's."""

import os
import stat

import pytest

from lowtide.core.bfloat16_units.private_directory import (
    open_private_directory,
)


def open_and_close(parent, name="own"):
    descriptor = open_private_directory(str(parent), name)
    found = os.readlink(f"/proc/self/fd/{descriptor}")
    os.close(descriptor)
    return found


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o077])
def test_directory_private_any_umask(tmp_path, umask, mask):
    umask(mask)
    parent = tmp_path / "not" / "there"
    for _ in range(2):  # made, then found
        assert open_and_close(parent) == str(parent / "own")
    for path in (parent / "own", parent, parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_descriptors_closed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    before = os.listdir("/proc/self/fd")
    open_and_close(tmp_path / "link" / "a" / "b")
    with pytest.raises(PermissionError):
        open_and_close(tmp_path / "open")
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("mode", [0o701, 0o704, 0o710, 0o740, 0o755, 0o770, 0o777, 0o1777])
def test_directory_open_to_others_refused(tmp_path, mode):
    (tmp_path / "own").mkdir()
    (tmp_path / "own").chmod(mode)
    with pytest.raises(PermissionError, match=rf"own is open to others: its mode {mode:04o} must be 0700"):
        open_and_close(tmp_path)
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == mode


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "pipe"])
def test_directory_not_a_directory_refused(tmp_path, kind):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own = tmp_path / "own"
    if kind == "file":
        own.touch()
    elif kind == "pipe":
        os.mkfifo(own)
    else:
        own.symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))
    with pytest.raises(PermissionError, match="own must be a directory"):
        open_and_close(tmp_path)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o720, 0o702])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_parent_writable_by_others_refused(tmp_path, level, mode):
    parent = tmp_path / "0" / "1" / "2"
    parent.mkdir(parents=True)
    above = [parent.parent.parent, parent.parent, parent][level]
    above.chmod(mode)
    with pytest.raises(PermissionError, match=rf"others can change {above}: its mode {mode:04o}"):
        open_and_close(parent)
    assert list(parent.iterdir()) == []
    above.chmod(mode | stat.S_ISVTX)
    assert open_and_close(parent) == str(parent / "own")


def test_directory_of_other_user_refused(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match=rf"belongs to another user \(uid {os.getuid()}\)"):
        open_and_close(tmp_path)


def test_path_through_other_user_refused(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    fstat, strange = os.fstat, set()

    def of_a_stranger(descriptor):
        found = fstat(descriptor)
        return os.stat_result((*found[:4], 12345, *found[5:])) if found.st_ino in strange else found

    monkeypatch.setattr(os, "fstat", of_a_stranger)
    assert open_and_close(tmp_path / "link") == str(tmp_path / "real" / "own")
    for path in (tmp_path, tmp_path / "link", tmp_path / "real"):
        strange = {path.lstat().st_ino}
        with pytest.raises(PermissionError, match=rf"{path} belongs to another user \(uid 12345\)"):
            open_and_close(tmp_path / "link")


@pytest.mark.parametrize("target", ["real", "../up/real", "./real/", "{}/real", "second"])
def test_links_followed(tmp_path, target):
    (tmp_path / "up" / "real").mkdir(parents=True)
    (tmp_path / "up" / "second").symlink_to("real")
    (tmp_path / "up" / "link").symlink_to(target.format(tmp_path / "up"))
    found = open_and_close(f"{tmp_path}/up/./link//inner/../inner")
    assert found == str(tmp_path / "up" / "real" / "inner" / "own")


def test_links_target_path_checked(tmp_path):
    (tmp_path / "open" / "inner").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "inner")
    with pytest.raises(PermissionError, match="others can change"):
        open_and_close(tmp_path / "link")
    (tmp_path / "open" / "back").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="others can change"):
        open_and_close(tmp_path / "open" / "back")


def test_links_in_circle_refused(tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_and_close(tmp_path / "one")


def test_file_in_path_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        open_and_close(tmp_path / "file")
