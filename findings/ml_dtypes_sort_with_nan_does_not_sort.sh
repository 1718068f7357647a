#!/usr/bin/env bash
# NumPy's sort of bfloat16 (ml_dtypes): one NaN, and the rest of the array is not sorted.
#
# Guess: np.sort puts NaN last and sorts the others, as it does for float16 and float32; np.unique and np.median
# follow.
# Seen: numpy 2.4.6, ml_dtypes 0.6.0. What stands before the NaN is not sorted with what follows it: 3, NaN, 1, 2, 1,
# 3, 0 becomes 3, NaN, 0, 1, 1, 2, 3. np.unique has 3 twice, and np.median is 1, where it is NaN for float16. torch
# sorts the same bfloat16 values correctly, with NaN last.
# Why it matters: top-k selection, medians and clipping by a quantile of bfloat16 gradients are silently wrong as soon
# as one element is NaN, instead of NaN or an error.
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

values = [3, np.nan, 1, 2, 1, 3, 0]
for kind in (np.float16, ml_dtypes.bfloat16):
    array = np.array(values, kind)
    print(np.dtype(kind).name, "sorted", *np.sort(array), "unique", *np.unique(array), "median", np.median(array))
print("torch.bfloat16 sorted", *torch.tensor(values, dtype=torch.bfloat16).sort().values.tolist())
PYTHON
cat >"$folder/expected" <<'EXPECTED'
float16 sorted 0.0 1.0 1.0 2.0 3.0 3.0 nan unique 0.0 1.0 2.0 3.0 nan median nan
bfloat16 sorted 3 nan 0 1 1 2 3 unique 3 nan 0 1 2 3 median 1
torch.bfloat16 sorted 0.0 1.0 1.0 2.0 3.0 3.0 nan
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
