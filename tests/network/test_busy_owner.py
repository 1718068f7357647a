"""Gossip between hosts while the owner of a window computes: nobody waits for it, and what it is sent arrives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MPI = {"Open MPI": ROOT / ".venv", "MPICH": ROOT / ".venv-mpich"}

STEPS = 12

pytestmark = pytest.mark.time_limit(120)

# Rank 0 computes, without a call of MPI, until rank 1 has taken all its steps, or for 40 s. They start at 1 and at 0,
# and learn nothing: what changes comes from the other. A file, which hosts share, says how far they are.
GOSSIP = """
import json, sys, time
from pathlib import Path
import torch
import hpcdist as hd
comm = hd.init(deadline_s=60)

def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    return optimizer.record

for name in ("gossip_pull", "gossip_push"):
    folder = Path(sys.argv[1]) / name
    net = torch.nn.Linear(1000, 100)
    optimizer = hd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net, strategy=name)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0 - comm.rank)
    optimizer.strategy.load_state(optimizer.strategy.state())  # publishes these values
    comm.barrier()
    moved, started_s, late = 0, time.monotonic(), False
    if comm.rank == 0:
        folder.mkdir()
        (folder / "computing").touch()
        matrix = torch.full((300, 300), 1e-3)
        while not (folder / "stepped").exists() and not late:
            matrix @ matrix
            late = time.monotonic() - started_s > 40
    else:
        while not (folder / "computing").exists():
            time.sleep(0.01)
        for _ in range(STEPS):
            record = step(net, optimizer)
            moved += record.bytes_fetched + record.bytes_sent
        (folder / "stepped").touch()
    comm.barrier()
    if comm.rank == 0:
        step(net, optimizer)
    own = float(net.weight.mean())
    told = {"nodes": comm.memory.nodes, "moved": moved, "own": own, "late": late}
    (folder / f"rank{comm.rank}.json").write_text(json.dumps(told))
"""


@pytest.mark.parametrize("mpi", MPI)
def test_a_rank_gossips_with_one_that_computes(make_hosts, tmp_path, mpi):
    prefix = MPI[mpi]
    if not (prefix / "bin" / "mpiexec").exists():
        pytest.skip(f"tests/run.sh makes {prefix.name}; it is not there")
    (tmp_path / "script.py").write_text(GOSSIP.replace("STEPS", str(STEPS)))
    env = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    job = make_hosts(2, mbit_s=100).launch([tmp_path / "script.py", tmp_path], env=env, prefix=prefix)
    assert job.returncode == 0, job.stderr
    for name in ("gossip_pull", "gossip_push"):
        owner, other = (json.loads((tmp_path / name / f"rank{rank}.json").read_text()) for rank in range(2))
        assert owner["nodes"] == [0, 1], "memory is not shared"
        assert not owner["late"], "the other rank's steps ended while this one computed"
        transfers = other["moved"] // (4 * 100_100)
        assert 2 <= transfers <= STEPS, "about half of the steps, as the peer is drawn among both"
        if name == "gossip_pull":
            assert other["own"] == pytest.approx(1 - 0.5**transfers), "half way to the owner's at each"
        else:
            averages = [pytest.approx(weight / (transfers + weight)) for weight in (1, 2)]  # 2: it draws itself
            assert owner["own"] in averages, "all messages have arrived, and count"
