"""Every block of Python on the site and in the README runs as it is pasted: those of a page one
after the other, those of the README each by itself. What a block prints is what its comment
says."""

import ast
import gc

import pytest
import torch
import torch.distributed as dist

from tests.docs.snippets import DOCS, PAGES, ROOT, blocks_of, forget, missing, needs_earlier_blocks, run
from tests.support.ranks import needs_gloo, run_ranks

# Pages whose imports, or whose compilation, take many seconds.
SLOW = ("howto/compile", "howto/lightning", "howto/peft", "howto/transformers", "migrate/liger")
NEEDS = {
    "howto/lightning": ["lightning"],
    "howto/peft": ["peft", "transformers"],
    "howto/transformers": ["transformers", "accelerate"],
    "migrate/liger": ["transformers"],
}
# Pages that tests of their own run, with what they leave behind.
ELSEWHERE = {"howto/own_loss", "howto/rl_preference"}
WITH_BLOCKS = {page.relative_to(DOCS).with_suffix("").as_posix(): page for page in PAGES if blocks_of(page)}


@pytest.fixture(autouse=True)
def _as_a_user(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.extended) if name in SLOW else name
        for name in WITH_BLOCKS
        if name not in ELSEWHERE
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning.*", "ignore:.*num_workers.*")
def test_page_blocks_run(name):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    names = {}
    for number, block in enumerate(blocks_of(WITH_BLOCKS[name]), 1):
        ast.parse(block)  # also what is not run here
        if missing(block) is None:
            run(block, names, f"{name}, block {number}")
    forget(names)


@needs_gloo
@pytest.mark.extended
def test_page_of_divided_heads_runs_on_two_ranks(tmp_path):
    page = "howto/divided_head"
    found = run_ranks("tests.docs.page_ranks", tmp_path / "store", [page])
    blocks = blocks_of(WITH_BLOCKS[page])
    for rank in found:
        assert "raised" not in rank[page], rank[page]
        assert len(rank[page]["printed"]) == len(blocks)
    assert found[0][page]["printed"] == found[1][page]["printed"]


@pytest.mark.parametrize("number", range(5))
def test_readme_block_runs_alone(number):
    block = blocks_of(ROOT / "README.md")[number]
    run(block, {}, f"README, block {number + 1}")


def test_readme_blocks_counted():
    assert len(blocks_of(ROOT / "README.md")) == 5


def test_promise_is_checked():
    with pytest.raises(AssertionError, match="two"):
        run("print('one')  # two\n", {})


def test_block_for_another_machine_is_told():
    assert missing("# needs no_such_package and a CUDA device\n") == "no_such_package"
    assert missing("import torch\n") is None


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_page_says_that_blocks_run_in_order(name):
    """The page says where a block reads names of an earlier one: pasted alone, it lacks these."""
    page = WITH_BLOCKS[name]
    said = "The blocks of this page run one after the other" in " ".join(page.read_text().split())
    assert said == needs_earlier_blocks(blocks_of(page))


def test_blocks_that_need_earlier_ones_are_told():
    assert needs_earlier_blocks(["a = 1\n", "def f(x):\n    return x + a\n"])
    assert not needs_earlier_blocks(
        ["import math\n", "import math\nprint(math.pi)\n", "b = [c for c in 'd']\n"]
    )
