"""The pages that a newcomer reads: narrow lines, and names that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# All but the records of decisions, which are kept as they were written, and what a build leaves.
SITE = sorted(page for page in (ROOT / "docs").rglob("*.md") if not {"decisions", "_build"} & {*page.parts})
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *SITE]
INDEX = ROOT / "docs" / "decisions" / "index.md"
RECORDS = sorted(INDEX.parent.glob("0*.md"))
FILES = [path for top in ("lowtide", "tests", "examples") for path in (ROOT / top).rglob("*.py")]
FILE_NAMES = {path.stem for path in FILES}
COLUMNS = 100


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_prose_columns(page):
    """Code, tables and pictures cannot be wrapped; tests/integrations/table.py writes models.md."""
    if page.name == "models.md":
        pytest.skip("it is generated")
    generated = r"^<!-- \{.*?^<!-- end -->$"  # text that make tables writes
    prose = re.sub(rf"^```.*?^```$|{generated}", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    long = [
        line
        for line in prose.splitlines()
        if len(line) > COLUMNS and not line.startswith(("    ", "|", "!["))
    ]
    assert not long


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_exist(page):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert all("://" in target or (page.parent / target).exists() for target in targets)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_functions_named_exist(page):
    """`folder/file.py::name`, or `file.py::Class.method`."""
    for file, name in re.findall(r"`([\w/]+\.py)::([\w.]+)`", page.read_text()):
        texts = [path.read_text() for path in FILES if f"/{path.as_posix()}".endswith(f"/{file}")]
        defined = [re.compile(rf"^ *(def|class) {part}\b", re.MULTILINE) for part in name.split(".")]
        assert any(all(each.search(text) for each in defined) for text in texts), f"{file}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_exist(page):
    """A file by its name, or by the end of its path; NAME stands for any."""
    known = [f"/{path.relative_to(ROOT).as_posix()}" for path in FILES]
    for file in re.findall(r"`([\w/]+\.py)\b", page.read_text()):
        assert "NAME" in file or any(path.endswith(f"/{file}") for path in known), file


@pytest.mark.parametrize(
    "pages", [("CONTRIBUTING.md",), ("docs/architecture.md", "docs/where_to_find.md")], ids=" ".join
)
def test_names_in_text_occur_in_code(pages):
    """No page keeps the name of something renamed, as `whole_softmax_coef` or `Plan.rows`."""
    text = "\n".join((ROOT / page).read_text() for page in pages)
    words = {word for path in FILES for word in re.findall(r"\w+", path.read_text())}
    names = re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", text)
    assert len(names) > 20
    assert not [name for name in names if not {*name.removesuffix(".py").split(".")} <= words | FILE_NAMES]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name[:4])
def test_record_index_and_code(record):
    """The index has its title below its area, and what superseded it; `Code:` names real paths."""
    text = record.read_text()
    fields = dict(re.findall(r"^\* (\w+): (.*(?:\n  .*)*)", text, flags=re.MULTILINE))
    title = text.splitlines()[0].removeprefix(f"# {record.name[:4]}. ")
    successor = re.match(r"superseded by \[(\d+)\]", fields["Status"])
    deleted = " (deleted)" if fields["Status"] == "superseded: deleted" else ""
    ending = f" (superseded by {successor[1]})" if successor else deleted
    areas = re.split(r"^## ", INDEX.read_text(), flags=re.MULTILINE)
    (area,) = [each for each in areas if each.startswith(fields["Area"] + "\n")]
    assert f"* [{record.name[:4]}]({record.name}) {title}{ending}\n" in area
    assert successor or "Code" in fields
    assert all((ROOT / path).exists() for path in re.findall(r"`(.+?)`", fields.get("Code", "")))
