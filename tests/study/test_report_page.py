"""A report's page in a real browser: on a phone and on a screen, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import browser
from hpcdist.tools.report import write
from study import evidence

PROGRAM = browser.program()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: apt-get install chromium")

# Elements whose text has too little contrast with the ground behind it, by WCAG's rule.
FAINT = """
(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
  };
  const found = [];
  const kinds = "h1, h2, h3, p, li, dt, dd, th, td, a, summary, code, figcaption, caption";
  for (const node of document.querySelectorAll(kinds)) {
    const ink = rgb(getComputedStyle(node).color);
    const [low, high] = [ink, ground(node)].map(luminance).sort((a, b) => a - b);
    if (node.checkVisibility() && (high + 0.05) / (low + 0.05) < 4.5) found.push(node.outerHTML.slice(0, 80));
  }
  return found;
})()
"""
# Texts of figures that are not folded away: those that are cut off, and the size of the smallest in CSS pixels.
SHOWN = "[...document.querySelectorAll('figure svg text')].filter(node => !node.closest('details:not([open])'))"
CLIPPED = f"""
{SHOWN}.filter(node => {{
  const text = node.getBoundingClientRect(), svg = node.closest("svg").getBoundingClientRect();
  return text.left < svg.left - 1 || text.right > svg.right + 1;
}}).map(node => node.textContent)
"""
SMALLEST = f"""
Math.min(...{SHOWN}.map(node => parseFloat(getComputedStyle(node).fontSize)
  * Math.hypot(node.getScreenCTM().a, node.getScreenCTM().b)))
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    evidence.a_study(folder)
    return write(folder)


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    made = browser.Browser(PROGRAM)
    yield made
    made.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_the_page_fits_and_is_readable(page, chromium, width, dark):
    chromium.open(page, width, dark=dark)
    assert chromium.run("document.documentElement.scrollWidth <= innerWidth")
    assert chromium.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(15, 20, 25)" if dark else "rgb(255, 255, 255)"
    )
    assert chromium.run(FAINT) == []
    assert chromium.run(CLIPPED) == []
    assert chromium.run(SMALLEST) >= (8.5 if width < 600 else 9)
    assert set(chromium.requests) == {page.resolve().as_uri()} and chromium.complaints == []


def test_the_keyboard_reaches_wide_tables(page, chromium):
    chromium.open(page, 360)
    wide = "[...document.querySelectorAll('.scroll')].findIndex(node => node.scrollWidth > node.clientWidth)"
    number = chromium.run(wide)
    assert number >= 0
    chromium.run(
        f"document.querySelectorAll('.scroll')[{number}].previousElementSibling.querySelector('summary').focus()"
    )
    chromium.press("Tab")
    inside = "document.activeElement.classList.contains('scroll')"
    for _ in range(3):
        if not chromium.run(inside):
            chromium.press("Tab")
    assert chromium.run(inside)
    assert chromium.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_pictures_and_regions_have_names(page, chromium):
    chromium.open(page, 1280)
    tree = chromium.call("Accessibility.getFullAXTree")["nodes"]
    named = {role: [] for role in ("image", "region", "table", "main", "heading")}
    for node in tree:
        role = node.get("role", {}).get("value")
        if role in named and not node.get("ignored"):
            named[role].append(node.get("name", {}).get("value", ""))
    assert all(named["image"]) and len(named["image"]) > 10
    assert all(named["region"]) and all(named["table"]) and len(named["main"]) == 1
