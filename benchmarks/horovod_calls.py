"""The time of what scripts written for Horovod do, on hpcdist and on Horovod."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import runner
from benchmarks.runner import Row, Side, beside, check, table, timed, warm_up
from hpcdist import hvd
from hpcdist.collectives.tuning.timing import calls_within

if TYPE_CHECKING:  # it starts MPI
    from hpcdist.comm.mpi.communicator import MpiCommunicator

SIZES = tuple(4 << exponent for exponent in range(10, 25, 2))  # 4 KiB to 64 MiB
TENSORS, ELEMENTS = 160, 1000  # of the small ones that are under way at the same time
NETWORKS, BATCH = ((100, 300, 200, 10), (1000, 2000, 2000, 2000, 10)), 16  # of 93 thousand and 10 million parameters
OURS, HOROVOD, ALONE = "hpcdist", "horovod", "alone"
CALLS_S, MOST_CALLS, WARM_UP = 20e-3, 200, 3
COLUMNS = ("call", "name", "bytes", "ranks", "median_s", "speedup", "over_alone")

Call = Callable[[], object]


def measure(comm: MpiCommunicator, sizes: Sequence[int] = SIZES, rounds: int = 15, steps: bool = True) -> list[Row]:
    """Collective. Time all-reduces of one tensor, of many small ones, and steps of DistributedOptimizer.

    Horovod runs during its own timings alone, as its thread is at work all the time.

    Args:
        steps: whether steps are timed, too.

    Returns:
        Rows with speedup (over Horovod), and for steps over_alone: the time as a multiple of that of a step of one rank
        alone.

    Raises:
        ConfigError: Horovod is not built here.
    """
    from hpcdist.comm.external import horovod  # starts MPI: not at import

    check(comm, rounds, sizes_bytes=sizes, ranks=2)
    horovod.load()

    @contextmanager
    def theirs() -> Iterator[Any]:
        running, _ = horovod.join(comm, horovod.Tuning.of(None, None))
        yield running.hvd
        horovod.release()

    sides = {OURS: lambda: nullcontext(hvd), HOROVOD: theirs}
    hvd.init()
    rows: list[Row] = []
    for n_bytes in sizes:
        rows += _timed(comm, "allreduce", n_bytes, _allreduce(n_bytes), sides, rounds)
    rows += _timed(comm, f"{TENSORS} tensors", 4 * TENSORS * ELEMENTS, _many, sides, rounds)
    for widths in NETWORKS if steps else ():
        n_bytes = runner.perceptron_bytes(widths)
        made = _timed(comm, "step", n_bytes, _step(widths), {**sides, ALONE: nullcontext}, rounds)
        rows += beside(made, [ALONE], over_alone="multiple")
    hvd.shutdown()
    return table(rows, COLUMNS)


def _timed(
    comm: MpiCommunicator, call: str, n_bytes: int, make: Callable[[Any], Call], sides: dict[str, Any], rounds: int
) -> list[Row]:
    def run_on(side: Any) -> Callable[[int], float]:
        def run(steps: int) -> float:
            with side() as module:
                made = make(module)
                for _ in range(WARM_UP):
                    made()
                comm.barrier()
                return timed(comm, made)(steps)

        return run

    made = [Side(name, run_on(side), {"call": call, "bytes": n_bytes}) for name, side in sides.items()]
    steps = calls_within(CALLS_S, warm_up(comm, made, 1, 8), MOST_CALLS)
    return beside(runner.measure(comm, made, rounds, steps), [HOROVOD], speedup="speedup")


def _allreduce(n_bytes: int) -> Callable[[Any], Call]:
    def make(module: Any) -> Call:
        tensor = torch.ones(n_bytes // 4)
        return lambda: module.allreduce_(tensor, name="one")

    return make


def _many(module: Any) -> Call:
    tensors = {f"small {number}": torch.ones(ELEMENTS) for number in range(TENSORS)}

    def call() -> None:
        for handle in [module.allreduce_async_(tensor, name=name) for name, tensor in tensors.items()]:
            module.synchronize(handle)

    return call


def _step(widths: Sequence[int]) -> Callable[[Any], Call]:
    def make(module: Any) -> Call:
        torch.manual_seed(0)
        net, batch = runner.perceptron(widths), torch.randn(BATCH, widths[0])
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.01)
        if module is not None:
            optimizer = module.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
        return runner.training_step(net, optimizer, batch)

    return make
