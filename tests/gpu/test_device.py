"""Models and tensors on a GPU: what they come to must be what it is on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hpcdist as hd
from compress.test_every_compressor import COUNT, gradient, make
from hpcdist import strategies
from hpcdist.comm.snapshot import Publication
from hpcdist.compress import Feedback, available
from hpcdist.model.flat import FlatModel
from strategies import problem

pytestmark = pytest.mark.gpu
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64: only the order of sums differs


def put(patch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    """Put the problem's models and samples there, until the patch ends."""
    model = problem.model
    patch.setattr(problem, "model", lambda dtype=torch.float64: model(dtype).to(gpu))
    patch.setattr(problem, "X", problem.X.to(gpu))
    patch.setattr(problem, "Y", problem.Y.to(gpu))


@pytest.fixture
def on_gpu(gpu, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    put(monkeypatch, gpu)
    return gpu


# --- strategies -------------------------------------------------------------------------------------------------------
@pytest.mark.virtual
@pytest.mark.sizes(4)
@pytest.mark.parametrize("name", strategies.available())
def test_a_strategy_does_on_a_gpu_as_on_the_cpu(ranks, name, gpu):
    """Virtual ranks take turns in one order, whatever computes."""
    expected = ranks(lambda comm: problem.train(comm, name).consensus)
    with pytest.MonkeyPatch.context() as patch:
        put(patch, gpu)
        found = ranks(lambda comm: problem.train(comm, name).consensus)
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.device.type in (gpu.type, "cpu")
            torch.testing.assert_close(a.cpu(), b, **CLOSE)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", strategies.available())
def test_a_strategy_trains_on_a_gpu_of_real_ranks(ranks, name, on_gpu):
    def body(comm):
        run = problem.train(comm, name, optimizer="sgd", epochs=4)
        return [p.cpu() for p in run.consensus]

    found = ranks(body)
    module = problem.model()
    start = problem.loss(module, range(problem.SAMPLES)).item()
    problem.load(module, found[0])
    assert problem.loss(module, range(problem.SAMPLES)).item() < start


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["allreduce", "hardsync", "gossip_sync"])
def test_a_compressed_model_on_a_gpu(ranks, name, on_gpu):
    options = {} if name == "gossip_sync" else {"compression": {"name": "topk", "ratio": 0.25}}
    found = ranks(lambda comm: [p.cpu() for p in problem.train(comm, name, options, optimizer="sgd").consensus])
    assert all(torch.equal(a, b) for mine in found for a, b in zip(mine, found[0], strict=True))


# --- compressors ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", available())
def test_a_compressor_codes_a_gpus_gradients_as_the_cpus(name, gpu):
    there, here = torch.zeros(COUNT, device=gpu), torch.zeros(COUNT)
    on, off = Feedback(make(name), there), Feedback(make(name), here)
    for step in range(4):
        grad = gradient(step, torch.float32)
        messages = on.encode(grad.to(gpu)), off.encode(grad)
        assert torch.equal(*messages), "messages are made on the host"
        on.add(messages[0], there, weight=0.5)
        off.add(messages[1], here, weight=0.5)
        torch.testing.assert_close(there.cpu(), here, rtol=1e-6, atol=1e-6)


# --- the seam ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("apart", [False, True], ids=["node", "nodes"])
@pytest.mark.mpi
def test_windows_move_device_memory(ranks, gpu, apart):
    def body(comm):
        comm = comm.apart() if apart else comm.split(0)
        window, peer = comm.window(8), (comm.rank + 1) % comm.size
        window.put(torch.full((4,), float(comm.rank), device=gpu), peer)
        comm.barrier()
        window.accumulate(torch.ones(4, device=gpu), peer, 2)
        comm.barrier()
        out = torch.empty(8, device=gpu)
        window.get(out, peer)
        window.close()
        comm.close()
        return comm.rank, out.cpu()

    for rank, out in ranks(body):
        assert out.tolist() == [rank, rank, rank + 1, rank + 1, 1, 1, 0, 0]


@pytest.mark.mpi
def test_a_publication_of_device_memory_is_read_whole(ranks, gpu):
    def body(comm):
        values = torch.full((1000,), 2.0 + comm.rank, device=gpu)
        published = Publication(comm, [values], publishes=True)
        published.publish([values], 0)
        comm.barrier()
        out, peer = torch.empty(1000, device=gpu), (comm.rank + 1) % comm.size
        published.read([out], peer)
        comm.barrier()
        published.close()
        return peer, out.unique().tolist()

    assert all(found == [2.0 + peer] for peer, found in ranks(body))


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16], ids=str)
def test_messages_of_device_memory(ranks, gpu, dtype):
    def body(comm):
        size, rank = comm.size, comm.rank
        after, before = (rank + 1) % size, (rank - 1) % size
        sent, got = torch.full((100,), rank, dtype=dtype, device=gpu), torch.empty(100, dtype=dtype, device=gpu)
        comm.sendrecv(sent, after, got, before)
        later = torch.empty_like(got)
        request = comm.irecv(later, before, 7)
        comm.isend(sent, after, 7).wait()
        request.wait()
        total, root = sent.clone(), sent.clone()
        comm.allreduce(total)
        comm.broadcast(root, size - 1)
        return [t.double().unique().tolist() for t in (got, later, total, root)]

    size = ranks.size
    for rank, found in enumerate(ranks(body)):
        before = float((rank - 1) % size)
        assert found == [[before], [before], [sum(range(size))], [size - 1]]


# --- the user's own loop ----------------------------------------------------------------------------------------------
def _learner(gpu) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(gpu)
    return module, torch.optim.AdamW(module.parameters(), lr=0.01)


def _steps(module: nn.Module, optimizer, gpu, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(16, 4, generator=generator).to(gpu)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), x[:, :2]).backward()
        optimizer.step()


@pytest.mark.parametrize("strategy", ["allreduce", "gossip_pull"])
@pytest.mark.mpi
def test_a_loop_of_ones_own_on_a_gpu(ranks, gpu, strategy):
    def body(comm):
        hd.init(comm=comm)
        module, optimizer = _learner(gpu)
        optimizer = hd.DistributedOptimizer(optimizer, module, strategy=strategy)
        _steps(module, optimizer, gpu, comm.rank, 0, 5)
        hd.finish(module)
        return [t.double().cpu() for t in module.state_dict().values()]

    found = ranks(body)
    assert all(torch.equal(a, b) for mine in found for a, b in zip(mine, found[0], strict=True))
    assert all(t.isfinite().all() for t in found[0])


def test_a_gpus_model_is_saved_and_taken_up(gpu, tmp_path):
    module, optimizer = _learner(gpu)
    _steps(module, optimizer, gpu, 0, 0, 3)
    hd.init(comm=None)
    hd.save(tmp_path, model=module, optimizer=optimizer, step=3)
    _steps(module, optimizer, gpu, 0, 3, 5)
    other, fresh = _learner(gpu)
    hd.load(tmp_path, model=other, optimizer=fresh)
    _steps(other, fresh, gpu, 0, 3, 5)
    for a, b in zip(module.state_dict().values(), other.state_dict().values(), strict=True):
        assert a.device == b.device
        torch.testing.assert_close(a, b)


def test_flat_memory_is_on_the_gpu(gpu):
    module, _ = _learner(gpu)
    flat = FlatModel(module)
    held: list[Tensor] = [*flat.params, *flat.grads]
    assert all(tensor.device == gpu for tensor in held)
