import pytest

from lowtide.tools import figures


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_drawing_repeats_its_file(tmp_path, kind):
    files = [tmp_path / f"{name}.{kind}" for name in ("first", "second")]
    for file in files:
        with figures.figure(4, 3) as figure:
            axes = figure.subplots()
            axes.plot([1, 2], [3, 4], color=figures.COLORS["lowtide"], label="lowtide")
            figures.names_above(axes)
            figure.savefig(file, metadata={"Date": None} if kind == "svg" else None)
    first, second = (file.read_bytes() for file in files)
    assert first == second
    assert kind == "png" or figures.COLORS["lowtide"].encode() in first


def test_drawing_leaves_matplotlib_unchanged():
    import matplotlib

    before = dict(matplotlib.rcParams)
    with figures.figure(4, 3) as figure:
        figure.subplots()
        assert not matplotlib.rcParams["axes.spines.top"]
    assert dict(matplotlib.rcParams) == before
