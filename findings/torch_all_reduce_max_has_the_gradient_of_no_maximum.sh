#!/usr/bin/env bash
# torch.distributed.nn.functional.all_reduce(op=MAX): all ranks get a gradient, and it is a maximum of gradients.
#
# Guess: the call is differentiable for all operations that it takes. The gradient of a maximum goes to the rank that
# has it, and is the sum of what the ranks' losses give; other ranks get 0.
# Seen: torch 2.13.0 (CPU, gloo), 2 ranks with 3 and 5, whose losses are the result times 1 and times 2. The backward
# pass is the same all-reduce, of the gradients. For MAX both ranks get max(1, 2) = 2 instead of 0 and 3, for MIN both
# get 1 instead of 3 and 0, and for PRODUCT both get 2 instead of 15 and 9. SUM and AVG are right. torch 2.13 deprecates
# the function; the backward pass of the functional collective that it names refuses all operations but SUM.
# Why it matters: the stable softmax over classes that lie on several ranks, and max-pooling over a sequence in parts,
# need this maximum. The loss is right, gradients have the right shape, and training is a little wrong.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import warnings

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
values, weights = (3.0, 5.0), (1.0, 2.0)
references = {"SUM": torch.sum, "AVG": torch.mean, "MAX": torch.amax, "MIN": torch.amin, "PRODUCT": torch.prod}
for name, reference in references.items():
    x = torch.tensor(values[dist.get_rank()], requires_grad=True)
    y = all_reduce(x, op=getattr(dist.ReduceOp, name))
    (weights[dist.get_rank()] * y).backward()
    seen = [None] * 2
    dist.all_gather_object(seen, x.grad.item())
    all_values = torch.tensor(values, requires_grad=True)
    right = reference(all_values)
    (sum(weights) * right).backward()
    if dist.get_rank() == 0:
        print(f"{name}: 2 ranks {y.item()}, gradients", *seen, end=" | ")
        print(f"one process {right.item()}, gradients", *all_values.grad.tolist())
dist.destroy_process_group()
PYTHON
cat >"$folder/expected" <<'EXPECTED'
SUM: 2 ranks 8.0, gradients 3.0 3.0 | one process 8.0, gradients 3.0 3.0
AVG: 2 ranks 4.0, gradients 1.5 1.5 | one process 4.0, gradients 1.5 1.5
MAX: 2 ranks 5.0, gradients 2.0 2.0 | one process 5.0, gradients 0.0 3.0
MIN: 2 ranks 3.0, gradients 1.0 1.0 | one process 3.0, gradients 3.0 0.0
PRODUCT: 2 ranks 15.0, gradients 2.0 2.0 | one process 15.0, gradients 15.0 9.0
EXPECTED
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
