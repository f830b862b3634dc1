"""docs/reference/models.md has all classes, and says of one of each kind what the table finds."""

import re

import pytest

transformers = pytest.importorskip("transformers")

from lowtide.integrations.transformers import register_attention  # noqa: E402
from tests.integrations.dense import register_exactly  # noqa: E402
from tests.integrations.table import PAGE, row  # noqa: E402
from tests.integrations.zoo import NotTried, build, everything  # noqa: E402

TEXT = PAGE.read_text()
CELLS = ([cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines())
ROWS = {cells[0]: cells for cells in CELLS if cells[0] in everything()}
SAMPLE = [
    "ChameleonForConditionalGeneration",  # real logits
    "EncoderDecoderModel",
    "FSMTForConditionalGeneration",  # no head
    "Gemma4ForCausalLM",  # magnifies roundings
    "GitForCausalLM",  # computes with its mask
    "InstructBlipForConditionalGeneration",  # image
    "Molmo2ForConditionalGeneration",  # makes a mask of one
    "MusicgenForCausalLM",  # several heads
    "UnlimitedOcrForConditionalGeneration",  # a mask of all
    "WhisperForConditionalGeneration",  # speech
    "ZambaForCausalLM",  # own attention
]
pytestmark = pytest.mark.skipif(
    f"transformers {transformers.__version__}," not in TEXT,
    reason="docs/reference/models.md is of another version",
)


@pytest.fixture(autouse=True)
def _registered():
    register_attention()
    register_exactly()
    yield
    register_attention()  # the table counts calls


def test_table_has_all_classes():
    assert set(ROWS) == set(everything())


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.filterwarnings("ignore")
def test_table_rows(name):
    differences = (4, 6)
    found, written = (
        [cell for place, cell in enumerate(cells) if place not in differences]
        for cells in (row(name, build(name)), ROWS[name])
    )
    assert found == written


def test_table_untried():
    with pytest.raises(NotTried, match="takes no labels"):
        build("Qwen2_5OmniForConditionalGeneration")


def test_table_counts():
    """Here, and where they are repeated."""
    rows = [cells for cells in ROWS.values() if len(cells) > 2]
    built = len(rows)
    fused = sum(cells[2] == "fused" for cells in rows)
    attending = sum(cells[5].startswith("yes") for cells in rows)
    assert re.search(rf"Of the {len(ROWS)} classes[^.]*, {built} were built", TEXT)
    assert f"{fused} of {built} models are fused" in TEXT
    assert re.search(rf"\b{attending} have lowtide's attention", TEXT)
    readme, *pages = (
        (PAGE.parent / name).read_text()
        for name in ("../../README.md", "../howto/transformers.md", "../start/any_model.md")
    )
    assert f"{attending} of {built} architectures" in readme
    assert f"{fused} of {built} architectures" in readme
    assert all(page.count(f"{fused} of the {built} language models") == 1 for page in pages)
