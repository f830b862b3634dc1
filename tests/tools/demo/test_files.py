import errno
import io
import re
from pathlib import Path

import pytest
import torch

from lowtide.tools import files
from lowtide.tools.errors import UserError


def test_failed_block_keeps_old_file(tmp_path):
    path = tmp_path / "whole.txt"
    path.write_text("old")

    def fail_half_way():
        with files.whole_file(path, "w") as file:
            file.write("new")
            file.flush()
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_old_file_kept_until_end(tmp_path):
    path = tmp_path / "whole.txt"
    path.write_text("old")
    with open(path) as earlier:
        with files.whole_file(path, "w") as file:
            file.write("new")
            file.flush()
            assert path.read_text() == "old"
        assert path.read_text() == "new"
        assert earlier.read() == "old"  # replaced, not written over
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", b"\x80\x02garbage", b"PK\x03\x04 and no more"])
def test_damaged_file_named(tmp_path, damage):
    path = tmp_path / "file.pt"
    path.write_bytes(damage)
    with pytest.raises(files.DamagedFile, match=r"file\.pt"):
        files.load(path)


def test_truncated_file_damaged(tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"numbers": torch.arange(1000)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(files.DamagedFile):
        files.load(path)


def test_file_with_code_refused(tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"code": tmp_path.joinpath}, path)
    with pytest.raises(files.DamagedFile):
        files.load(path)


def test_full_disk_named(tmp_path):
    """/dev/full is one; torch's zip writer raises an error of its own in place of the file's."""
    link = tmp_path / "file.pt"
    link.symlink_to("/dev/full")
    with pytest.raises(OSError, match="/dev/full") as caught:
        files.save({"numbers": torch.zeros(10**6)}, link)
    assert caught.value.errno == errno.ENOSPC
    for write in (
        lambda file: file.write(bytes(10**6)),
        lambda file: file.write(b"little, which is written when the file is closed"),
    ):
        with pytest.raises(OSError, match="/dev/full") as caught, files.whole_file(link) as file:
            write(file)
        assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=r"file\.pt") as caught, files.growing_table(link, ["a"]) as write:
        write({"a": "x" * 10**6})
    assert caught.value.errno == errno.ENOSPC
    assert link.is_symlink()
    assert Path("/dev/full").is_char_device()


def test_error_of_block_unchanged(tmp_path):
    with pytest.raises(RuntimeError, match="own"), files.whole_file(tmp_path / "file"):
        raise RuntimeError("own")
    with pytest.raises(FileNotFoundError, match="other"), files.whole_file(tmp_path / "file"):
        (tmp_path / "other").read_text()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("old", [None, b"old"])
def test_save_interrupted(tmp_path, monkeypatch, old):
    """Ctrl-C while the file is written: torch's zip writer would raise RuntimeError for it."""
    path = tmp_path / "file.pt"
    if old is not None:
        path.write_bytes(old)

    class Interrupted(io.FileIO):
        def write(self, content):
            super().write(bytes(content)[:100])
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "open", lambda file, mode, **_: Interrupted(file, mode), raising=False)
    with pytest.raises(KeyboardInterrupt):
        files.save({"numbers": torch.zeros(1000)}, path)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == ([] if old is None else [old])


def test_link_kept(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "file")
    for content in ("first", "second"):
        with files.whole_file(link, "w") as file:
            file.write(content)
        assert link.is_symlink()
        assert (tmp_path / "there" / "file").read_text() == content


def test_check_changes_nothing(tmp_path):
    files.check_writable(tmp_path / "a" / "b" / "c.txt")
    assert not list(tmp_path.iterdir())
    path = tmp_path / "file"
    path.write_text("as it was")
    files.check_writable(path)
    files.check_writable(Path("/dev/null"))
    assert path.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [path]
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("directory", errno.EISDIR),
        ("file/deeper", errno.ENOTDIR),
        ("file/deeper/still", errno.ENOTDIR),
        ("n" * 300, errno.ENAMETOOLONG),
    ],
)
def test_check_raises_if_not_writable(tmp_path, name, number):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match=re.escape(str(tmp_path))) as caught:
        files.check_writable(tmp_path / name)
    assert caught.value.errno == number
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n", "has no column 'c': it is no CSV of numbers"),
        (b"a,b,c\n", "has no rows"),
        (b"a,b,c\n1,2\n", "too few cells"),
        (b"\xff\xfe\x00", "it is no text"),
        (b"", "has no column 'a'"),
    ],
)
def test_table_malformed(tmp_path, content, message):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        files.read_table(path, ("a", "b", "c"), "numbers")
