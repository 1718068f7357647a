"""Turn matplotlib's SVG into one that takes the page's colours and fonts, and says in words what it shows."""

from __future__ import annotations

import io
import re
from html import escape

import matplotlib

from hpcdist.tools.report.figures import INK, ReportFigure

STANDALONE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3;background:#0f1419}}</style>"


def inline(drawn: ReportFigure) -> str:
    """Write a figure as an element of a page."""
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": drawn.name}):  # text stays text
        drawn.figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r"\s*<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", text, count=1, flags=re.S)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    text = re.sub(r"(\bid=\"|url\(#|href=\"#)", rf"\g<1>{drawn.name}-", text)  # names are one page's, not one figure's
    text = text.replace(INK, "currentColor")
    text = re.sub(r">\s+<", "><", text)
    box = re.search(r'viewBox="[^"]*"', text)[0]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box} role="img" '
        f'aria-labelledby="{drawn.name}-title {drawn.name}-desc" stroke-linejoin="round" stroke-linecap="butt">'
        f'<title id="{drawn.name}-title">{escape(drawn.title)}</title>'
        f'<desc id="{drawn.name}-desc">{escape(drawn.description)}</desc>'
    )
    return head + text[text.index(">") + 1 :]


def standalone(element: str) -> str:
    """Write such an element as a file of its own, light or dark as its reader likes."""
    at = element.index("<title")
    return element[:at] + STANDALONE + element[at:]
