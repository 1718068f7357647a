#!/usr/bin/env bash
# torch's Optimizer.load_state_dict: two optimizers that were given one state go on with the same memory.
#
# Guess: the state is copied, as Module.load_state_dict copies parameters.
# Seen: torch 2.13.0 (CPU). Tensors that already have the right type and device are taken as they are. After
# second.load_state_dict(first.state_dict()) both have one momentum buffer (or Adam's moments and step counter), and
# each step of one is seen by the other. A state that went through a file or copy.deepcopy is separate. PyTorch's issue
# 196083 (2026) is open.
# Why it matters: replicas that are simulated in one process (federated clients, local SGD, population-based training)
# start from one state so, and their moments mix from then on. The parameters stay separate, the losses look plausible,
# and the same program with one process per replica gives other numbers.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import copy

import torch


def step(parameter, optimizer):
    parameter.grad = torch.ones(1)
    optimizer.step()
    return parameter.item()


kinds = (("SGD", {"lr": 1.0, "momentum": 0.5}), ("Adam", {"lr": 0.5, "betas": (0.5, 0.5)}))
for kind, settings in kinds:
    for name, copied in (("state_dict", lambda state: state), ("deep copy", copy.deepcopy)):
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        first, second = (getattr(torch.optim, kind)([parameter], **settings) for parameter in parameters)
        step(parameters[0], first)
        second.load_state_dict(copied(first.state_dict()))
        with torch.no_grad():
            parameters[1].copy_(parameters[0])
        ends = [f"{step(parameters[i], (first, second)[i]):.3f}" for i in (0, 1)]
        key = "momentum_buffer" if kind == "SGD" else "step"
        states = [optimizer.state[p][key].item() for p, optimizer in zip(parameters, (first, second), strict=True)]
        print(kind, name, "parameters", *ends, key, *states)
PYTHON
cat >"$folder/expected" <<'EXPECTED'
SGD state_dict parameters -2.500 -2.750 momentum_buffer 1.75 1.75
SGD deep copy parameters -2.500 -2.500 momentum_buffer 1.5 1.5
Adam state_dict parameters -1.000 -1.000 step 3.0 3.0
Adam deep copy parameters -1.000 -1.000 step 2.0 2.0
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
