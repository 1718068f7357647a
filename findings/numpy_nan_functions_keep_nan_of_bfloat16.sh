#!/usr/bin/env bash
# NumPy's nansum, nanmean and nan_to_num with bfloat16 (ml_dtypes): they are the plain sum, the plain mean and a copy.
#
# Guess: they ignore or replace NaN in every floating-point type, as isnan and nanmax treat bfloat16.
# Seen: numpy 2.4.6, ml_dtypes 0.6.0. The functions look for NaN only in subtypes of np.inexact, and take other types
# for integers, which have none. bfloat16 and float8 are no such subtypes. nansum, nanprod, nanmean, nanvar and
# nancumsum return NaN, nan_to_num leaves NaN and infinity, and nanargmax returns the index of the NaN. nanmax is right.
# Nothing warns. Issue 346 of ml_dtypes (2025) says it of nan_to_num.
# Why it matters: JAX, Flax and ml_dtypes itself give bfloat16 arrays of NumPy. A step that cleans gradients or
# embeddings before an average lets the NaN through, and the average over all ranks is NaN.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import ml_dtypes
import numpy as np

for kind in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
    x = np.array([1, np.nan, 3], kind)
    print(np.dtype(kind), "isnan", *np.isnan(x).tolist(), end=" | ")
    for name in ("nanmax", "nansum", "nanprod", "nanmean", "nanvar"):
        print(name, float(getattr(np, name)(x)), end=", ")
    print("nanargmax", np.nanargmax(x))
    print("   nancumsum", *np.nancumsum(x).astype(float).tolist(), end=" | ")
    y = np.array([np.nan, np.inf, -np.inf], kind)
    print("nan_to_num", *np.nan_to_num(y, posinf=9, neginf=-9).astype(float).tolist())
PYTHON
cat >"$folder/expected" <<'EXPECTED'
float16 isnan False True False | nanmax 3.0, nansum 4.0, nanprod 3.0, nanmean 2.0, nanvar 1.0, nanargmax 2
   nancumsum 1.0 1.0 4.0 | nan_to_num 0.0 9.0 -9.0
bfloat16 isnan False True False | nanmax 3.0, nansum nan, nanprod nan, nanmean nan, nanvar nan, nanargmax 1
   nancumsum 1.0 nan nan | nan_to_num nan inf -inf
float8_e5m2 isnan False True False | nanmax 3.0, nansum nan, nanprod nan, nanmean nan, nanvar nan, nanargmax 1
   nancumsum 1.0 nan nan | nan_to_num nan inf -inf
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
