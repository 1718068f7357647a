#!/usr/bin/env bash
# torch's Adam with bfloat16 parameters: the second moment never decays.
#
# Guess: exp_avg_sq is a moving average, so that one spike of the gradient is forgotten after some thousand steps.
# Seen: torch 2.13.0 (CPU), betas (0.9, 0.999); the loop, foreach=True and fused=True alike. The moments have the
# parameters' type. In bfloat16 v * 0.999 rounds to v, as neighbours are at least 0.4 % apart. After one gradient of
# 100 and 5000 of zero, v is still 10; in float32 it is 0.067.
# Why it matters: training wholly in bfloat16 (without float32 master weights) is common where memory is short. After
# one spike the step size of a weight stays small for the rest of the run, and nothing shows it.
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

for kind in (torch.float32, torch.bfloat16):
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        weight = torch.nn.Parameter(torch.ones(1, dtype=kind))
        optimizer = torch.optim.Adam([weight], lr=0.01, **options)
        for step in range(5001):
            weight.grad = torch.full_like(weight, 100.0 if step == 0 else 0.0)
            optimizer.step()
        print(kind, options, f"{optimizer.state[weight]['exp_avg_sq'].item():.2g}")
PYTHON
cat >"$folder/expected" <<'EXPECTED'
torch.float32 {'foreach': False} 0.067
torch.float32 {'foreach': True} 0.067
torch.float32 {'fused': True} 0.067
torch.bfloat16 {'foreach': False} 10
torch.bfloat16 {'foreach': True} 10
torch.bfloat16 {'fused': True} 10
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
