#!/usr/bin/env bash
# torch's cast to float8_e4m3fn: infinity becomes 448, an ordinary number.
#
# Guess: float8_e4m3fn has no infinity, so what is too large, and infinity itself, becomes NaN, as in ml_dtypes (JAX's
# types) and as infinity stays one in float8_e5m2.
# Seen: torch 2.13.0 (CPU), ml_dtypes 0.6.0. torch's e4m3fn saturates at 448, infinity included; its e5m2 and both its
# fnuz types do not. ml_dtypes gives NaN for the same input from 465 on. NaN stays NaN in each.
# Why it matters: an overflow is found by a test for values that are not finite. After a cast to e4m3fn there are none:
# a step with overflowed gradients or activations goes on as if it were a good one, with e4m3fn but not with e5m2, and
# in torch but not in JAX.
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

values = np.array([448.0, 465.0, 1e6, np.inf, -np.inf, np.nan], "float32")
print("values ", *values.tolist())
for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
    print(name)
    print("  torch    ", *torch.from_numpy(values).to(getattr(torch, name)).float().tolist())
    print("  ml_dtypes", *values.astype(getattr(ml_dtypes, name)).astype("float32").tolist())
PYTHON
cat >"$folder/expected" <<'EXPECTED'
values  448.0 465.0 1000000.0 inf -inf nan
float8_e4m3fn
  torch     448.0 448.0 448.0 448.0 -448.0 nan
  ml_dtypes 448.0 nan nan nan nan nan
float8_e5m2
  torch     448.0 448.0 inf inf -inf nan
  ml_dtypes 448.0 448.0 inf inf -inf nan
float8_e4m3fnuz
  torch     nan nan nan nan nan nan
  ml_dtypes nan nan nan nan nan nan
float8_e5m2fnuz
  torch     448.0 448.0 nan nan nan nan
  ml_dtypes 448.0 448.0 nan nan nan nan
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
