"""Sphinx configuration of the documentation: `tox run -e docs` builds it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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


def setup(app: Any) -> None:
    app.connect("source-read", _name_folders)
    # GitHub draws these diagrams; here they are shown as text.
    app.add_lexer("mermaid", TextLexer)
