"""The measured table as a file, so that a machine is measured once."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

from pydantic import ValidationError

from hpcdist.collectives.tuning.table import TimingTable, candidates, measure_table
from hpcdist.comm.cache import FOLDER as DEFAULT_CACHE
from hpcdist.comm.cache import cache_file, keep
from hpcdist.comm.communicator import Communicator


def cached_table(comm: Communicator, cache_dir: Path = DEFAULT_CACHE, *, refresh: bool = False) -> TimingTable:
    """Collective. Read the table of this machine from its file, or measure it and write it there.

    Rank 0 alone reads and writes; all ranks get the same table. A file that can't be used is measured anew, with a
    warning; one that can't be written too.

    Args:
        cache_dir: where the file lies; `~` is the user's home. Made where it is missing.
        refresh: measure although there is a file, and replace it.
    """
    path = cache_file("allreduce", sorted(Counter(comm.memory.nodes).values()), comm.trace.library, folder=cache_dir)
    names = candidates(comm)
    kept = comm.gather(_read(path, names) if comm.rank == 0 and not refresh else "")[0]
    if kept:
        return TimingTable.model_validate_json(kept)
    table = measure_table(comm, algorithms=names)
    if comm.rank == 0:
        keep(path, table.model_dump_json(indent=1), "the table of all-reduce times")
    return table


def _read(path: Path, names: list[str]) -> str:
    """Return the file's text if it is a table of these algorithms; empty if there is none."""
    if not path.exists():
        return ""
    try:
        text = path.read_text()
        table = TimingTable.model_validate_json(text)
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        warnings.warn(f"{path} is not a table of all-reduce times ({reason}); measuring anew.", stacklevel=4)
        return ""
    return text if sorted(table.seconds) == sorted(names) else ""  # other algorithms can run now: out of date
