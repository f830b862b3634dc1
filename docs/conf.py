"""Configure the site for Sphinx: `make docs` builds it offline, and a warning is an error."""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_extensions"), str(DOCS.parent)]

project = "lowtide"
author = "the lowtide authors"
copyright = author
version = release = re.search(
    r'^__version__ = "(.+)"', (DOCS.parent / "lowtide" / "__init__.py").read_text(), re.MULTILINE
)[1]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    "benchmark_summaries",
    "benchmark_tables",
    "command_line",
    "contract_docstrings",
    "data_tables",
    "mathml",
    "page_tables",
    "ways_of_a_call",
]
exclude_patterns = ["_build", "_extensions"]
smartquotes = False  # [..., D] and "mean" stay as they are typed
default_role = "code"
pygments_style = "a11y-high-contrast-light"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks come with their results; tests/docs runs them
suppress_warnings = [
    "myst.header",  # the archive of decisions is kept as it was written
]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # a signature shows them
autodoc_mock_imports = ["lightning", "transformers", "trl"]
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
python_use_unqualified_type_names = True

html_theme = "pydata_sphinx_theme"
html_title = "lowtide"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_search_scorer = str(DOCS / "_extensions" / "scorer.js")
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "lowtide"},
    "header_links_before_dropdown": 9,
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
    "navbar_end": ["theme-switcher"],
    "show_prev_next": True,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
    "secondary_sidebar_items": ["page-toc"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {page: [] for page in ("index", "install", "examples/index")}
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True


def _links_from_the_root(_app, _path, _parent, content):
    """Let the links of CHANGELOG.md and CONTRIBUTING.md, included in docs/project, lead there."""
    content[0] = re.sub(r"\]\((?!https?://|#)([^)]+)\)", r"](../../\1)", content[0]).replace(
        "(../../docs/", "(../"
    )


def setup(app):
    app.connect("include-read", _links_from_the_root)
