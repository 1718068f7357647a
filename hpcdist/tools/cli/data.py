"""`hpcdist data`: data sets in HDF5."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdist.errors import ConfigError
from hpcdist.tools import completion, console
from hpcdist.tools.cli.base import command_group
from hpcdist.tools.options import Overrides, argument, flag, option

app = command_group("data", "Data sets in HDF5, the files that jobs train on.")


@app.command("import", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def data_import(
    context: typer.Context,
    name: Annotated[
        str, argument("NAME", "Data set or kind of file; see `hpcdist datasets`.", autocompletion=completion.datasets)
    ],
    source: Annotated[str, argument("SOURCE", "File or folder to read; `sklearn` for digits.")],
    destination: Annotated[Path, argument("FILE", "HDF5 file to write.")],
    overrides: Overrides = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace the file if it exists.")] = False,
) -> None:
    """Convert a data set to an HDF5 file.

    The options of NAME, listed by `hpcdist datasets NAME`, follow FILE, or are given by --set.

    Example: hpcdist data import digits sklearn digits.h5 --test_fraction 0.1
    """
    from hpcdist.config.merge import load
    from hpcdist.config.settings import checked_options
    from hpcdist.data import describe, importers

    convert, settings = importers.load(name), [*(overrides or []), *_as_overrides(context.args)]
    nearest_parent = next(folder for folder in destination.absolute().parents if folder.exists())
    if destination.is_dir() or not nearest_parent.is_dir():
        path = destination if destination.is_dir() else nearest_parent
        kind = "a folder" if path.is_dir() else "no folder"
        raise ConfigError(f"FILE must be a file to write; got {destination}, but {path} is {kind}. Give another name.")
    if destination.exists() and not overwrite:
        raise ConfigError(f"FILE must be a new file; got {destination}, which exists. Add --overwrite to it.")
    console.facts(describe(convert(source, destination, **checked_options(convert, load({}, None, settings)))))


def _as_overrides(arguments: list[str]) -> list[str]:
    """Convert arguments `--name value` or `--name=value` to NAME=VALUE, as for --set; else raise ConfigError."""
    parts = [part for arg in arguments for part in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    if len(parts) % 2 or not all(name.startswith("--") for name in parts[::2]):
        raise ConfigError(
            f"options of the importer must be --NAME VALUE, behind FILE; got {' '.join(arguments)}. `hpcdist datasets "
            "NAME` lists them."
        )
    return [f"{name[2:].replace('-', '_')}={value}" for name, value in zip(parts[::2], parts[1::2])]


@app.command("fetch")
def data_fetch(
    name: Annotated[
        str, argument("NAME", "mnist or fashion-mnist.", autocompletion=lambda: ["mnist", "fashion-mnist"])
    ],
    folder: Annotated[Path | None, argument("FOLDER", "Folder for the files. Default: data/NAME.")] = None,
    source: Annotated[
        Path | None, option("FOLDER", "Copy the files from this folder, compressed by gzip or not.", "--from")
    ] = None,
) -> None:
    """Download the original files of a data set, and print their origin.

    They come from your folder (--from), from Debian's package, or from a mirror. An interrupted download is resumed.

    Example: hpcdist data fetch fashion-mnist
    """
    from hpcdist.data.fetch import RELEASES, fetch

    folder = Path("data", name) if folder is None else folder
    with console.downloads() as show:
        origin = fetch(name, folder, source=source, show=show)
    step = f"hpcdist data import {RELEASES[name].importer} {folder} {name}.h5"
    console.facts({RELEASES[name].title: origin, "folder": str(folder), "next": step})


@app.command("info")
def data_info(
    path: Annotated[Path, argument("FILE", "HDF5 file.")],
    workers: Annotated[
        int, typer.Option("--workers", min=0, help="Show the split among N workers with data.split = dirichlet.")
    ] = 0,
    alpha: Annotated[float, typer.Option("--alpha", help="data.alpha of that split.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="seed of that split.")] = 0,
) -> None:
    """Describe an HDF5 file: samples, shapes, types, chunks, classes, ranges of values.

    With --workers also the number of samples of each label per worker under a non-IID split.

    Example: hpcdist data info digits.h5 --workers 4 --alpha 0.1
    """
    from hpcdist.data import describe
    from hpcdist.data.hdf5 import HDF5Dataset
    from hpcdist.data.labels import counts, dirichlet, labels_of

    facts = describe(path)
    if workers:
        with HDF5Dataset(path, "train") as dataset:
            labels = labels_of(dataset)
        counts_of_workers = counts(labels, dirichlet(labels, workers, alpha, seed))
        facts["samples of each label"] = {f"worker {number}": row for number, row in enumerate(counts_of_workers)}
    console.facts(facts)
