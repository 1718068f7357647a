"""How much memory a rank needs with a strategy, as a multiple of the bytes of the parameters: the table of
docs/out-of-memory.md.

    MALLOC_MMAP_THRESHOLD_=1048576 mpirun -n 4 python jobs/studies/memory.py gossip_pull
    ... --set period=4 --adam      # an option of the strategy; Adam in place of SGD with momentum

The model has 24 linear layers, 138 MB; a batch is so small that activations hardly count. Measured is the rise of the
proportional set size, in which memory that several processes map counts in parts, from before the model to its highest
value after a step. `none` is plain PyTorch.
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


def resident() -> int:
    """Return this process's proportional set size in bytes."""
    found = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * next(int(line.split()[1]) for line in found.splitlines() if line.startswith("Pss:"))


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def main(
    strategy: str,
    options: Annotated[list[str] | None, typer.Option("--set", help="Option of the strategy.")] = None,
    adam: Annotated[bool, typer.Option("--adam", help="Adam in place of SGD with momentum.")] = False,
) -> None:
    hd.init()
    torch.manual_seed(0)  # the same data on all ranks
    build()(torch.randn(BATCH, WIDTH)).sum().backward()  # what libraries take on first use is not counted
    before = highest = resident()
    model = build()
    n_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    kind: Any = torch.optim.Adam if adam else torch.optim.SGD
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
        highest = max(highest, resident())
    found = hd.allgather((max(highest, resident()) - before) / n_bytes)
    if hd.rank() == 0:
        typer.echo(f"{strategy}: {', '.join(f'{times:.2f}' for times in found)} times {n_bytes / 1e6:.0f} MB, by rank")
    hd.finish()


if __name__ == "__main__":
    typer.run(main)
