#!/usr/bin/env bash
# torch.distributed.broadcast with gloo: a channels_last tensor arrives scrambled in a contiguous one.
#
# Guess: tensors of equal shape and type are sent by index, as copy_ does, whatever their strides; all_gather does so.
# Seen: torch 2.13.0 (CPU, gloo), 2 ranks. broadcast sends the memory. If the source is in channels_last and the
# receiver is contiguous, of one shape, the receiver has the right numbers at wrong places. Nothing fails or warns.
# all_gather of the same two tensors is right.
# Why it matters: channels_last is set by model.to(memory_format=...), which one path of a program may miss (a model
# that is built from a checkpoint, or for evaluation); the ranks then start from different weights.
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

dist.init_process_group("gloo")
for last in (False, True):
    sent = torch.arange(8.0).reshape(1, 2, 2, 2)
    weight = sent.clone() if dist.get_rank() == 0 else torch.zeros(1, 2, 2, 2)
    if last and dist.get_rank() == 0:
        weight = weight.to(memory_format=torch.channels_last)
    gathered = [torch.zeros(1, 2, 2, 2) for _ in range(2)]
    dist.all_gather(gathered, weight)
    dist.broadcast(weight, 0)
    if dist.get_rank() == 1:
        name = "channels_last" if last else "contiguous"
        print(name, "broadcast", weight.flatten().int().tolist(), "gathered", gathered[0].flatten().int().tolist())
dist.destroy_process_group()
PYTHON
cat >"$folder/expected" <<'EXPECTED'
contiguous broadcast [0, 1, 2, 3, 4, 5, 6, 7] gathered [0, 1, 2, 3, 4, 5, 6, 7]
channels_last broadcast [0, 4, 1, 5, 2, 6, 3, 7] gathered [0, 1, 2, 3, 4, 5, 6, 7]
EXPECTED
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
