#!/usr/bin/env bash
# torch.distributed.checkpoint: of values that differ between the ranks, it saves some of one rank and some of another.
#
# Guess: a tensor that is no DTensor is saved by rank 0, as the docstring of the planner says; or each rank gets back
# what it saved.
# Seen: torch 2.13.0 (CPU, gloo), 2 ranks, each with its own values under the same names. For each name one rank writes,
# the one that has the fewest bytes to write so far, and all ranks read that value. So "layer1" comes from rank 0, and
# "layer2" and "layer3" from rank 1: a model that no rank has had. Numbers are treated so, too. Nothing warns. With
# DefaultSavePlanner(dedup_save_to_lowest_rank=True) all values are rank 0's.
# Why it matters: local SGD, DiLoCo and gossip have different weights on each rank between averages, and a sampler's
# position or a random generator's state is each rank's own. A checkpoint then holds layers of several replicas, and
# after the restart some ranks read other ranks' samples.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
rank = dist.get_rank()
lowest = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
for name, planner in (("default", None), ("lowest rank", lowest)):
    state = {f"layer{i}": torch.full((5 - i,), float(rank)) for i in (1, 2, 3)}
    state |= {"position": 100 + rank, "generator": torch.tensor([rank])}
    folder = f"{sys.argv[1]}/{name}"
    dcp.save(state, checkpoint_id=folder, planner=planner)
    read = {key: torch.full_like(value, -1) if torch.is_tensor(value) else -1 for key, value in state.items()}
    dcp.load(read, checkpoint_id=folder)
    values = {key: value.max().item() if torch.is_tensor(value) else value for key, value in read.items()}
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, values)
    if rank == 0:
        print(name, "| equal on both ranks:", of_ranks[0] == of_ranks[1], "|", *(f"{k}={v}" for k, v in values.items()))
dist.destroy_process_group()
PYTHON
cat >"$folder/expected" <<'EXPECTED'
default | equal on both ranks: True | layer1=0.0 layer2=1.0 layer3=1.0 position=100 generator=0
lowest rank | equal on both ranks: True | layer1=0.0 layer2=0.0 layer3=0.0 position=100 generator=0
EXPECTED
export OMP_NUM_THREADS=1
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/program.py" "$folder" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
