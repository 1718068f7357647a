"""README.md and docs: their code runs, figures and tables are those of docs/data, paths exist, and the site builds."""

from __future__ import annotations

import ast
import html
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import pytest

import hpcdist
from harness import browser, pages
from harness.cases import each
from hpcdist import compress, strategies, topology

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
CATALOGUES = {"strategies": strategies, "compressors": compress, "topologies": topology}
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


@pytest.fixture(scope="module")
def plots():
    return script("plots")


def script(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- code -------------------------------------------------------------------------------------------------------------
LONG = ("docs/python-api.md",)  # tests/study and tests/slurm try its functions
CODED = [name for name in NAMES if "```" in (ROOT / name).read_text()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended if name in LONG else ()) for name in CODED]
)
def test_the_code_of_a_page_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    pages.run(ROOT / name)


def test_blocks_are_found_with_what_is_said_of_them():
    text = "a\n\n<!-- not run: it installs -->\n```sh\npip\n```\n\n- b\n\n  ```python\n  x = 1\n  ```\n"
    text += "\n<!-- before: y = 2 -->\n```python\nz = y\n```\n"
    found = [(b.language, b.code, b.line, b.reason, b.before) for b in pages.blocks(text)]
    assert found == [
        ("sh", "pip\n", 4, "it installs", ""),
        ("python", "x = 1\n", 10, "", ""),
        ("python", "z = y\n", 15, "", "y = 2"),
    ]


@each(
    "case",
    [
        ("```sh\nrm it\n```\n", "must hold commands of hpcdist"),
        ("```sh\nmpirun -n 2 hpcdist train jobs/digits.py --set strategy=gosip\n```\n", "strategy"),
        ("```toml\nshape = 'gosip'\n```\n", "shape"),
        ("```ruby\n```\n", "must be python, toml or sh"),
        ("```python\nraise ValueError('in the block')\n```\n", "in the block"),
        ("```python\nhd.init()\nassert hd.size() == 1, 'ranks'\n```\n", "ranks"),
    ],
)
def test_a_wrong_block_fails(case, tmp_path, monkeypatch):
    block, message = case
    monkeypatch.chdir(tmp_path)
    if not Path("jobs").exists():
        Path("jobs").symlink_to(ROOT / "jobs")
    page = tmp_path / "page.md"
    page.write_text(block)
    with pytest.raises(Exception, match=message):
        pages.run(page)


# --- what pages name --------------------------------------------------------------------------------------------------
@each("name", NAMES)
def test_paths_and_links_in_a_page_lead_somewhere(name):
    """On disk; strategies, compressors and topologies have pages on the site only."""
    text = (ROOT / name).read_text()
    named = re.findall(r"(?<![\w./])((?:jobs|tests|slurm|docs|hpcdist)/[\w/.-]*\w)\b", text)
    named = [path for path in named if not re.search(r"NAME|\.{2,}", path)]
    assert [path for path in named if not (ROOT / path).exists()] == []
    missing = []
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        path = (ROOT / name).parent.joinpath(target).resolve()
        catalogue = CATALOGUES.get(path.parent.name)
        generated = catalogue is not None and path.stem in catalogue.available()
        if not path.exists() and not generated and target != "slurm.md" and target != "changelog.md":
            missing.append(target)
    assert missing == []


def test_the_architecture_names_what_there_is():
    """Each `file.py` · `Class.method` of the lists."""
    named = re.findall(r"`([\w/]+\.py)` · `([\w.]+)`", (DOCS / "architecture.md").read_text())
    assert len(named) > 20
    assert [(file, name) for file, name in named if not _defines(ROOT / "hpcdist" / file, name.split("."))] == []


def _defines(path: Path, name: list[str]) -> bool:
    body = ast.parse(path.read_text()).body if path.exists() else []
    for part in name:
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def test_the_page_of_the_api_names_what_a_script_may_call():
    named = re.findall(r"^::: hpcdist\.(.+)", (DOCS / "api/loop.md").read_text(), re.M)
    assert sorted(named) == sorted(hpcdist.__all__)


def test_the_glossary_has_at_most_60_terms_of_two_sentences():
    terms = re.findall(r"^### (.+)\n(.+)$", (DOCS / "glossary.md").read_text(), re.M)
    assert 50 <= len(terms) <= 60 and len({term for term, _ in terms}) == len(terms)
    assert [term for term, text in terms if len(re.findall(r"[.:](?: |$)", text)) not in (1, 2, 3)] == []


@each("page", CATALOGUES)
def test_the_catalogues_are_whole(page):
    catalogue = CATALOGUES[page]
    first = [row.split("|")[1] for row in re.findall(r"^\|.*", (DOCS / f"{page}.md").read_text(), re.M)]
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(catalogue.available()) - {"none"}


FAMILIES = ("synchronous", "servers", "gossip", "local", "compressed")


def test_the_readme_is_short_and_leads_to_every_strategy():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert [family for family in FAMILIES if family not in text.lower()] == []
    assert "(docs/strategies.md)" in text, "whose tables name every strategy"
    assert f"{len(strategies.available())} published strategies" in " ".join(text.split())


def test_every_strategy_has_advice_with_what_was_measured():
    """A link to a study, or the words that none has it yet."""
    text = (DOCS / "strategies.md").read_text()
    rows = re.findall(r"^\| (`.+?) \| .+? \| .+? \| (.+?) \|$", text, re.M)
    measured = {name: cell for names, cell in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(measured) == set(strategies.available())
    assert [name for name, cell in measured.items() if "](studies/" not in cell and "in no study" not in cell] == []


VARYING = r"\.\.\.|\d+|'[^']*'|\b(?:tools|get|versions and settings|files of jobs and plug-ins|Fashion-MNIST's)\b"


def test_troubleshooting_quotes_messages_that_hpcdist_has():
    files = "\n".join(path.read_text() for path in (ROOT / "hpcdist").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", files)  # messages are written over several lines
    first = re.findall(r"^\| (.+?) \|", (DOCS / "troubleshooting.md").read_text(), re.M)
    quoted = [text for cell in first for text in re.findall(r"`([^`]+)`", cell)]
    ours = [text for text in quoted if re.search(r"\bmust\b|did not happen|Where the ranks|two launchers", text)]
    assert len(ours) > 12
    longest = [max(re.split(VARYING, text), key=len).strip() for text in ours]
    assert [text for text in longest if text not in source] == []


# --- figures and tables -----------------------------------------------------------------------------------------------
@each("name", NAMES)
def test_tables_are_those_of_the_data(name, plots):
    text = (ROOT / name).read_text()
    assert plots.with_tables(text) == text, "run python docs/plots.py"


def test_figures_are_those_of_the_data(tmp_path, plots):
    plots.draw(tmp_path)
    kept = {path.name: path.read_text() for path in (DOCS / "figures").glob("*.svg")}
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    same = f"Matplotlib v{matplotlib.__version__}," in kept["scaling.svg"]  # another one draws a little differently
    seen = (lambda text: text) if same else (lambda text: sorted(re.findall(r"<text[^>]*>([^<]*)", text)))
    assert sorted(kept) == sorted(drawn)
    assert [name for name in kept if seen(kept[name]) != seen(drawn[name])] == [], "run python docs/plots.py"


@each("family", FAMILIES)
def test_diagrams_are_those_of_the_strategies(family, plots):
    """Messages of a run on virtual ranks, which takes the same steps at every call."""
    recorded = [[str(value) for value in row] for row in script("families").record(family)]
    assert plots.table(f"family-{family}")[1:] == recorded, "run python docs/families.py, then python docs/plots.py"


def test_every_data_file_is_shown_and_every_figure_too():
    text = "".join(page.read_text() for page in PAGES)
    figures = {path.stem for path in DOCS.glob("figures/*.svg") if path.name in text}
    assert {path.stem for path in DOCS.glob("figures/*.svg")} == figures
    assert [p.name for p in DOCS.glob("data/*.csv") if p.name not in text and p.stem not in figures] == []


# --- the site ---------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="mkdocs is not installed: pip install -e '.[docs]'")
@pytest.mark.time_limit(120)
@pytest.mark.extended
def test_the_site_builds_without_warnings(tmp_path):
    """A page for each algorithm among them; no image or page that a page names is missing."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    for folder, catalogue in CATALOGUES.items():
        assert {path.stem for path in (tmp_path / folder).glob("*.html")} == set(catalogue.available())
    assert "](" not in (tmp_path / "strategies.html").read_text(), "a link inside a link"
    assert 'glossary.html#spectral-gap">spectral gap</a>' in (tmp_path / "tutorials/gossip.html").read_text()
    parts = ("cost", "when-to-use-it", "options", "reference")
    for page in (tmp_path / "strategies").glob("*.html"):
        assert [part for part in parts if f'<h2 id="{part}"' not in page.read_text()] == [], page.name
    for page in tmp_path.rglob("*.html"):
        if page.name == "404.html":  # is served at any address
            continue
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text()):
            target = html.unescape(target)
            assert ":" in target or (page.parent / target).exists(), f"{page.relative_to(tmp_path)} names {target}"
    if program := browser.program():
        searched_from_the_file_system(tmp_path / "index.html", program)
        fits_a_phone(tmp_path, program)


def fits_a_phone(site: Path, program: str) -> None:
    """No page scrolls sideways at 390 px, and tables of text show their cells below each other."""
    opened = browser.Browser(program)
    try:
        for page in [
            site / "strategies/softsync.html",
            *sorted(site.glob("*.html")),
            *sorted(site.glob("studies/*.html")),
        ]:
            opened.open(page, 390)
            assert opened.run("document.documentElement.scrollWidth") <= 390, page.name
            wide = "[...document.querySelectorAll('table[data-stacks]')].filter(t => t.offsetWidth > 390).length"
            assert opened.run(wide) == 0, page.name
        opened.open(site / "strategies.html", 390)
        assert opened.run("document.querySelectorAll('table[data-stacks]').length") > 10
    finally:
        opened.close()


def searched_from_the_file_system(page: Path, program: str) -> None:
    opened = browser.Browser(program)
    try:
        opened.open(page, 1400)
        opened.run("document.getElementById('__search').click()")
        typed = "e => { e.value = 'staleness'; e.dispatchEvent(new Event('keyup')) }"
        opened.run(f"({typed})(document.querySelector('[data-md-component=search-query]'))")
        until = time.monotonic() + 30
        while not opened.run("document.querySelectorAll('.md-search-result__item').length"):
            assert time.monotonic() < until, "the search has found nothing"
            time.sleep(0.1)
        assert not [address for address in opened.requests if not address.startswith(("file:", "data:", "about:"))]
        assert opened.complaints == []
    finally:
        opened.close()
