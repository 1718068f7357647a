#!/usr/bin/env bash
# NumPy's sum of 1000 ones in bfloat16 (ml_dtypes): 256.
#
# Guess: np.sum is nearly exact, as for float16, which NumPy adds pairwise in float32: 1000 ones make 1000.
# Seen: numpy 2.4.6, ml_dtypes 0.6.0. The sum is taken one by one in bfloat16, where 256 + 1 is 256. np.mean is then
# 0.256, np.average and np.var follow. The dot product of the same array is 1000, and so is torch's sum in bfloat16.
# Why it matters: NumPy arrays with ml_dtypes are how weights and gradients in bfloat16 leave JAX, safetensors or MPI
# buffers; a norm or a mean that is checked on them is wrong without a warning for a few hundred elements.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
cat >"$folder/program.py" <<'PYTHON'
import ml_dtypes
import numpy as np
import torch

for kind in (np.float16, ml_dtypes.bfloat16):
    ones = np.ones(1000, kind)
    print(np.dtype(kind).name, "sum", float(ones.sum()), "mean", float(ones.mean()), "dot", float(ones @ ones))
print("torch.bfloat16 sum", torch.ones(1000, dtype=torch.bfloat16).sum().item())
PYTHON
cat >"$folder/expected" <<'EXPECTED'
float16 sum 1000.0 mean 1.0 dot 1000.0
bfloat16 sum 256.0 mean 0.255859375 dot 1000.0
torch.bfloat16 sum 1000.0
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
