import pytest
import torch

from lowtide.train import files


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
