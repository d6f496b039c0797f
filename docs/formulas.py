"""Formulas of pages, set as MathML when the site is built: no script, no network.

In Markdown: ``$C^{-1}$`` in a sentence, ``$$ ... $$`` on lines of its own.
"""

import xml.etree.ElementTree as ElementTree

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def mathml(latex: str, display: str = "inline") -> str:
    r"""Return LaTeX as MathML; ``display`` is inline or block.

    Raises:
        ValueError: LaTeX that is not understood, named.
    """
    made = str(convert(latex, display=display))
    words = [e.text for e in ElementTree.fromstring(made).iter() if (e.text or "").startswith("\\")]
    if words:
        raise ValueError(f"formula {latex!r}: {', '.join(map(str, words))} is not understood.")
    return made


def _inline(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def _block(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(f'<div class="formula">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Make this the renderer of formulas."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
