"""The user's own loop, as the README shows it."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd
from comm.jobs_here import python_alone, write
from harness.cases import each
from hpcdist.comm.launch import check_world, contradiction, launched_size, unlaunched
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.merge import by_value
from hpcdist.errors import ConfigError, MismatchError, WorldError
from hpcdist.model.flat import FlatModel
from strategies import problem

every = pytest.mark.parametrize("name", problem.stepping())
N = 101


def _data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 5, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True), torch.arange(N))


def _loop(comm, name, epochs=3, loader=None, **options):
    """The README's loop; returns the samples seen in each epoch, and the model."""
    hd.init(comm=comm)
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1)
    optimizer = problem.local(name, model.parameters(), lr=0.05)
    options = problem.PERIODS.get(name, {}) | problem.fitting(name, comm.size) | options
    optimizer = hd.DistributedOptimizer(optimizer, model, strategy=name, **options)
    loader = hd.shard(loader or DataLoader(_data(), batch_size=4, shuffle=True))
    seen, steps = [], 0
    for _ in range(epochs):
        seen.append([])
        steps = 0
        for x, y, index in loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            seen[-1] += index.tolist() if loader.weight else []
            steps += 1
    strategy = optimizer.strategy
    params, _ = strategy.consensus()
    length = len(loader)
    strategy.close()
    return seen, params[0], length, steps if strategy.is_worker else length


@every
@pytest.mark.sizes(3)
def test_the_same_loop_runs_every_strategy_and_sees_each_sample_once(ranks, name):
    found = ranks(lambda comm: _loop(comm, name))
    for epoch in range(3):
        raise_on_all_ranks = sorted(i for seen, *_ in found for i in seen[epoch])
        assert raise_on_all_ranks == list(range(N)), "not every sample exactly once"
    orders = [[i for seen, *_ in found for i in seen[epoch]] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2], "epochs are shuffled alike"
    assert all(torch.equal(params, found[0][1]) for _, params, *_ in found), "consensus must be the same on all ranks"
    torch.manual_seed(0)
    start = FlatModel(torch.nn.Linear(5, 1)).params[0]
    answer = torch.tensor([1.0] * 5 + [0.0])
    nearer = 1 if ranks.real else 0.6  # a real rank may be done before others begin, and have averaged with their start
    assert (found[0][1] - answer).norm() < nearer * (start - answer).norm(), "training must come nearer to the solution"
    lengths = [(length, steps) for *_, length, steps in found]
    assert {steps for _, steps in lengths} == {lengths[0][0]} == {length for length, _ in lengths}, (
        f"each rank must take len(loader) steps in an epoch, all the same number; got (length, steps) {lengths}"
    )


@pytest.mark.sizes(3)
def test_an_evaluation_is_shared_without_an_optimiser(ranks):
    def body(comm):
        hd.init(comm=comm)
        return [i for *_, index in hd.shard(DataLoader(_data(), batch_size=8), training=False) for i in index.tolist()]

    assert sorted(i for part in ranks(body) for i in part) == list(range(N))


@pytest.mark.sizes(2)
@each("drop_last", [False, True])
def test_an_epoch_that_is_resumed_has_the_rest_of_its_steps(ranks, drop_last):
    def body(comm):
        hd.init(comm=comm)
        optimizer, model = _optimizer()
        hd.DistributedOptimizer(optimizer, model)
        loader = hd.shard(DataLoader(_data(), batch_size=2, drop_last=drop_last))
        assert loader.next_epoch == 0
        loader.load_state_dict({"epoch": 3, "consumed": N})
        assert loader.next_epoch == 4, "nothing is left of epoch 3"
        loader.load_state_dict({"epoch": 3, "consumed": 2 * 2 * comm.size})
        assert loader.next_epoch == 3
        steps = 0
        for x, *_ in loader:
            optimizer.zero_grad()
            model(torch.ones(len(x), 2)).mean().backward()
            optimizer.step()
            steps += 1
        assert loader.next_epoch == 4
        return steps, len(loader)

    assert all(steps == length - 2 for steps, length in ranks(body))


@pytest.mark.sizes(3)
def test_broadcast_of_tensors_modules_and_values(ranks):
    def body(comm):
        hd.init(comm=comm)
        root = comm.size - 1
        tensor = torch.full((2, 3), float(comm.rank)).t()
        module = torch.nn.BatchNorm1d(2)
        module.running_mean.fill_(comm.rank)
        assert hd.broadcast(tensor, root) is tensor
        hd.broadcast(module, root)
        hd.broadcast(module.state_dict(), root)
        value = hd.broadcast({"range": (1, comm.rank), 7: None, "set": {comm.rank}, "inf": math.inf}, root)
        return tensor.unique().tolist(), module.running_mean.tolist(), value, (hd.rank(), hd.size(), hd.local_rank())

    found = ranks(body)
    last = len(found) - 1
    for rank, (tensor, mean, value, who) in enumerate(found):
        assert (tensor, mean) == ([last], [last, last])
        assert value == {"range": (1, last), 7: None, "set": {last}, "inf": math.inf}
        assert who[:2] == (rank, len(found)) and 0 <= who[2] <= rank


def _optimizer():
    model = torch.nn.Linear(2, 1)
    return torch.optim.SGD(model.parameters(), lr=0.1), model


@pytest.mark.sizes(2)
def test_different_options_are_refused_on_all_ranks(ranks):
    def body(comm):
        hd.init(comm=comm)
        optimizer, model = _optimizer()
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + comm.rank)
        with pytest.raises(MismatchError, match=r"strategy and optimiser must be the same on every rank; rank 1 .*lr"):
            hd.DistributedOptimizer(optimizer, model)
        return True

    assert all(ranks(body))


def decay(group):
    return group


class Shape:
    pass


# What each rank makes for itself, all alike: in two processes reprs differ in addresses, and sets in their order.
OF_EACH_RANK = {
    "function": lambda: decay,
    "lambda": lambda: lambda group: group,
    "partial": lambda: functools.partial(decay, 1),
    "object": lambda: Shape(),
    "method": lambda: torch.nn.Linear(1, 1).forward,
    "list": lambda: [Shape(), {"by": decay, 1: {(2, decay): {"b", "a"}}}],
    "class": lambda: Shape,
    "tensor": lambda: torch.tensor([0.1, 0.2]),
    "array": lambda: np.arange(3),
    "nan": lambda: [math.nan, {"at": torch.tensor(math.nan)}],
    "long": lambda: torch.arange(10_000.0),
    "generator": lambda: torch.Generator(),
}


@pytest.mark.sizes(2)
def test_param_groups_hold_functions_and_objects(ranks):
    def body(comm, make):
        hd.init(comm=comm)
        optimizer, model = _optimizer()
        optimizer.param_groups[0]["shape"] = make()
        hd.finish(hd.DistributedOptimizer(optimizer, model).strategy.model.module)
        return True

    for make in OF_EACH_RANK.values():
        assert all(ranks(lambda comm, make=make: body(comm, make)))
    for one, other in ((lambda: decay, lambda: Shape), (lambda: torch.zeros(2), lambda: torch.ones(2))):
        with pytest.raises(MismatchError, match=r"strategy and optimiser must be the same on every rank; .*shape"):
            ranks(lambda comm, makes=(one, other): body(comm, makes[comm.rank]))


def test_settings_are_compared_by_their_values():
    parts = [{"b", "a", decay}, torch.tensor(0.1), functools.partial(decay, 1), decay]
    found = by_value(parts)
    assert found[0] == ["a", "b", f"{__name__}.decay"] and found[1] == pytest.approx(0.1)
    assert " at 0x" not in str(found) and found[3] == f"{__name__}.decay"


@each("strategy", ["allreduce", "hardsync colocated"])
def test_sums_add_up_and_weights_hold_in_a_loop_without_a_loader(strategy):
    """Ranks have 1, 2 and 3 of the numbers 0 to 5."""

    def slope(comm, loss):
        hd.init(comm=comm)
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        name, *servers = strategy.split()
        options = {"strategy": name, "loss": loss, **({"servers": servers[0]} if servers else {})}
        optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, **options)
        rows = torch.arange(6.0).reshape(6, 1).split([1, 2, 3])[comm.rank]
        if loss == "mean":
            optimizer.set_batch_weight(len(rows))
        getattr(model(rows), loss)().backward()
        optimizer.step()
        return round(model.weight.item(), 5)

    for loss, gradient in (("sum", 15.0), ("mean", 2.5)):
        assert run_virtual(lambda comm, loss=loss: slope(comm, loss), 3) == [1 - gradient] * 3


@each("strategy", [("allreduce", {}), ("hardsync", {}), ("softsync", {"servers": 2})])
@each("asks_before", [False, True])
def test_one_rank_that_trains_is_the_main_one(strategy, asks_before):
    """Asked for before rank 0 is known to serve, it is refused: what rank 0 has opened no other rank can write to."""
    name, options = strategy

    def body(comm):
        hd.init(comm=comm)
        before = hd.is_main() if asks_before else None
        model = torch.nn.Linear(5, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        optimizer = hd.DistributedOptimizer(optimizer, model, strategy=name, **options)
        written = []
        for x, y, _ in hd.shard(DataLoader(_data(), batch_size=25)):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            written += [hd.is_main()]
        hd.finish(model)
        return before, set(written), hd.is_main()

    servers = 0 if name == "allreduce" else options.get("servers", 1)
    if asks_before and servers:
        with pytest.raises(ConfigError, match=r"is_main\(\) must be called after hpcdist.DistributedOptimizer with"):
            run_virtual(body, 4)
        return
    first = [rank == servers for rank in range(4)]
    before, written, after = zip(*run_virtual(body, 4))
    assert before == ((True, False, False, False) if asks_before else (None,) * 4)
    assert list(after) == first
    assert list(written) == [{main} if rank >= servers else set() for rank, main in enumerate(first)]


def test_the_package_has_no_other_names():
    with pytest.raises(AttributeError, match="module 'hpcdist' has no attribute 'DistributedOptimiser'"):
        hd.DistributedOptimiser  # noqa: B018


# --- worlds -----------------------------------------------------------------------------------------------------------
DECLARED = [
    ({}, None),
    ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, 4),
    ({"PMI_SIZE": "3"}, 3),
    ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "16"}, 8),
    ({"SLURM_NTASKS": "16"}, None),
    ({"PMI_SIZE": "many"}, None),
]


@each("case", DECLARED)
def test_what_the_launcher_declared(case):
    environ, declared = case
    found = launched_size(environ)
    assert (found and found[0]) == declared
    check_world(declared or 5, "Open MPI", environ)
    if declared:
        with pytest.raises(WorldError, match=f"must be the launcher's, {declared} .*; got 1 with Open MPI"):
            check_world(1, "Open MPI", environ)
        shell = f"shell of `srun --pty`: .*`srun -n 1 --pty bash`.* unset {next(iter(environ))}"
        with pytest.raises(WorldError, match=shell):
            check_world(1, "Open MPI", environ | {"SLURM_PTY_PORT": "1"})


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
IN_A_STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}


LAUNCHERS = [
    (TORCHRUN, "torchrun, accelerate launch or their like"),
    (TORCHRUN | IN_A_STEP, "torchrun, accelerate launch or their like"),
    ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "horovodrun"),
    ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"}, "Flux"),
    ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"}, "jsrun"),
    ({"PALS_RANKID": "0", "PMI_SIZE": "2", "PALS_LOCAL_RANKID": "0"}, "PALS's mpiexec"),
    ({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "2"}, "PALS's mpiexec"),
]


@each("case", LAUNCHERS)
def test_launchers_that_start_worlds_of_one_are_named(case):
    environ, launcher = case
    assert contradiction(1, environ) == (2, launcher)
    with pytest.raises(WorldError, match=f"the launcher's, 2 .{launcher}.; got 1 .*`mpirun -n 2 python "):
        check_world(1, "Open MPI", environ)
    assert contradiction(1, unlaunched(environ)) is None


def test_variables_of_torchrun_count_together_and_where_mpi_has_no_ranks():
    for environ in ({"WORLD_SIZE": "2"}, {"RANK": "1"}, TORCHRUN | {"WORLD_SIZE": "1"}):
        check_world(1, "Open MPI", environ)
    check_world(4, "Open MPI", {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"} | TORCHRUN)
    # What init sets is left out of a new job's environment.
    assert unlaunched(TORCHRUN | {"RANKS": "4", "MASTER_ADDR": "here"}) == {"RANKS": "4"}


def test_before_init_processes_of_multiprocessing_and_torchrun(tmp_path):
    """These processes are no ranks of one job, which a warning says, or an error with the line to type."""
    script = write(
        tmp_path,
        """
        import multiprocessing, os
        import hpcdist as hd
        from hpcdist.errors import ConfigError

        def train():
            hd.init()
            print("trained", hd.size(), flush=True)

        process = multiprocessing.get_context("fork").Process(target=train)
        process.start()
        process.join()
        try:
            hd.rank()
        except ConfigError as error:
            print(error, flush=True)
        os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        hd.init()
        print("joined")
        """,
    )
    done = python_alone(tmp_path, script, "--epochs", "3")
    assert "trained 1" in done.stdout and "found one rank in ForkProcess-" in done.stderr
    assert "hpcdist.init() must be called before this" in done.stdout
    assert done.returncode != 0 and "joined" not in done.stdout
    assert f"Run `mpirun -n 2 python {script} --epochs 3`" in done.stderr
