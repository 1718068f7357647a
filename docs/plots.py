"""Draw every figure and write every table of the documentation from the small files in docs/data.

    python docs/plots.py          # docs/figures/*.svg, and each table below `<!-- data/NAME.csv -->` in a page
    pip install -e '.[tools,plots]'     # what it needs beside Python

A file in docs/data holds a table as the page shows it, "1.8 ± 0.2" included: who measures again changes that file only,
by the command that stands beside the table. Ink and colours have enough contrast on white and on black, and the
background is transparent, so that one figure serves light and dark pages.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

DOCS = Path(__file__).parent
ROOT = DOCS.parent
INK, GRID = "#7a828c", "#7a828c40"
COLOURS = ("#2f81d6", "#d9730d", "#2c9a5b", "#b65fc4", "#b8891c", "#d6455d", "#1c9aa0", "#8a8f98")
STYLE = {
    "svg.fonttype": "none",  # text stays text: small files, the reader's fonts
    "svg.hashsalt": "hpcdist",  # the same names of elements at every run
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}
NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?")
UNITS = {"µs": 1e-3, "ms": 1.0, "s": 1e3, "k": 1e3, "M": 1e6}
Table = list[list[str]]


# --- tables -----------------------------------------------------------------------------------------------------------
def table(name: str) -> Table:
    """The rows of docs/data/NAME.csv; the first one is the head."""
    with open(DOCS / "data" / f"{name}.csv", newline="") as file:
        return list(csv.reader(file))


def markdown(rows: Table) -> str:
    head, *body = ("| " + " | ".join(row) + " |\n" for row in rows)
    return head + "|" + "---|" * len(rows[0]) + "\n" + "".join(body)


def pages() -> Iterator[Path]:
    yield from (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))


def with_tables(text: str) -> str:
    """A page's text with the tables that its marks name."""
    mark = re.compile(r"(<!-- data/([\w-]+)\.csv -->\n)(?:\|.*\n)*")
    return mark.sub(lambda found: found[1] + markdown(table(found[2])), text)


def plain(cell: str) -> str:
    return cell.replace("`", "")


def value(cell: str) -> float | None:
    """The first number of a cell; times in milliseconds, counts in units. None where it says something else."""
    found = NUMBER.match(cell.strip())
    if found is None:
        return None
    unit = re.match(r"\s*(µs|ms|s|k|M)\b", cell.strip()[found.end() :])
    return float(found[0].replace("−", "-")) * (UNITS[unit[1]] if unit else 1.0)


def error(cell: str) -> float:
    """The number after the first ±, before any bracket; 0 where there is none."""
    found = re.search(r"± (\d+(?:\.\d+)?)", cell.split("(")[0])
    return float(found[1]) if found else 0.0


# --- figures ----------------------------------------------------------------------------------------------------------
def figure(width: float, height: float, columns: int = 1, **given) -> tuple[Figure, Sequence[Axes]]:
    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(1, columns, squeeze=False, **given)[0]


def ticks(axis, at: Sequence[float], text: Callable[[float], str] = "{:g}".format) -> None:
    """Ticks there and nowhere else, also on logarithmic axes."""
    axis.set_major_locator(FixedLocator(list(at)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: text(x)))


def bars(
    axes: Axes,
    names: Sequence[str],
    values: Sequence[float],
    labels: Sequence[str],
    intervals: Sequence[Sequence[float]] | None = None,
) -> None:
    """Horizontal bars from above to below, each with its number, which stands behind the interval if there is one."""
    at = range(len(names))
    axes.barh(at, values, color=[COLOURS[0] if name.startswith("allreduce") else COLOURS[2] for name in names])
    axes.set_yticks(at, names)
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    ends = values
    if intervals is not None:
        ends = [high for _, high in intervals]
        below = [x - low for x, (low, _) in zip(values, intervals, strict=True)]
        above = [high - x for x, high in zip(values, ends, strict=True)]
        axes.errorbar(values, at, xerr=(below, above), fmt="none", ecolor=INK, capsize=2)
    for y, (x, text) in enumerate(zip(ends, labels, strict=True)):
        axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center")


def slow_network() -> Figure:
    """README's figure: one network, one model, one word changed; each bar with its interval."""
    _, *rows = table("slow-network")
    rows.sort(key=lambda row: -float(row[1]))
    made, (axes,) = figure(7.4, 2.7)
    names = [plain(row[0]).replace(", compression =", " +").replace(", dense (a ring)", "") for row in rows]
    intervals = [[float(end) for end in row[2].split(" to ")] for row in rows]
    bars(axes, names, [float(row[1]) for row in rows], [f"{row[1]} s" for row in rows], intervals)
    axes.set_xlabel("seconds to 85 % test accuracy at 100 Mbit/s, 95 % intervals")
    axes.set_xlim(0, 95)
    return made


def networks() -> Figure:
    head, *rows = table("networks")
    made, (axes,) = figure(8.6, 3.4)
    where = [name.replace(", ", ",\n") for name in head[1:]]
    for row, marker in zip(rows, "osD^v<>", strict=True):
        label = plain(row[0]).replace(", compression =", " +")
        axes.plot(where, [float(cell) for cell in row[1:]], marker=marker, label=label)
    axes.set_yscale("log")
    ticks(axes.yaxis, (2, 5, 10, 20, 50))
    axes.set_ylabel("seconds to 85 % test accuracy")
    axes.grid(axis="y")
    made.legend(loc="outside right upper", fontsize=8)
    return made


def scaling() -> Figure:
    made, panels = figure(7.4, 3.2, 2, sharey=True)
    for axes, name, title in zip(panels, ("scaling-stragglers", "scaling-even"), ("with stragglers", "even steps")):
        head, *rows = table(name)
        for column, marker in zip(range(1, len(head)), "osD^"):
            reached = [row for row in rows if value(row[column]) is not None]
            x, y = [int(row[0]) for row in reached], [value(row[column]) for row in reached]
            spread = [error(row[column]) for row in reached]
            axes.errorbar(x, y, spread, marker=marker, capsize=2, label=plain(head[column]))
        axes.set(xscale="log", yscale="log", xlabel="workers", title=title)
        ticks(axes.xaxis, [int(row[0]) for row in rows])
        ticks(axes.yaxis, (2, 5, 10, 20, 30))
        axes.grid()
    panels[0].set_ylabel("virtual seconds to a loss of 0.35")
    panels[1].legend(fontsize=8)
    return made


def staleness() -> Figure:
    head, *rows = table("staleness")
    made, (axes,) = figure(7.4, 3.2)
    n = [int(value(cell)) for cell in head[1:]]
    for row, marker in zip(rows[:3], "osD"):
        shift = 1 + 0.03 * ("osD".index(marker) - 1)  # so that intervals don't hide each other
        x, y = [shift * v for v in n], [value(cell) for cell in row[1:]]
        spread = [error(cell) for cell in row[1:]]
        low = [min(e, v - 1.0) for e, v in zip(spread, y)]
        axes.errorbar(x, y, (low, spread), marker=marker, capsize=2, label=row[0])
    axes.set(xscale="log", yscale="log", xlabel="n of n-softsync, 16 workers", ylabel="test error in %")
    ticks(axes.xaxis, n)
    ticks(axes.yaxis, (1, 2, 5, 10, 20, 50, 100))
    axes.grid(axis="y")
    axes.legend(fontsize=8, title="learning rate", title_fontsize=8)
    return made


def regression() -> Figure:
    head, *rows = table("regression")
    rows = [row for row in rows if row[0] != "serial run"]
    made, panels = figure(9.2, 3.2, 3, sharey=True, sharex=True)
    for column, axes in enumerate(panels, 1):
        for y, row in enumerate(rows):
            found = re.search(r"\(([-+]\d\.\d+) ± (\d\.\d+)\)", row[column])
            if found:
                colour = COLOURS[1] if row[0].startswith("case") else COLOURS[0]
                axes.errorbar(float(found[1]), y, xerr=float(found[2]), marker="o", capsize=2, color=colour)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_title(head[column])
        axes.grid(axis="x")
    panels[0].set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=8)
    panels[0].invert_yaxis()
    panels[1].set_xlabel("test RMSE minus that of the serial run; left is more accurate")
    return made


def recent() -> Figure:
    """Loss over bytes: after equal samples, and after the seconds of the quickest, with a line between both."""
    _, *rows = table("recent")
    made, panels = figure(8.6, 3.8, 2, sharey=True)
    for axes, ranks in zip(panels, ("4", "16")):
        mine = [row for row in rows if row[0] == ranks]
        for place, row in enumerate(mine):
            x, end, early = value(row[4]), value(row[2]), value(row[3])
            style = {"color": COLOURS[place % len(COLOURS)], "marker": "osD"[place // len(COLOURS)]}
            axes.plot((x, x), (end, early), color=style["color"], linewidth=0.8)
            axes.plot(x, early, **style, fillstyle="none", linestyle="")
            always = r", (others \[.*?\]|(period|servers|fragment_layers|warmup_steps|variance_steps) [^,]+)"
            label = re.sub(always, "", plain(row[1]))
            axes.plot(x, end, **style, linestyle="", label=label if ranks == "4" else None)
        axes.set(xscale="log", xlabel="kB per rank and step", title=f"{ranks} ranks")
        ticks(axes.xaxis, (1, 10, 100))
        axes.grid()
    panels[0].set_ylabel("bits per byte")
    made.legend(loc="outside right upper", fontsize=7)
    return made


def allreduce() -> Figure:
    head, *rows = table("allreduce")
    sizes = {"KiB": 2**10, "MiB": 2**20}
    made, panels = figure(7.4, 3.2, 2, sharey=True)
    for axes, ranks in zip(panels, ("2", "4")):
        mine = [row for row in rows if row[0].startswith(f"{ranks} ranks")]
        names = [row[0].split(", ")[1] for row in mine]
        x = [int(name.split()[0]) * sizes[name.split()[1]] for name in names]
        for column, marker in zip(range(1, len(head)), "osD^"):
            axes.plot(x, [value(row[column]) for row in mine], marker=marker, label=head[column])
        axes.set(xscale="log", yscale="log", title=f"{ranks} ranks")
        ticks(axes.xaxis, x, dict(zip(x, names)).__getitem__)
        ticks(axes.yaxis, (0.001, 0.01, 0.1, 1, 10, 100))
        axes.tick_params(axis="x", labelsize=8, rotation=40)
        axes.grid()
    panels[0].set_ylabel("milliseconds")
    panels[0].legend(fontsize=8)
    return made


def horovod() -> Figure:
    head, *rows = table("horovod")
    made, (axes,) = figure(7.4, 2.6)
    for row, marker in zip(rows, "osD^"):
        axes.plot(head[1:], [value(cell) for cell in row[1:]], marker=marker, label=plain(row[0]))
    axes.set_yscale("log")
    ticks(axes.yaxis, (0.01, 0.1, 1, 10))
    axes.set_ylabel("milliseconds")
    axes.grid(axis="y")
    made.legend(loc="outside right upper", fontsize=8)
    return made


def server() -> Figure:
    head, *rows = table("server")
    made, (axes,) = figure(7.4, 2.8)
    for row, marker in zip(rows, "osD^v"):
        pairs = [(name, *map(float, cell.split(" / "))) for name, cell in zip(head[1:], row[1:]) if cell]
        axes.plot([p[0] for p in pairs], [p[1] / p[2] for p in pairs], marker=marker, label=row[0])
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set(ylim=(0, None), ylabel="updates per second over gloo's")
    axes.grid(axis="y")
    made.legend(loc="outside right upper", fontsize=8)
    return made


def steps() -> Figure:
    _, *rows = table("steps")
    made, (axes,) = figure(7.4, 3.4)
    labels = [f"{row[1]}, {row[2]} bytes" for row in rows]
    bars(axes, [plain(row[0]) for row in rows], [value(row[1]) for row in rows], labels)
    axes.set_xlabel("milliseconds per training step, and bytes sent or fetched per rank")
    axes.set_xlim(0, 88)
    return made


def compress() -> Figure:
    _, *rows = table("compress")
    made, (axes,) = figure(7.4, 4.2)
    below, left = ("terngrad", "dgc, 0.1 %", "topk, 0.1 %", "qsgd, 15 levels in all", "bf16", "onebit"), ("signsgd",)
    for row in rows:
        x, y, name = value(row[2]) + value(row[3]), value(row[1]), plain(row[0])
        at = (-4 if name in left else 4, -11 if name in below else 4)
        axes.plot(x, y, "o", color=COLOURS[0])
        side = "right" if name in left else "left"
        axes.annotate(name, (x, y), at, textcoords="offset points", fontsize=8, ha=side)
    axes.set(xscale="log", yscale="log", xlabel="milliseconds to encode and decode 10 M elements")
    axes.set_ylabel("times fewer bytes")
    ticks(axes.xaxis, (10, 20, 50, 100, 200, 500))
    ticks(axes.yaxis, (2, 10, 100, 1000))
    axes.set_xlim(11, 900)
    axes.grid()
    return made


# --- diagrams ---------------------------------------------------------------------------------------------------------
def way(name: str) -> Figure:
    """One gradient's way: who acts stands above, time runs downwards, each row of the file is an arrow."""
    _, *rows = table(f"way-{name}")
    who = list(dict.fromkeys(part for row in rows for part in row[:2]))
    made, (axes,) = figure(8.2, 0.9 + 0.42 * len(rows))
    for x, part in enumerate(who):
        axes.plot((x, x), (-0.4, len(rows)), color=GRID, zorder=0)
        axes.annotate(part, (x, -0.7), ha="center", va="center", weight="bold")
    for y, (source, dest, what) in enumerate(rows):
        a, b = who.index(source), who.index(dest)
        if a == b:
            axes.plot(a, y + 0.3, "o", color=COLOURS[0], markersize=5)
            axes.annotate(what, (a, y + 0.3), (8, 0), textcoords="offset points", va="center", fontsize=9)
        else:
            arrow = {"arrowstyle": "-|>", "color": COLOURS[0], "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (b, y + 0.45), (a, y + 0.45), arrowprops=arrow)
            axes.annotate(what, (min(a, b), y + 0.36), (6, 0), textcoords="offset points", va="bottom", fontsize=9)
    axes.set(xlim=(-0.5, len(who) - 0.3), ylim=(len(rows) + 0.2, -1.1))
    axes.axis("off")
    return made


def family(name: str) -> Figure:
    """Messages between ranks over time, recorded by docs/families.py: a bar for each computation."""
    _, *rows = table(f"family-{name}")
    ends = [(int(rank), float(start), float(end)) for rank, to, start, end, _ in rows if not to]
    ranks = 1 + max(int(row[0]) for row in rows)
    made, (axes,) = figure(7.4, 2.3)
    for rank, start, end in ends:
        axes.barh(rank, end - start - 0.3, 0.36, start, color=COLOURS[0])  # a gap between two steps
    for source, dest, start, end, n_bytes in rows:
        if dest:
            width = 1.4 if int(n_bytes) > 50_000 else 0.7
            arrow = {"arrowstyle": "-|>", "color": COLOURS[1], "shrinkA": 0, "shrinkB": 0, "linewidth": width}
            side = 0.18 if int(dest) > int(source) else -0.18
            at, to = (float(start), int(source) + side), (float(end), int(dest) - side)
            axes.annotate("", to, at, arrowprops={**arrow, "mutation_scale": 8}, annotation_clip=True)
    computing = {rank for rank, _, _ in ends}
    slowest = max(ends, key=lambda one: one[2] - one[1])[0]
    told = {rank: " (slow)" if rank == slowest else "" if rank in computing else " (server)" for rank in range(ranks)}
    axes.set_yticks(range(ranks), [f"rank {rank}{told[rank]}" for rank in range(ranks)])
    axes.set(xlim=(0, 85), ylim=(ranks - 0.6, -0.4), xlabel="virtual milliseconds")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return made


def folders() -> Figure:
    """The library's folders: what stands above imports what stands below."""
    rows = table("folders")
    made, (axes,) = figure(8.2, 0.52 * len(rows))
    for y, row in enumerate(rows):
        for x, name in enumerate(row):
            width = 1 / len(row)
            seam = name.startswith("comm")
            axes.barh(y, width - 0.012, 0.72, x * width, color=COLOURS[0] if seam else GRID)
            axes.annotate(name, ((x + 0.5) * width - 0.006, y), ha="center", va="center", fontsize=8.5)
            if seam:
                axes.texts[-1].set_color("white")
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5))
    axes.axis("off")
    return made


FIGURES = {
    "slow-network": slow_network,
    "networks": networks,
    "scaling": scaling,
    "staleness": staleness,
    "regression": regression,
    "recent": recent,
    "allreduce": allreduce,
    "horovod": horovod,
    "server": server,
    "steps": steps,
    "compress": compress,
    "folders": folders,
    **{path.stem: partial(way, path.stem.removeprefix("way-")) for path in sorted(DOCS.glob("data/way-*.csv"))},
    **{
        path.stem: partial(family, path.stem.removeprefix("family-")) for path in sorted(DOCS.glob("data/family-*.csv"))
    },
}


def draw(folder: Path) -> None:
    """Write all figures into a folder."""
    with matplotlib.rc_context(STYLE):
        for name, make in FIGURES.items():
            make().savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    for page in pages():
        page.write_text(with_tables(page.read_text()))
    draw(DOCS / "figures")


if __name__ == "__main__":
    main()
