"""The strategy allreduce by other libraries: the same training, and what makes no sense is refused."""

from __future__ import annotations

import copy

import pytest
import torch

import hpcdist as hd
from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.external.torch_distributed import ProcessGroup, rendezvous
from hpcdist.comm.network import LOOPBACK
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.settings import describe
from hpcdist.errors import ConfigError, NonFiniteError, UnknownNameError
from hpcdist.model.flat import FlatModel
from strategies import problem

pytestmark = pytest.mark.computes

REAL = [pytest.mark.mpi, pytest.mark.time_limit(600)]
PROVIDERS = [pytest.param("gloo", id="gloo"), pytest.param("horovod", id="horovod")]


@pytest.fixture
def provider(request):
    """gloo, which torch always has, or Horovod where it is installed."""
    if request.param == "horovod":
        request.getfixturevalue("horovod")
    return request.param


def by_each(test):
    for mark in REAL:
        test = mark(test)
    return pytest.mark.parametrize("provider", PROVIDERS, indirect=True)(test)


# --- the same training ------------------------------------------------------------------------------------------------
@by_each
@each("overlap", ["off", "on", "auto"])
@pytest.mark.sizes(4)
def test_it_equals_one_process_with_the_global_batch(ranks, provider, overlap):
    options = {"provider": provider, "overlap": overlap}
    runs = ranks(lambda comm: problem.train(comm, "allreduce", options, epochs=2))
    (expected,) = problem.serial(len(runs), epochs=2)
    for run in runs:
        assert torch.equal(run.params[0], runs[0].params[0]), "replicas drifted apart"
        torch.testing.assert_close(run.params[0], expected, rtol=0, atol=1e-12)
    if len(runs) > 1:
        assert all(sum(record.bytes_sent for record in run.records) > 0 for run in runs)


@by_each
@each("overlap", ["off", "on"])
@pytest.mark.sizes(3)
def test_gradients_accumulate_in_several_buckets(ranks, provider, overlap):
    def body(comm):
        module = problem.model()
        local = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        cls = strategies.load("allreduce")
        config = cls.Config(accumulation=3, overlap=overlap, provider=provider)
        strategy = cls(config, comm.split(0), FlatModel(module, first_bucket_bytes=64, bucket_bytes=128))
        assert len(strategy.model.gradients.buckets) > 2
        for step in range(3):
            local.zero_grad()
            for part in range(3):
                first = ((step * 3 + part) * comm.size + comm.rank) * 3
                (problem.loss(module, range(first, first + 3)) / 3).backward()
            strategy.step(local.step)
        strategy.close()
        return strategy.model.params[0].clone()

    found = ranks(body)
    module = problem.model()
    local = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    width = 9 * len(found)
    for step in range(3):
        local.zero_grad()
        problem.loss(module, range(step * width, (step + 1) * width)).backward()
        local.step()
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    for params in found:
        torch.testing.assert_close(params, expected, rtol=0, atol=1e-12)


@by_each
@each("overlap", ["off", "on"])
@pytest.mark.sizes(2)
def test_what_is_not_finite_is_left_out_or_ends_the_run(ranks, provider, overlap):
    def body(comm):
        module = problem.model()
        given = {"provider": provider, "overlap": overlap}
        made = [
            problem.make(comm, "allreduce", copy.deepcopy(module), on_nonfinite=what, **given)
            for what in ("skip", "stop")
        ]
        events = []
        for strategy in made:
            local = torch.optim.SGD(strategy.model.module.parameters(), lr=0.1)
            for step in range(3):
                local.zero_grad()
                loss = problem.loss(strategy.model.module, range(8))
                (loss * float("nan") if step == 1 and comm.rank == comm.size - 1 else loss).backward()
                if step == 1 and strategy is made[1]:
                    with pytest.raises(NonFiniteError, match=f"gradient at step 2, rank {comm.size - 1}: 0.weight"):
                        strategy.step(local.step)
                    break
                events.append(strategy.step(local.step).event)
        for strategy in made:
            strategy.close()
        return events, made[0].model.params[0].clone()

    for events, params in ranks(body):
        assert [bool(event) for event in events] == [False, True, False, False]
        assert torch.isfinite(params).all()


@pytest.mark.mpi
@pytest.mark.time_limit(600)
@pytest.mark.usefixtures("horovod")
@pytest.mark.sizes(4)
def test_horovods_own_options(ranks):
    """Half precision and Adasum learn too; a sum is so many times the mean."""

    def body(comm):
        params = []
        for options in ({"compression": "fp16"}, {"op": "adasum"}, {"op": "sum"}, {"fusion_mb": 1}):
            given = {"provider": {"name": "horovod", **options}}
            params += problem.train(comm, "allreduce", given, optimizer="sgd").params
        return params

    found = ranks(body)
    for params in zip(*found, strict=True):
        assert all(torch.equal(one, params[0]) for one in params), "replicas drifted apart"
    half, adasum, total, fused = found[0]
    (mean,) = problem.serial(len(found), optimizer="sgd")
    torch.testing.assert_close(fused, mean, rtol=0, atol=1e-12)
    assert 0 < (half - mean).abs().max() < 1e-2
    start = problem.model()
    first = problem.loss(start, range(problem.SAMPLES)).item()
    for params in (adasum, total):
        assert (params - mean).abs().max() > 1e-3, "another mathematics"
        module = problem.model()
        problem.load(module, [params])
        assert problem.loss(module, range(problem.SAMPLES)).item() < 0.9 * first


@pytest.mark.mpi
@pytest.mark.time_limit(600)
@pytest.mark.usefixtures("horovod")
@pytest.mark.sizes(4)
def test_adasum_is_taken_of_each_parameter(ranks):
    """With orthogonal gradients in one parameter and equal ones in another: added there, averaged here."""

    def body(comm):
        module = torch.nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(4)})
        strategy = problem.make(comm, "allreduce", module, provider={"name": "horovod", "op": "adasum"}, overlap="off")
        loss = module["a"][comm.rank] + module["b"].sum()
        loss.backward()
        strategy.step(torch.optim.SGD(module.parameters(), lr=1.0).step)
        strategy.close()
        return [module[name].tolist() for name in "ab"]

    for a, b in ranks(body):
        assert a == [-1] * 4 and b == [pytest.approx(-1)] * 4


# --- meeting without an address --------------------------------------------------------------------------------------
@pytest.mark.mpi
@pytest.mark.sizes(3)
def test_ranks_of_one_host_meet_by_loopback(ranks):
    def body(comm):
        point = rendezvous(comm)
        point.store.set(f"rank {comm.rank}", str(comm.rank))
        comm.barrier()
        told = [point.store.get(f"rank {rank}").decode() for rank in range(comm.size)]
        comm.barrier()
        return point.address, told

    found = ranks(body)
    assert found == [(LOOPBACK, [str(rank) for rank in range(len(found))])] * len(found)


@pytest.mark.mpi
@pytest.mark.sizes(2)
def test_ranks_of_several_hosts_never_meet_by_loopback(ranks, monkeypatch):
    """Hosts that only say that they are others: their addresses are this one's, or there is none."""
    from hpcdist.comm.external import torch_distributed
    from hpcdist.errors import CommunicationError

    def body(comm):
        monkeypatch.setattr(torch_distributed, "stack_id", lambda: f"host of rank {comm.rank}")
        if not all(comm.gather(b"yes" if torch_distributed.addresses() else b"")):
            with pytest.raises(CommunicationError, match="rank 0 must be reached by all ranks over TCP; rank 1 got no"):
                rendezvous(comm)
            return True
        point = rendezvous(comm)
        assert point.address != LOOPBACK
        comm.barrier()
        with pytest.raises(UnknownNameError, match="interface or network of this host must be one of .*; got 'nope0'"):
            rendezvous(comm, "nope0")
        monkeypatch.setattr(torch_distributed, "addresses", lambda chosen="": [])
        with pytest.raises(CommunicationError, match="rank 1 got no answer from port .* has none but loopback"):
            rendezvous(comm)
        return True

    assert all(ranks(body))


@pytest.mark.mpi
@pytest.mark.sizes(4)
def test_gloo_sums_on_groups_and_refuses_what_it_can_not(ranks):
    def body(comm):
        half = comm.split(comm.rank % 2)
        everyone, own = ProcessGroup(comm, "gloo"), ProcessGroup(half, "gloo")
        tensors = [torch.full((5,), comm.rank + 1.0) for _ in range(2)]
        everyone.all_reduce(tensors[0])
        own.all_reduce(tensors[1])
        with pytest.raises(RuntimeError, match="an all-reduce by Gloo failed on rank .*"):
            own.all_reduce(torch.zeros(3, dtype=torch.int16))
        for group in (own, everyone):
            group.close()
        half.close()
        return [int(t[0]) for t in tensors]

    found = ranks(body)
    size = len(found)
    for rank, result in enumerate(found):
        assert result == [size * (size + 1) // 2, sum(r + 1 for r in range(rank % 2, size, 2))]


@pytest.mark.mpi
@pytest.mark.sizes(2)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_gpus_is_one_clear_error(ranks):
    def body(comm):
        with pytest.raises(ConfigError, match="NCCL must have a GPU on every rank; rank 0 has none: .*. Use provider"):
            problem.train(comm, "allreduce", {"provider": "nccl"})
        return True

    assert all(ranks(body))


# --- what is refused --------------------------------------------------------------------------------------------------
REFUSED = [
    ({"algorithm": "ring", "provider": "horovod"}, "strategy.algorithm must be auto with strategy.provider = "),
    ({"compression": "topk", "provider": "gloo"}, "strategy.compression must be none with strategy.provider = "),
    ({"provider": "mpi"}, "provider.name must be 'hpcdist', 'horovod', 'nccl' or 'gloo'; got 'mpi'"),
    ({"provider": {"name": "nccl", "op": "adasum"}}, "provider.op must be omitted with nccl, .*; got adasum"),
    ({"provider": {"name": "horovod", "interface": "ib0"}}, "strategy.provider.interface must be omitted with"),
    ({"provider": {"name": "hpcdist", "cycle_time_ms": 1.0}}, "provider.cycle_time_ms must be omitted with"),
    ({"provider": {"name": "horovod", "cycle_time_ms": 0.0}}, "cycle_time_ms must be greater than 0; got 0"),
    ({"provider": {"name": "horovod", "op": "max"}}, "provider.op must be 'average', 'sum' or 'adasum'; got 'max'"),
    ({"provider": {"name": "horovod", "fusion": 1}}, "provider setting must be one of .*fusion_mb.*; got 'fusion'"),
]


@each("case", REFUSED)
def test_what_makes_no_sense_is_refused(case):
    options, message = case
    with pytest.raises(ConfigError, match=message):
        strategies.load("allreduce").Config(**options)


def test_virtual_ranks_know_no_other_library():
    for name in ("horovod", "nccl", "gloo"):
        with pytest.raises(ConfigError, match=f"strategy.provider must be hpcdist on virtual ranks, .*; got {name}. L"):
            run_virtual(lambda comm, name=name: problem.train(comm, "allreduce", {"provider": name}), 2)


def test_its_options_are_listed():
    keys = {option.key: option for option in describe(strategies.load("allreduce").Config, "strategy")}
    assert keys["strategy.provider.name"].default == "'hpcdist'"
    assert {"op", "compression", "fusion_mb", "cycle_time_ms"} <= {key.rpartition(".")[2] for key in keys}
    assert all(option.description for option in keys.values())


def test_an_optimiser_with_line_searches_needs_the_mean_itself():
    def body(comm):
        hd.init(comm=comm)
        module = problem.model()
        message = "strategy.provider must give the mean of gradients with LBFGS, .*; got"
        for provider in ({"op": "adasum"}, {"compression": "fp16"}, {"op": "sum"}):
            with pytest.raises(ConfigError, match=message):
                optimizer = torch.optim.LBFGS(module.parameters())
                hd.DistributedOptimizer(optimizer, module, provider={"name": "horovod", **provider})

    run_virtual(body, 2)
