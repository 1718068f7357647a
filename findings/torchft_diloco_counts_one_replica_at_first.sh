#!/usr/bin/env bash
# torchft's DiLoCo: the first period of all replicas but one is thrown away, although all start with equal parameters.
#
# Guess: replicas that start from the same seed make their local steps, and the first outer step averages what all of
# them have done, as in each later period.
# Seen: torchft 0.2.0, torch 2.13.0 (CPU, gloo), 2 replicas. By default (init_sync=True) the quorum of the first outer
# step makes replica 1 load the state of replica 0, local steps included, before its pseudo-gradient is computed. The
# "average" is the pseudo-gradient of replica 0. From the second period on both count. With init_sync=False the first
# average is that of both.
# Why it matters: DiLoCo's periods are hundreds of steps, and N - 1 of N replicas spend the first one in vain. Another
# implementation with the same data and seeds ends elsewhere; with init_sync=False it can end on the same bits.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torchft==0.2.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
shared = dist.FileStore(str(folder / "store"), 2)


def train(init_sync):
    """Take three periods of 2 steps, each of which moves replica 0 by -1 and replica 1 by -3: on average by -2."""
    key = f"init_sync={init_sync}"
    if rank == 0:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60000)
        shared.set(key, lighthouse.address().rpartition(":")[2])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        min_replica_size=2,
        use_async_quorum=False,
        init_sync=init_sync,
        state_dict=model.state_dict,
        load_state_dict=model.load_state_dict,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{shared.get(key).decode()}",
        replica_id=f"replica{rank}",
        hostname="127.0.0.1",
    )
    inner, outer = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
    ends = []
    with DiLoCo(manager, [model], inner, outer, sync_every=2):
        for step in range(1, 7):
            model.weight.grad = torch.full((1, 1), [1.0, 3.0][rank])
            inner.step()
            if step % 2 == 0:
                ends.append(int(model.weight.item()))
    shared.set(f"{key}, {rank}", " ".join(map(str, ends)))
    if rank == 0:
        lines = [f"{key}, replica {each}: {shared.get(f'{key}, {each}').decode()}\n" for each in range(2)]
        with open(folder / "seen", "a") as file:
            file.writelines(lines)
    shared.get(f"{key}, 1")  # both have ended
    manager.shutdown()
    if rank == 0:
        lighthouse.shutdown()


train(True)
train(False)
PYTHON
cat >"$folder/expected" <<'EXPECTED'
init_sync=True, replica 0: -2 -6 -10
init_sync=True, replica 1: -2 -6 -10
init_sync=False, replica 0: -4 -8 -12
init_sync=False, replica 1: -4 -8 -12
EXPECTED
export OMP_NUM_THREADS=1
"$folder/venv/bin/python" "$folder/program.py" "$folder" 1 >"$folder/log.1" 2>&1 &
"$folder/venv/bin/python" "$folder/program.py" "$folder" 0 >"$folder/log.0" 2>&1 || tail -n 20 "$folder/log.0"
wait
cat "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
