"""Formulas become MathML when the site is built: pages need no script, nothing from outside."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def on_page_content(content: str, **_: Any) -> str:
    """Called by MkDocs with the HTML of each page."""
    return FORMULA.sub(mathml, content)


def mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    formula = convert(html.unescape(match[2]), display=display)
    # The converter leaves no space between a named function and its argument.
    return formula.replace("<mi>log</mi>", '<mi>log</mi><mspace width="0.17em" />')
