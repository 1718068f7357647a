"""Other libraries' sums between hosts that share nothing but a network: they meet there, and not at localhost."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, psutil, torch, hpcdist as hd
from hpcdist.comm.external.torch_distributed import rendezvous
comm = hd.init(deadline_s=60)
point = rendezvous(comm)
address = comm.gather(point.address.encode())
listening = [own.laddr.ip for own in psutil.Process().net_connections("inet") if own.status == "LISTEN"
             and own.laddr.port == point.store.port]
assert listening == ["10.78.0.1"] * (comm.rank == 0), listening
comm.barrier()
model = torch.nn.Linear(3, 2)
optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, provider=sys.argv[1])
before = model.weight.detach().clone()
(model(torch.full((1, 3), comm.rank + 1.0)).sum()).backward()
optimizer.step()
moved = (before - model.weight.detach()).mean().item()
optimizer.strategy.close()
if comm.rank == 0:
    print(*(a.decode() for a in address), comm.nodes, round(moved, 5), flush=True)
"""


@pytest.mark.time_limit(900)
@pytest.mark.parametrize("provider", ["gloo", "horovod"])
def test_hosts_meet_by_their_addresses(make_hosts, request, tmp_path, provider):
    if provider == "horovod":
        request.getfixturevalue("horovod")
    made = make_hosts(2)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = made.launch([tmp_path / "script.py", provider], env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    first, second, rest = done.stdout.strip().split(" ", 2)
    assert (first, second) == ("10.78.0.1", "10.78.0.2") and rest == "(0, 1) 1.5"
