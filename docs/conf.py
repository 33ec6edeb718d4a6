"""How `make docs` builds these pages: furo, MyST, notebooks run in the build, formulas as MathML, nothing fetched."""

import re
from html import escape
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

import lastlayer

logger = getLogger(__name__)

project = "lastlayer"
author = "The lastlayer developers"
copyright = author
release = version = lastlayer.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc"]
autosummary_generate = False  # tables on the pages of the reference link to entries of the same page
exclude_patterns = ["conf.py"]
nitpicky = False  # types from torch and NumPy are named in signatures, not linked: that would need their inventories

html_theme = "furo"
html_title = "lastlayer"
html_static_path = ["_static"]
html_css_files = ["lastlayer.css"]
html_copy_source = html_show_sourcelink = False
html_math_renderer = "mathml"
highlight_language = "none"
python_maximum_signature_line_length = 88

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
default_role = "code"  # docstrings are written with single backticks, as in Markdown
numpydoc_show_class_members = False  # the pages of the reference say which members they show


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (_inline_math, None), (_display_math, None))


# formulas, without a script from elsewhere ----------------------------------------------------------------------------


LETTER = r"\s*(<m[in]\b[^>]*>[^<]*</m[in]>)"
ACCENTED = re.compile(rf'<munderover>{LETTER}{LETTER}\s*(<mo stretchy="false">[^<]*</mo>)\s*</munderover>')
BARRED = re.compile(rf'<mover accent="true">{LETTER}\s*<mo stretchy="false">ˉ</mo>\s*</mover>')


def _mathml(node: nodes.math | nodes.math_block, as_block: bool) -> str:
    """docutils takes the subscript of an accented letter for the lower limit of a sum: here it becomes one again.

    Bars are drawn by the style sheet, above the letter in every font; functions such as log get some space.
    """
    tex = re.sub(r"\\dots\b", r"\\ldots", node.astext())
    try:
        out = tex2mathml(tex, as_block=as_block)
    except MathError as error:
        logger.warning("the formula %r is beyond docutils: %s", tex, error, location=node)
        return escape(tex)
    out = ACCENTED.sub(r'<msub><mover accent="true">\1\3</mover>\2</msub>', out)
    out = BARRED.sub(r'<mrow class="bar">\1</mrow>', out)
    return re.sub(r"<mi>(log|exp|det|tr)</mi>", r'<mspace width="0.17em"/><mi>\1</mi><mspace width="0.17em"/>', out)


def _inline_math(page: Any, node: nodes.math) -> None:
    page.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def _display_math(page: Any, node: nodes.math_block) -> None:
    page.body.append(f'<div class="math">{_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode
