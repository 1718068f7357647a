"""Bind each rank to separate cores if neither the launcher nor the user has bound it.

The kernel often keeps two ranks that wait for each other on one core while another core idles. Open MPI does not bind
with `:oversubscribe`, and MPICH's mpiexec and srun often don't either.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import torch

PROCESSORS = Path("/sys/devices/system/cpu")


def find_share(rank: int, ranks: int) -> tuple[set[int], int]:
    """Return the processors for local rank `rank` of `ranks` on this node, and the number of torch's threads on them.

    The set is empty if the rank must keep its affinity mask: the mask is not the whole machine (the rank is bound, or
    in a container); the rank sees a GPU, and should run close to it; or there are fewer cores than ranks or than
    torch's threads.
    """
    if ranks == 1 or not hasattr(os, "sched_setaffinity") or torch.cuda.device_count() or torch.xpu.is_available():
        return set(), 0
    mask, threads = os.sched_getaffinity(0), torch.get_num_threads()
    cores = whole_cores(mask)
    cores_per_rank = len(cores) // ranks
    share = {processor for core in cores[rank * cores_per_rank : (rank + 1) * cores_per_rank] for processor in core}
    if threads in (len(cores), len(mask)):  # torch's default, counted for the whole machine at import
        threads = cores_per_rank
    is_whole = len(mask) == os.sysconf("SC_NPROCESSORS_ONLN")
    return (share, threads) if is_whole and threads <= len(share) else (set(), 0)


def whole_cores(mask: Collection[int], folder: Path = PROCESSORS) -> list[list[int]]:
    """Return the processors of each core, ordered by socket; each processor is a core if Linux reports no topology."""
    cores: dict[tuple[int, str], list[int]] = {}
    for processor in sorted(mask):
        topology, key = folder / f"cpu{processor}" / "topology", (0, str(processor))
        with suppress(OSError, ValueError):
            key = int((topology / "physical_package_id").read_text()), (topology / "thread_siblings_list").read_text()
        cores.setdefault(key, []).append(processor)
    return [core for _, core in sorted(cores.items(), key=lambda item: item[0][0])]


def bind(share: Collection[int], threads: int) -> None:
    """Bind this thread, and the threads it starts from now on, to these processors."""
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setaffinity(0, share)
        torch.set_num_threads(threads)
