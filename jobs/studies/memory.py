"""How much memory a rank needs with a strategy, as a multiple of the bytes of the parameters: the table of
docs/out-of-memory.md.

    MALLOC_MMAP_THRESHOLD_=1048576 mpirun -n 4 python jobs/studies/memory.py gossip_pull
    ... --set period=4 --adam      # an option of the strategy; Adam in place of SGD with momentum

The model has 24 linear layers, 138 MB; a batch is so small that activations hardly count. Measured is the rise since
before the model of two values: the proportional set size, in which memory that several processes map counts in parts,
at its highest after a step; and the peak of the resident set, in which shared memory counts in every process that maps
it. `none` is plain PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import hpcdist as hd
from hpcdist.config.merge import load

WIDTH, LAYERS, BATCH, STEPS = 1200, 24, 8, 8


def proportional() -> int:
    """Return this process's proportional set size in bytes, without the libraries' files."""
    return sum(_field("smaps_rollup", name) for name in ("Pss_Anon", "Pss_Shmem"))


def _field(file: str, name: str) -> int:
    """Return a field of a file in /proc/self in bytes."""
    found = Path("/proc/self", file).read_text()
    return 1024 * next(int(line.split()[1]) for line in found.splitlines() if line.startswith(f"{name}:"))


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def main(
    strategy: str,
    options: Annotated[list[str] | None, typer.Option("--set", help="Option of the strategy.")] = None,
    adam: Annotated[bool, typer.Option("--adam", help="Adam in place of SGD with momentum.")] = False,
) -> None:
    hd.init()
    torch.manual_seed(0)  # the same data on all ranks
    kind: Any = torch.optim.Adam if adam else torch.optim.SGD
    model = nn.Linear(WIDTH, WIDTH)
    model(torch.randn(BATCH, WIDTH)).sum().backward()
    kind(model.parameters(), 1e-4).step()  # what libraries take on first use is not counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak restarts: proc(5)
    before, peak = proportional(), _field("status", "VmHWM")
    highest = before
    model = build()
    n_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    optimizer = kind(model.parameters(), 1e-4, **({} if adam else {"momentum": 0.9}))
    data = torch.utils.data.TensorDataset(torch.randn(BATCH * STEPS * hd.size(), WIDTH))
    loader = torch.utils.data.DataLoader(data, BATCH)
    if strategy != "none":
        optimizer = hd.DistributedOptimizer(optimizer, model, strategy, **load({}, None, options or []))
        loader = hd.shard(loader)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        highest = max(highest, proportional())
    highest = max(highest, proportional())  # of a server
    rises = [(highest - before) / n_bytes, (_field("status", "VmHWM") - peak) / n_bytes]
    found = zip(*hd.allgather(rises), strict=True)
    if hd.rank() == 0:
        for what, of_ranks in zip(("proportional", "resident"), found, strict=True):
            by_rank = ", ".join(f"{times:.2f}" for times in of_ranks)
            typer.echo(f"{strategy}, {what}: {by_rank} times {n_bytes / 1e6:.0f} MB, by rank")
    hd.finish()


if __name__ == "__main__":
    typer.run(main)
