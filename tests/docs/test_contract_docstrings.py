"""The site lists as arguments of a public function only its parameters."""

import inspect
import re

import pytest

import lowtide
from tests.docs.snippets import DOCS

pytest.importorskip("sphinx")
MODULES = (lowtide, lowtide.losses, lowtide.distillation)
PUBLIC = {f"{each.__name__}.{name}": getattr(each, name) for each in MODULES for name in each.__all__}


@pytest.fixture
def extension(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    import contract_docstrings

    return contract_docstrings


@pytest.fixture
def sections(extension):
    return extension.sections


@pytest.fixture
def linked(extension):
    return extension.linked


def listed(lines):
    """The names of the entries below `Args`."""
    section, found = "", []
    for line in lines:
        if title := re.fullmatch(r"\*\*(.+)\*\*", line):
            section = title[1]
        elif section == "Args" and line.startswith("``") and line.endswith("``"):
            found += re.findall(r"``(.+?)``", line)
    return found


@pytest.mark.parametrize("name", [name for name, each in PUBLIC.items() if callable(each)])
def test_arguments_listed_are_parameters(name, sections):
    parameters = inspect.signature(PUBLIC[name]).parameters
    found = listed(sections((inspect.getdoc(PUBLIC[name]) or "").splitlines()))
    assert not [each for each in found if each.lstrip("*") not in parameters]


def test_arguments_are_found(sections):
    assert {"row_weight", "first_class"} <= {
        *listed(sections(inspect.getdoc(PUBLIC["lowtide.linear_cross_entropy"]).splitlines()))
    }
    assert listed(sections(["Args:", "    a, b: two", "    and the", "    rest: go on"])) == [
        "a",
        "b",
        "rest",
    ]


def test_title_of_a_page_becomes_a_link(linked):
    text = 'The page "Which way\n    a call takes" has it.'
    assert linked(text) == "The page :doc:`/reference/ways` has it."
    with pytest.raises(ValueError, match="names the page 'No such page'"):
        linked('see the page "No such page"')
    with pytest.raises(ValueError, match="/performance/attention"):
        linked('see the page "Attention"')


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_name_pages_by_their_titles(name, linked):
    """A wheel has no files of docs/; and each title is that of one page."""
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert "docs/" not in text
    linked(text)
