"""Sphinx configuration of the documentation: `tox run -e docs` builds it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from pygments.lexers.special import TextLexer

HERE = Path(__file__).parent

project = "meshwright"
copyright = "the meshwright authors"
author = "the meshwright authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

myst_heading_anchors = 4
myst_enable_extensions = ["deflist", "dollarmath"]
suppress_warnings = ["myst.header"]

html_theme = "furo"
html_title = "meshwright"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
# The default would load a program from the network to show an equation.
html_math_renderer = "mathml"
html_copy_source = False

# Docstrings write code as `name`.
default_role = "code"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_use_ivar = True

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]*)\)")


def _name_folders(app: Any, page: str, source: list[str]) -> None:
    """A link to a folder of the repository is one on GitHub only: here it becomes the folder's name."""

    def name(match: re.Match[str]) -> str:
        if (HERE / match[2]).is_dir():
            return f"{match[1]} (`{match[2].removeprefix('../')}` of the repository)"
        return match[0]

    source[0] = _OUTSIDE.sub(name, source[0])


def _equation(visitor: Any, node: nodes.Element) -> None:
    """An equation as MathML, which browsers show by themselves."""
    block = isinstance(node, nodes.math_block)
    text = convert(node.astext(), display="block" if block else "inline")
    visitor.body.append(f'<div class="equation">{text}</div>' if block else text)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (_equation, None), (_equation, None))
    app.connect("source-read", _name_folders)
    # GitHub draws these diagrams; here they are shown as text.
    app.add_lexer("mermaid", TextLexer)
