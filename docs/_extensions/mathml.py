"""Render formulas as MathML, which browsers show without a script and without network."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline(translator: nodes.NodeVisitor, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _display(translator: nodes.NodeVisitor, node: nodes.math_block) -> None:
    latex = node.astext()
    if "&" in latex:  # in several lines, as in Sphinx's other renderers
        latex = rf"\begin{{split}}{latex}\end{{split}}"
    translator.body.append(f'<div class="formula">{convert(latex, display="block")}</div>\n')
    raise nodes.SkipNode
