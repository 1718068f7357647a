#!/usr/bin/env bash
# torchft's DiLoCo with buckets: of several buckets only the last one is averaged, and the replicas drift apart.
#
# Guess: use_bucketization=True with bucket_cap_mb=1 sends the same pseudo-gradients in messages of 1 MiB at most.
# Seen: torchft 0.2.0, torch 2.13.0 (CPU, gloo), 2 replicas, parameters of 256 KiB. Four of them are one bucket, and all
# are averaged. Eight are two buckets: the first four parameters keep each replica's own pseudo-gradient. With a bucket
# that holds all eight, all are averaged. Nothing is logged, and every step commits.
# Why it matters: buckets are used for models that are larger than a bucket. Such replicas train on without the others,
# and each evaluates as a model of its own.
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


def first_period(parameters, bucket_cap_mb):
    """Take one step, which moves replica 0 by -1 and replica 1 by -3: the mean of both moves is -2."""
    key = f"{parameters} parameters, bucket_cap_mb={bucket_cap_mb}"
    if rank == 0:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60000)
        shared.set(key, lighthouse.address().rpartition(":")[2])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = torch.nn.ParameterList(torch.zeros(64 * 1024) for _ in range(parameters))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        min_replica_size=2,
        use_async_quorum=False,
        init_sync=False,
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
    with DiLoCo(manager, [model], inner, outer, sync_every=1, use_bucketization=True, bucket_cap_mb=bucket_cap_mb):
        for parameter in model:
            parameter.grad = torch.full_like(parameter, [1.0, 3.0][rank])
        inner.step()
    shared.set(f"{key}, {rank}", " ".join(str(int(parameter.mean())) for parameter in model))
    if rank == 0:
        lines = [f"{key}, replica {each}: {shared.get(f'{key}, {each}').decode()}\n" for each in range(2)]
        with open(folder / "seen", "a") as file:
            file.writelines(lines)
    shared.get(f"{key}, 1")  # both have stepped
    manager.shutdown()
    if rank == 0:
        lighthouse.shutdown()


first_period(4, 1)
first_period(8, 1)
first_period(8, 64)
PYTHON
cat >"$folder/expected" <<'EXPECTED'
4 parameters, bucket_cap_mb=1, replica 0: -2 -2 -2 -2
4 parameters, bucket_cap_mb=1, replica 1: -2 -2 -2 -2
8 parameters, bucket_cap_mb=1, replica 0: -1 -1 -1 -1 -2 -2 -2 -2
8 parameters, bucket_cap_mb=1, replica 1: -3 -3 -3 -3 -2 -2 -2 -2
8 parameters, bucket_cap_mb=64, replica 0: -2 -2 -2 -2 -2 -2 -2 -2
8 parameters, bucket_cap_mb=64, replica 1: -2 -2 -2 -2 -2 -2 -2 -2
EXPECTED
export OMP_NUM_THREADS=1
"$folder/venv/bin/python" "$folder/program.py" "$folder" 1 >"$folder/log.1" 2>&1 &
"$folder/venv/bin/python" "$folder/program.py" "$folder" 0 >"$folder/log.0" 2>&1 || tail -n 20 "$folder/log.0"
wait
cat "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
