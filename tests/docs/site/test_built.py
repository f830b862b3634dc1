"""The built site: no warning, no use of the network, every command, formula, argument and public
name.
"""

import re

import pytest

pytestmark = pytest.mark.extended  # building it takes seconds, in a process of its own
MODULES = ("attn_bias", "distillation", "losses")


def test_site_builds_without_warning(built):
    _, log = built
    assert log == "0\n"


def test_command_line_has_every_command(site):
    text = (site / "reference" / "command_line.html").read_text()
    for name in ("estimate", "profile", "train", "bench-attention", "doctor-linear-cross-entropy"):
        assert f'id="lowtide-{name}"' in text
    assert "--workspace" in text


def test_contract_has_formulas_and_arguments(site):
    text = (site / "reference" / "loss.html").read_text()
    assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">' in text
    assert "lowtide.linear_cross_entropy" in text
    assert re.search(r"<dt><code[^>]*><span[^>]*>row_weight</span></code></dt>", text), (
        "an argument is an entry of a list"
    )


def test_formulas_are_read_whole(site):
    """Neither a command nor an alignment is left in one as it was typed."""
    for page in site.rglob("*.html"):
        assert not re.findall(r"<m[io]>(?:\\|&)(?:amp;)?(?:\w+)?</m[io]>", page.read_text()), page


def test_reference_has_every_public_name(site):
    import lowtide

    text = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    there = set(re.findall(r'<dt class="sig [^>]*id="([\w.]+)"', text))
    names = {f"lowtide.{name}" for name in lowtide.__all__} - {"lowtide." + name for name in MODULES}
    for module in MODULES:
        names |= {f"lowtide.{module}.{name}" for name in getattr(lowtide, module).__all__}
    found = {name.rpartition(".")[2] for name in there}
    assert {name.rpartition(".")[2] for name in names} <= found


def test_pages_need_no_network(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|img)[^>]* src="([^"]+)"|<link[^>]* href="([^"]+)"', page.read_text()
        )
        assert not [each for pair in fetched for each in pair if each.startswith(("http:", "https:", "//"))]
