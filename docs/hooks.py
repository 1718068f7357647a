"""Pages of the site that are made from the code: every strategy, compressor and topology, as its docstring has it.

mkdocs calls the functions that begin with `on_`. Nothing here is kept in files, so nothing can go stale.
"""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from functools import cache, partial
from itertools import cycle
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from hpcdist import compress, strategies, topology
from hpcdist.config.settings import describe
from hpcdist.session import rules

ROOT = Path(__file__).parents[1]
CATALOGUES = {"Strategies": strategies, "Compressors": compress, "Topologies": topology}
COPIED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "slurm.md": "slurm/README.md"}
GLOSSARY = "glossary.md"
COST = ("Bytes", "Messages", "Memory", "Error")  # first words of paragraphs that say what it costs
TEXT = 45  # letters of a cell from which a table is one of text, not of numbers
EXAMPLE = re.compile(r"(Example(?: on \d+ ranks?)?):\n(.*)", re.S)
SECTION = re.compile(r"(Args|Attributes|Raises|Returns):\n((?:    .*\n?)+)")


# --- mkdocs's events --------------------------------------------------------------------------------------------------
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for section in config.nav:
        ((title, pages),) = section.items()
        if title in CATALOGUES:
            pages += [{name: f"{title.lower()}/{name}.md"} for name in CATALOGUES[title].available()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for title, catalogue in CATALOGUES.items():
        for name in catalogue.available():
            content = page_of(name, catalogue.load(name), title)
            files.append(File.generated(config, f"{title.lower()}/{name}.md", content=content))
    for path, source in COPIED.items():
        files.append(File.generated(config, path, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page, config: MkDocsConfig, files: Files) -> str:
    markdown = markdown.replace("<!-- the table of rules -->\n", table_of_rules())
    markdown = re.sub(r"^ *<!--.*?-->\n", "", markdown, flags=re.M | re.S)
    folder = Path(COPIED.get(page.file.src_path, f"docs/{page.file.src_path}")).parent
    markdown = re.sub(r"\[([^]\n]+)\]\(([^)#\s]+)\)", lambda found: link(found, folder, page, files), markdown)
    title = Path(page.file.src_path).stem.capitalize()
    if title in CATALOGUES:  # the first two columns of its tables name what has a page; later ones hold links
        names = "|".join(CATALOGUES[title].available())
        linked = partial(re.sub, rf"`({names})`", rf"[`\1`]({title.lower()}/\1.md)")
        markdown = re.sub(r"^\|[^|]*\|[^|]*\|", lambda found: linked(found[0]), markdown, flags=re.M)
    return markdown


def on_page_content(content: str, page, config: MkDocsConfig, files: Files) -> str:
    content = re.sub(r"<table>.*?</table>", stacked, content, flags=re.S)
    return content if page.file.src_path == GLOSSARY else with_terms(content, page.file.src_path.count("/"))


@cache
def terms() -> re.Pattern:
    """A pattern of the glossary's terms, the longest first."""
    names = re.findall(r"^### (.+)$", (ROOT / "docs" / GLOSSARY).read_text(), re.M)
    return re.compile(rf"\b({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})(s?)\b", re.I)


def with_terms(content: str, depth: int) -> str:
    """Link each term of the glossary where the text of a page has it first: not in code, links and headings."""
    linked, inside = set(), 0

    def link_once(found: re.Match) -> str:
        term = found[1].lower()
        if term in linked:
            return found[0]
        linked.add(term)
        return f'<a class="term" href="{"../" * depth}glossary.html#{term.replace(" ", "-")}">{found[0]}</a>'

    parts = re.split(r"(<[^>]+>)", content)
    for index, part in enumerate(parts):
        if tag := re.match(r"<(/?)(a|code|pre|h[1-6]|svg|summary)\b", part):
            inside += -1 if tag[1] else 1
        elif not part.startswith("<") and inside == 0:
            parts[index] = terms().sub(link_once, part)
    return "".join(parts)


def stacked(found: re.Match) -> str:
    """A table of text, whose rows site.css shows below each other on a phone; each cell then has its column's name."""
    heads = [re.sub(r"<[^>]+>", "", head) for head in re.findall(r"<th[^>]*>(.*?)</th>", found[0], re.S)]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", found[0], re.S)
    if max(len(re.sub(r"<[^>]+>", "", cell)) for cell in cells) < TEXT:
        return found[0]
    names = cycle(heads)
    rows = re.sub(r"<td(?=[ >])", lambda _: f'<td data-column="{next(names)}"', found[0])
    return rows.replace("<table>", "<table data-stacks>", 1)


def link(found: re.Match, folder: Path, page, files: Files) -> str:
    """A link between the repository's files, as the site has it: to a page, or no link where the site has none."""
    text, target = found[1], found[2]
    if "://" in target:
        return found[0]
    path = (ROOT / folder / target).resolve()
    if not path.is_relative_to(ROOT) or not path.exists():
        return found[0]
    source = path.relative_to(ROOT).as_posix()
    pages = {value: key for key, value in COPIED.items()} | {"README.md": "index.md"}
    site = pages.get(source, source.removeprefix("docs/") if source.startswith("docs/") else None)
    file = None if site is None else files.get_file_from_path(site)
    if file is None or file.inclusion.is_excluded():
        return text
    return f"[{text}]({'../' * page.file.src_path.count('/')}{site})"


# --- one page ---------------------------------------------------------------------------------------------------------
def page_of(name: str, algorithm: type, title: str) -> str:
    """What the module and the class say of it, its options, and the command that chooses it."""
    module = inspect.getdoc(inspect.getmodule(algorithm)).split("\n\n")[0]
    head, _, reference = inspect.getdoc(algorithm).partition("Reference:")
    head = re.sub(r"(?<=[.;:]\s)(?=Bytes\s+per\s)", "\n\n", head.strip())  # a paragraph's last sentences
    paragraphs = head.split("\n\n")
    costs = [text for text in paragraphs if text.startswith(COST)]
    parts = [
        f"# {name}",
        '!!! abstract ""\n' + "\n".join(f"    {line}" for line in module.splitlines()),
        *(prose(text) for text in paragraphs if text not in costs),
    ]
    if title != "Topologies":
        where = "strategy" if title == "Strategies" else "strategy.compression"
        if costs:
            parts += ["## Cost", *map(prose, costs)]
        if title == "Strategies":
            parts += ["## When to use it", advice(name), "## In a loop of your own", loop(algorithm)]
        parts += ["## Options", options(algorithm, where)]
    if title == "Topologies":
        options_of = inspect.signature(algorithm.__init__).parameters.values()
        keys = [p for p in options_of if p.kind is p.KEYWORD_ONLY]
        if keys:
            parts += ["## Options", "\n".join(f"- `{p.name}`: `{p.annotation}`{default(p)}" for p in keys)]
    if reference.strip():
        parts += ["## Reference", " ".join(reference.split())]
    return "\n\n".join([*parts, *use(name, title)]) + "\n"


def advice(strategy: str) -> str:
    """What docs/strategies.md says of a strategy in the table of when to use it."""
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| (.+?) \| (.+?) \|$", (ROOT / "docs/strategies.md").read_text(), re.M)
    _, when, careful, measured = next(row for row in rows if f"`{strategy}`" in row[0])
    told = f"Use it when {when}. Be careful when {careful}.\n\nMeasured: {measured}."
    return re.sub(r"\]\((?=[a-z]+[./])", "](../", told)  # a page of a strategy lies in a folder


def loop(strategy: type[strategies.Strategy]) -> str:
    """The patterns that a strategy refuses, with several ranks, among those that others allow."""
    refused = [pattern for pattern in by_contract() if rules.RULES[pattern].refused(strategy.contract)]
    if not refused:
        return "Whatever a loop does works, or is refused with every strategy: [patterns of loops](../own-loop.md)."
    others = "All else works, or is refused with every strategy: [patterns of loops](../own-loop.md)."
    return "\n".join(["With several ranks it is refused that:", "", *(f"- {h};" for h in refused), "", others])


def by_contract() -> list[str]:
    """The patterns that some strategies allow, and some refuse."""
    contracts = [strategies.load(name).contract for name in strategies.available()]
    return [h for h, rule in rules.RULES.items() if len({rule.refused(contract) for contract in contracts}) > 1]


def table_of_rules() -> str:
    """Each pattern that is refused, and by which strategies."""
    rows = ["| it is refused that | with |", "|---|---|"]
    for pattern in rules.RULES:
        allowing = rules.allowing(pattern)
        refusing = [f"`{name}`" for name in strategies.available() if name not in allowing]
        rows.append(f"| {pattern} | {', '.join(refusing) if allowing else 'all'} |")
    return "\n".join(rows) + "\n"


def default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is parameter.empty else f", default `{parameter.default}`"


def use(name: str, title: str) -> Iterator[str]:
    shown = {
        "Strategies": f'optimizer = hd.DistributedOptimizer(optimizer, model, strategy="{name}")',
        "Compressors": f'optimizer = hd.DistributedOptimizer(optimizer, model, compression="{name}")',
        "Topologies": f"hpcdist topology {name} --ranks 16 --output {name}.svg",
    }
    yield "## Use"
    yield f"```{'sh' if title == 'Topologies' else 'python'}\n{shown[title]}\n```"


def prose(paragraph: str) -> str:
    """A paragraph of a docstring; sections such as `Args:` become a list."""
    if example := EXAMPLE.fullmatch(paragraph):
        steps = doctest.DocTestParser().get_examples(example[2])
        code = "".join(step.source + re.sub(r"^(?=.)", "# ", step.want, flags=re.M) for step in steps)
        return f"**{example[1]}**\n\n```python\n{code}```"
    section = SECTION.fullmatch(paragraph + "\n")
    if section is None:
        return paragraph
    items = re.sub(r"\n +", " ", inspect.cleandoc(section[2])).splitlines()
    return "\n".join([f"**{section[1]}**", "", *(re.sub(r"^(\w+): ", r"- `\1`: ", item) for item in items)])


def options(algorithm: type, where: str) -> str:
    rows = [
        f"In a job `{where}.OPTION`, as in `--set {where}.OPTION=VALUE`; in a loop of your own arguments of "
        "`DistributedOptimizer`, those with a dot in a dictionary.\n",
        "| option | type | default | |",
        "|---|---|---|---|",
    ]
    for option in describe(algorithm.Config, where):
        key = option.key.removeprefix(f"{where}.")
        types = ", ".join(f"`{name}`" for name in option.type.split("|"))
        shown = f"`{option.default}`" if option.default else "needed"
        rows.append(f"| `{key}` | {types} | {shown} | {option.description} |")
    return "\n".join(rows)
