#!/usr/bin/env bash
# torch.distributed.checkpoint's get_optimizer_state_dict: reading the state before the first step changes the training.
#
# Guess: a getter leaves the optimizer as it is; a checkpoint at step 0 does not change what follows.
# Seen: torch 2.13.0 (CPU, one process). An optimizer without state is given one by a step with learning rate 0 and
# gradients 0, and this step counts: Adam's "step" is 1 before training starts. The first real update is then corrected
# for bias as the second one: its size is 0.074 in place of the learning rate, 0.1.
# Why it matters: a job that checkpoints at step 0 trains differently from one that does not, and a run that is resumed
# from that checkpoint differs from both the same way; comparisons to the bit fail, with nothing to see in the code.
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
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

for read in (False, True):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if read:
        get_optimizer_state_dict(model, optimizer)
    before = model.weight.detach().clone()
    counted = optimizer.state[model.weight].get("step", torch.zeros(())).item()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moved = (before - model.weight.detach()).flatten().tolist()
    print("read" if read else "not read", "steps", counted, "moved by", *[f"{size:.4f}" for size in moved])
PYTHON
cat >"$folder/expected" <<'EXPECTED'
not read steps 0.0 moved by 0.1000 0.1000
read steps 1.0 moved by 0.0744 0.0744
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
