import errno
import re
from pathlib import Path

import pytest
import torch

from lowtide.tools import files
from lowtide.tools.errors import UserError


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
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


def test_the_old_file_is_there_until_the_block_ends(tmp_path):
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
def test_a_damaged_file_is_named_as_such(tmp_path, damage):
    path = tmp_path / "file.pt"
    path.write_bytes(damage)
    with pytest.raises(files.DamagedFile, match=r"file\.pt"):
        files.load(path)


def test_a_truncated_file_is_damaged(tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"numbers": torch.arange(1000)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(files.DamagedFile):
        files.load(path)


def test_a_file_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"code": tmp_path.joinpath}, path)
    with pytest.raises(files.DamagedFile):
        files.load(path)


def test_a_full_disk_is_said_and_named(tmp_path):
    """/dev/full is one; torch's zip writer raises an error of its own in place of the file's."""
    link = tmp_path / "file.pt"
    link.symlink_to("/dev/full")
    for write in (
        lambda file: torch.save({"numbers": torch.zeros(10**6)}, file),
        lambda file: file.write(bytes(10**6)),
        lambda file: file.write(b"little, which is written when the file is closed"),
    ):
        with pytest.raises(OSError, match="/dev/full") as caught, files.whole_file(link) as file:
            write(file)
        assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=r"file\.pt") as caught, files.growing_file(link) as text:
        text.write("x" * 10**6)
    assert caught.value.errno == errno.ENOSPC
    assert link.is_symlink()
    assert Path("/dev/full").is_char_device()


def test_an_error_of_the_block_itself_stays_what_it_is(tmp_path):
    with pytest.raises(RuntimeError, match="own"), files.whole_file(tmp_path / "file"):
        raise RuntimeError("own")
    with pytest.raises(FileNotFoundError, match="other"), files.whole_file(tmp_path / "file"):
        (tmp_path / "other").read_text()
    assert not list(tmp_path.iterdir())


def test_a_link_leads_to_the_new_file(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "file")
    for content in ("first", "second"):
        with files.whole_file(link, "w") as file:
            file.write(content)
        assert link.is_symlink()
        assert (tmp_path / "there" / "file").read_text() == content


def test_a_try_leaves_nothing_and_changes_nothing(tmp_path):
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
def test_what_cannot_be_written_raises_when_it_is_tried(tmp_path, name, number):
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
def test_what_is_no_table(tmp_path, content, message):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        files.read_table(path, ("a", "b", "c"), "numbers")
