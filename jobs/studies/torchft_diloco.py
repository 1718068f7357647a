"""DiLoCo beside torchft's: the same parameters? how long is a step, between two averages and in a period as a whole?

    pip install torchft==0.2.0 && mpirun -n 2 --bind-to core python jobs/studies/torchft_diloco.py    # a minute

Both train the same perceptron with AdamW (0.001) on the same batches of random numbers, with outer SGD (0.7, Nesterov
momentum 0.9), by turns, a period at a time, in the same processes. torchft's replicas are joined by gloo over TCP and
by its lighthouse, on rank 0. Its `init_sync=False`: all replicas start from the same seed.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn

import hpcdist as hd
from benchmarks.runner import perceptron
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError
from kit.output import Study, start

MODELS = {"100 k": (128, 384, 128, 10), "10 M": (1024, 2560, 2560, 384, 10)}
BATCH, BATCHES = 32, 64
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
Loop = Callable[[int], list[float]]  # the first step of a period -> seconds of each of its steps


def network(widths: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(0)  # the same on all ranks
    return perceptron(widths)


def batches(widths: tuple[int, ...], rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1 + rank)
    return [
        (torch.randn(BATCH, widths[0], generator=generator), torch.randint(10, (BATCH,), generator=generator))
        for _ in range(BATCHES)
    ]


def torchft(comm: Communicator, model: nn.Module, inner: torch.optim.Optimizer, period: int) -> ExitStack:
    """Collective. Join the replicas by torchft; the steps of `inner` inside the context are those of its DiLoCo."""
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    lighthouse = LighthouseServer("127.0.0.1:0", comm.size, join_timeout_ms=60_000) if comm.rank == 0 else None
    port = comm.gather(lighthouse and lighthouse.address().rpartition(":")[2])[0]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        min_replica_size=comm.size,
        use_async_quorum=False,
        init_sync=False,
        state_dict=model.state_dict,
        load_state_dict=model.load_state_dict,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{port}",
        replica_id=f"replica{comm.rank}",
        hostname="127.0.0.1",
    )
    stack = ExitStack()
    stack.enter_context(nullcontext(store))  # which serves as long as somebody holds it
    if lighthouse is not None:
        stack.callback(lighthouse.shutdown)
    stack.callback(manager.shutdown)
    stack.callback(comm.barrier)
    stack.enter_context(DiLoCo(manager, [model], inner, torch.optim.SGD(model.parameters(), **OUTER), period))
    return stack


def compare(comm: Communicator, widths: tuple[int, ...], period: int, periods: int) -> dict[str, Any]:
    """Collective. Train with both by turns, and make a row."""
    data, models = batches(widths, comm.rank), [network(widths) for _ in range(2)]
    inners: list[Any] = [torch.optim.AdamW(model.parameters(), 1e-3) for model in models]
    options = {"outer_lr": OUTER["lr"], "outer_momentum": OUTER["momentum"], "nesterov": OUTER["nesterov"]}
    inners[0] = hd.DistributedOptimizer(inners[0], models[0], "diloco", period=period, **options)
    contexts: list[AbstractContextManager[Any]] = [nullcontext(), torchft(comm, models[1], inners[1], period)]
    seconds: list[list[list[float]]] = [[], []]  # of each, period by period, step by step
    with contexts[1]:
        for first in range(0, periods * period, period):
            for model, inner, taken in zip(models, inners, seconds):
                comm.barrier()
                taken.append([])
                for x, y in (data[step % BATCHES] for step in range(first, first + period)):
                    began = time.perf_counter()
                    inner.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    inner.step()
                    taken[-1].append(time.perf_counter() - began)
    ours, theirs = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models)
    local = [median(one for steps in taken[1:] for one in steps[:-1]) for taken in seconds]  # after one to warm up
    outer = [median(steps[-1] for steps in taken[1:]) for taken in seconds]
    own = {
        "parameters apart": ((ours - theirs).norm() / theirs.norm()).item(),
        "local step, ms": 1e3 * local[0],
        "torchft's": 1e3 * local[1],
        "step with average, ms": 1e3 * outer[0],
        "torchft's ": 1e3 * outer[1],
    }
    return {column: max(each[column] for each in comm.gather(own)) for column in own}  # of the slowest rank


def main(
    output: Annotated[Path, typer.Option(help="Folder for the table.")] = Path("runs/torchft"),
    period: Annotated[int, typer.Option(help="Steps between two averages.")] = 20,
    periods: Annotated[int, typer.Option(help="Periods, of which the first warms up.")] = 10,
) -> None:
    """Train with both, and show what differs. Collective."""
    if importlib.util.find_spec("torchft") is None:
        raise ConfigError("the package `torchft` must be there; got none. Install it: pip install torchft==0.2.0.")
    comm = hd.init(torch_distributed=False)
    rows = [{"parameters": name, **compare(comm, widths, period, periods)} for name, widths in MODELS.items()]
    if comm.rank == 0:
        study = Study(output)
        study.write_csv("torchft.csv", study.table(f"diloco on {comm.size} ranks, {periods} periods of {period}", rows))
        study.end([])


if __name__ == "__main__":
    start(main)
