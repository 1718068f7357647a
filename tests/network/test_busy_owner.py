"""Windows between hosts, and gossip by them, while their owner computes: nobody waits for it, and all arrives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MPI = [
    pytest.param(None, id="Open MPI"),
    pytest.param(ROOT / ".venv-mpich", id="MPICH", marks=pytest.mark.extended),
]
STEPS = 12

pytestmark = pytest.mark.time_limit(120)

# Rank 0 computes without a call of MPI, in torch and in Python, until rank 1 has taken its steps, or for 40 s. Files,
# which hosts share, say how far they are. In gossip they start at 1 and at 0, and learn nothing: what changes comes
# from the other.
SCRIPT = """
import json, sys, time
from pathlib import Path
import torch
import hpcdist as hd
comm = hd.init(deadline_s=60, internode="tcp:eth0")
told = {"nodes": comm.nodes, "late": False, "moved": 0}

def beside_a_busy_owner(name, step):
    folder, until, matrix = Path(sys.argv[1], name), time.monotonic() + 40, torch.full((200, 200), 1e-3)
    folder.mkdir(exist_ok=True)
    comm.barrier()
    for part, compute in (("half", lambda: matrix @ matrix), ("whole", lambda: sum(range(1000)))):
        if comm.rank == 0:
            (folder / f"computes-{part}").touch()
            while not (folder / part).exists() and not told["late"]:
                compute()
                told["late"] = time.monotonic() > until
        else:
            while not (folder / f"computes-{part}").exists():
                time.sleep(0.01)
            for _ in range(STEPS // 2):
                step()
            (folder / part).touch()
    comm.barrier()

for place in (comm.split(0), comm.apart("rma")):
    window, words = place.window(100_000), place.window(1, torch.int64)
    values, out = torch.full((30_000,), 5.0), torch.empty(30_000)

    def use():
        window.put(values, 0, 100)
        window.get(out, 0, 100)
        assert torch.equal(out, values)
        window.accumulate(values, 0, 100)
        words.fetch_add(1, 0)
        words.compare_and_swap(-1, 0, 0)

    way = place.memory.internode
    beside_a_busy_owner(way, use)
    told[way] = int(words.local[0])

def step():
    optimizer.zero_grad()
    net(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    told["moved"] += optimizer.record.bytes_fetched + optimizer.record.bytes_sent

for name in ("gossip_pull", "gossip_push"):
    net = torch.nn.Linear(1000, 100)
    optimizer = hd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net, strategy=name)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0 - comm.rank)
    optimizer.strategy.state.load(optimizer.strategy.state.save())  # publishes these values
    told["moved"] = 0
    beside_a_busy_owner(name, step)
    moved = told["moved"]
    if comm.rank == 0:
        step()
    told[name] = moved, float(net.weight.mean())
told["received"] = sum(int(line.split()[1]) for line in open("/proc/net/dev") if "eth0" in line)
Path(sys.argv[1], f"rank{comm.rank}.json").write_text(json.dumps(told))
"""


@pytest.mark.parametrize("prefix", MPI)
def test_a_rank_uses_the_memory_of_one_that_computes_and_gossips_with_it(make_hosts, tmp_path, prefix):
    if prefix and not (prefix / "bin" / "mpiexec").exists():
        pytest.skip(f"tests/run.sh makes {prefix.name}; it is not there")
    (tmp_path / "script.py").write_text(SCRIPT.replace("STEPS", str(STEPS)))
    env = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    given = {"prefix": prefix} if prefix else {}
    job = make_hosts(2, mbit_s=100).launch([tmp_path / "script.py", tmp_path], env=env, **given)
    assert job.returncode == 0, job.stderr
    owner, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert owner["nodes"] == [0, 1], "memory is not shared"
    assert not owner["late"], "the other rank waited for this one, which computed"
    assert owner["received"] > STEPS * 2 * 240_000, "through the network"
    assert owner["tcp"] == owner["rma"] == STEPS
    for name in ("gossip_pull", "gossip_push"):
        (_, own), (moved, others) = owner[name], other[name]
        transfers = moved // (4 * 100_100)
        assert 2 <= transfers <= STEPS, "about half of the steps, as the peer is drawn among both"
        if name == "gossip_pull":
            assert others == pytest.approx(1 - 0.5**transfers), "half way to the owner's at each"
        else:
            averages = [pytest.approx(weight / (transfers + weight)) for weight in (1, 2)]  # 2: it draws itself
            assert own in averages, "all messages have arrived, and count"
