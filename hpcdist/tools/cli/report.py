"""`hpcdist report|watch`: compare finished runs; follow running ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hpcdist.errors import ConfigError
from hpcdist.tools import completion, console
from hpcdist.tools.cli.runs import Tag, Where, select_runs
from hpcdist.tools.options import Target, argument, flag, option, read_target

app = typer.Typer()


@app.command()
def report(
    folders: Annotated[
        list[Path], argument("FOLDER", "Folders of runs, or folders with runs in them.", autocompletion=completion.runs)
    ],
    columns: Annotated[str | None, option("A,B,...", "Columns of the table. A wrong name lists all of them.")] = None,
    sort: Annotated[str | None, option("COLUMN", "Column that the rows are sorted by, the best first.")] = None,
    target: Target = None,
    where: Where = None,
    tag: Tag = None,
    html: Annotated[bool, flag("--html", "Also write a web page with figures and tables, in FOLDER/report.")] = False,
    output: Annotated[Path | None, option("DIR", "Write the web page into this folder.")] = None,
    as_json: Annotated[bool, flag("--json", "Print JSON: all columns, numbers not rounded.")] = False,
    as_csv: Annotated[bool, flag("--csv", "Print CSV: all columns, numbers not rounded.")] = False,
    as_latex: Annotated[bool, flag("--latex", "Print the tables, and the methods, for LaTeX.")] = False,
) -> None:
    """Compare runs in a table per job: metrics, times, bytes sent.

    Each comparison, each sweep, and the single runs of each job have a table. Runs that differ only in their seeds
    share a row, with means and 95 % intervals. A terminal shows the columns that fit, a file all of them.

    Example: hpcdist report runs --target accuracy=0.97 --sort time_to_target_s
    """
    from pydantic_core import to_json

    from hpcdist.tools.report import table
    from hpcdist.tools.report.analysis import analyse
    from hpcdist.tools.report.results import read_jobs

    if (as_json, as_csv, as_latex).count(True) > 1:
        raise ConfigError("--json, --csv and --latex must be given one at a time; got several. Give one of them.")
    goal = None if target is None else read_target(target)
    only = {Path(listed.folder) for listed in select_runs(folders, where, tag)} if where or tag else None
    if only is not None and not only:
        raise ConfigError(f"--where and --tag must choose a run; got none in {', '.join(map(str, folders))}.")
    jobs = read_jobs(folders, goal, only=only, progress=console.tracked)
    column_names = None if columns is None else [name.strip() for name in columns.split(",")]
    tables = table.tables([analyse(job) for job in jobs], column_names, sort, every=as_json or as_csv)
    if as_json:
        print(to_json(table.as_data(tables), indent=1, inf_nan_mode="null").decode())
    elif as_csv:
        table.write_csv(table.csv_rows(tables), sys.stdout)
    elif as_latex:
        print(table.as_latex(tables))
    else:
        table.show(tables)
        for run in (listed.run for job in jobs for listed in job.runs):
            for line in run.changes:
                console.note(f"{run.folder}: {line}")
            if run.damage is not None:
                console.note(f"{run.folder} is damaged: {run.damage}")
    if html or output is not None:
        from hpcdist.tools.report import write

        console.note(f"written: {write(folders, output, target=goal, only=only, progress=console.tracked)}")


@app.command()
def watch(
    folder: Annotated[
        Path,
        argument("FOLDER", "Folder of a run, of a comparison, or of several runs.", autocompletion=completion.runs),
    ],
    every: Annotated[float, option("SECONDS", "Time between two updates.", min=0.1)] = 2.0,
    once: Annotated[bool, flag("--once", "Show the state once, then exit.")] = False,
    serve: Annotated[bool, flag("--serve", "Show a web page instead, and print its address. Ctrl-C ends it.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the web page. 0: any free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address of the web page. Only this machine can open 127.0.0.1.")] = (
        "127.0.0.1"
    ),
) -> None:
    """Follow runs while they train: curves, speed, waiting ranks, time left.

    It exits when the runs have ended; the exit status is 1 if a run has died.
    """
    if not serve:
        from hpcdist.tools.watch import terminal

        if not terminal.watch(folder, every, once):
            raise typer.Exit(1)
        return
    from hpcdist.tools.watch.page import PageServer

    with PageServer(folder, host, port, every) as server:
        console.note(f"serving {folder} at {server.address} until Ctrl-C")
        if hint := server.tunnel:
            console.note(f"from another machine: {hint}, and open the address there")
        server.serve_forever()
