#!/usr/bin/env bash
# torch's PeriodicModelAverager(period=4): it averages after steps 1, 5, 9, and not 4, 8, 12.
#
# Guess: with a period of 4 and no warm-up the ranks make 4 local steps, and are averaged after the fourth.
# Seen: torch 2.13.0 (CPU, gloo), 2 ranks. The counter starts at 0 and is tested before it is raised, so the first call
# averages. With warmup_steps=4 the first average follows step 5. At steps 4, 8, 12 each rank has made 3 steps of its
# own since the last average.
# Why it matters: local SGD ends, evaluates and checkpoints at multiples of its period, on the assumption that the
# replicas are equal there. Here they are never equal at those steps, and rank 0's checkpoint is not the average.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

dist.init_process_group("gloo")
for warmup in (0, 4):
    averager, averaged = PeriodicModelAverager(period=4, warmup_steps=warmup), []
    for step in range(1, 15):
        weight = torch.nn.Parameter(torch.tensor([float(dist.get_rank())]))
        weight.grad = torch.zeros(1)
        averager.average_parameters([weight])
        if weight.item() == 0.5:
            averaged.append(step)
    if dist.get_rank() == 0:
        print("warm-up", warmup, "averaged after steps", *averaged)
dist.destroy_process_group()
PYTHON
cat >"$folder/expected" <<'EXPECTED'
warm-up 0 averaged after steps 1 5 9 13
warm-up 4 averaged after steps 5 9 13
EXPECTED
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
