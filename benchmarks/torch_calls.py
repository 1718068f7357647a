"""The time of torch.distributed's calls, and of steps that stand on them, on the backend hpcdist and on gloo."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import collectives, runner
from benchmarks.collectives import SIZES, own_call, tensors, torch_call
from benchmarks.runner import Row, Side, beside, check, table, timed, warm_up
from hpcdist.collectives.calls import Collectives
from hpcdist.collectives.tuning.timing import calls_within
from hpcdist.torch_backend.default_group import default_group
from hpcdist.torch_backend.group import MpiGroup

CALLS = (*collectives.CALLS, "send")
WIDTHS, BATCH = (1000, 2000, 2000, 10), 16  # of the network of the steps: 6 million parameters
CALLS_S, MOST_CALLS = 4e-3, 200  # one timing covers as many calls as take about this long together
OURS, GLOO, BELOW, ALONE = "hpcdist", "gloo", "communicator", "alone"
COLUMNS = ("call", "name", "bytes", "ranks", "median_s", "speedup", "over_below")


def measure(
    comm: Any, calls: Sequence[str] = CALLS, sizes: Sequence[int] = SIZES, rounds: int = 15, steps: bool = True
) -> list[Row]:
    """Collective. Time calls on float32 tensors, and steps of DistributedDataParallel and FSDP2.

    Args:
        calls: of CALLS; send: a message from rank 0 to rank 1, and back.
        sizes: of the longer of a call's tensors.
        steps: whether steps are timed, too.

    Returns:
        Rows with speedup (over gloo) and over_below: the time as a multiple of that of hpcdist's own call, and for
        steps of a step of one rank alone.
    """
    check(comm, rounds, sizes_bytes=sizes, ranks=2)
    rows: list[Row] = []
    with _groups(comm) as (ours, gloo):
        own = Collectives(comm)
        for call, n_bytes in itertools.product(calls, sizes):
            groups = {OURS: ours, GLOO: gloo}
            if call == "send":
                sides = {name: _there_and_back(n_bytes, comm.rank, comm.size, of) for name, of in groups.items()}
            else:
                sides = {name: torch_call(call, *tensors(n_bytes, comm.size), of) for name, of in groups.items()}
                sides[BELOW] = own_call(own, call, *tensors(n_bytes, comm.size))
            rows += _timed(comm, call, n_bytes, sides, rounds, BELOW)
        own.close()
        for kind, wrap in {"ddp": _ddp, "fsdp2": _fsdp2}.items() if steps else ():
            sides = {OURS: _step(wrap, ours), GLOO: _step(wrap, gloo), ALONE: _step(None, None)}
            rows += _timed(comm, kind, runner.perceptron_bytes(WIDTHS), sides, rounds, ALONE)
    return table(rows, COLUMNS)


@contextmanager
def _groups(comm: Any) -> Iterator[tuple[Any, Any]]:
    """Collective. Give a group on each of the two backends."""
    with default_group(comm, "gloo"):
        ours = dist.new_group(backend="hpcdist")
        yield ours, dist.group.WORLD
        if isinstance(ours, MpiGroup):
            dist.destroy_process_group(ours)


def _timed(
    comm: Any, call: str, n_bytes: int, sides: dict[str, Callable[[], object]], rounds: int, below: str
) -> list[Row]:
    made = [Side(name, timed(comm, side), {"call": call, "bytes": n_bytes}) for name, side in sides.items()]
    steps = calls_within(CALLS_S, warm_up(comm, made, 1, 8), MOST_CALLS)
    rows = beside(runner.measure(comm, made, rounds, steps), [GLOO], speedup="speedup")
    return beside(rows, [below], over_below="multiple") if below in sides else rows


def _there_and_back(n_bytes: int, rank: int, ranks: int, group: Any) -> Callable[[], object]:
    """Return a message from rank 0 to rank 1, and back."""
    whole, *_ = tensors(n_bytes, ranks)

    def pass_on() -> None:
        if rank == 0:
            dist.send(whole, 1, group=group)
            dist.recv(whole, 1, group=group)
        elif rank == 1:
            dist.recv(whole, 0, group=group)
            dist.send(whole, 0, group=group)

    return pass_on


def _step(wrap: Callable[[nn.Module, Any], nn.Module] | None, group: Any) -> Callable[[], object]:
    """Return a training step of a network that is spread over a group's ranks; or of one rank alone."""
    torch.manual_seed(0)
    net: nn.Module = runner.perceptron(WIDTHS)
    net = net if wrap is None else wrap(net, group)
    optimizer, batch = torch.optim.SGD(net.parameters(), lr=0.01), torch.randn(BATCH, WIDTHS[0])
    return runner.training_step(net, optimizer, batch)


def _ddp(net: nn.Module, group: Any) -> nn.Module:
    return DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=True)


def _fsdp2(net: nn.Module, group: Any) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard  # seconds to import

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in [*(child for child in net.children() if list(child.parameters())), net]:
        fully_shard(layer, mesh=mesh)
    return net
