#!/usr/bin/env bash
# blosc2: the quotient of two integer arrays is truncated, and then stored as floating-point numbers.
#
# Guess: x / y of blosc2's arrays is NumPy's x / y, as the reference of blosc2.divide says; and its floating-point
# result type shows that it is not the integer division.
# Seen: blosc2 4.14.1, numpy 2.4.6. For two compressed arrays of integers x / y is 0.0 where NumPy has 0.5, also in a
# larger expression (1 - x / y) and in its mean; int32 gives float32, and the other types float64. x / 2, x / (y + 0)
# and the quotient by a NumPy array are right. Nothing warns.
# Why it matters: counts by counts (hits by trials, sums of pixels by their number, tokens by samples) are the quotients
# that data in compressed files are reduced to: a table of accuracies becomes zeros and ones.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check blosc2==4.14.1 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import blosc2
import numpy as np

for kind in ("uint8", "int32", "int64"):
    hits, trials = np.array([1, 3, 5, 9], kind), np.array([2, 4, 4, 9], kind)
    x, y = blosc2.asarray(hits), blosc2.asarray(trials)
    quotient = (x / y)[:]
    print(kind, "numpy", *hits / trials, "blosc2", *quotient.tolist(), quotient.dtype, "mean", (x / y).mean())
    print(kind, "x / 2", *(x / 2)[:].tolist(), "x / (y + 0)", *(x / (y + 0))[:].tolist())
    print(kind, "1 - x / y", *(1 - x / y)[:].tolist(), "x / NumPy array", *(x / trials)[:].tolist())
PYTHON
cat >"$folder/expected" <<'EXPECTED'
uint8 numpy 0.5 0.75 1.25 1.0 blosc2 0.0 0.0 1.0 1.0 float64 mean 0.5
uint8 x / 2 0.5 1.5 2.5 4.5 x / (y + 0) 0.5 0.75 1.25 1.0
uint8 1 - x / y 1.0 1.0 0.0 0.0 x / NumPy array 0.5 0.75 1.25 1.0
int32 numpy 0.5 0.75 1.25 1.0 blosc2 0.0 0.0 1.0 1.0 float32 mean 0.5
int32 x / 2 0.5 1.5 2.5 4.5 x / (y + 0) 0.5 0.75 1.25 1.0
int32 1 - x / y 1.0 1.0 0.0 0.0 x / NumPy array 0.5 0.75 1.25 1.0
int64 numpy 0.5 0.75 1.25 1.0 blosc2 0.0 0.0 1.0 1.0 float64 mean 0.5
int64 x / 2 0.5 1.5 2.5 4.5 x / (y + 0) 0.5 0.75 1.25 1.0
int64 1 - x / y 1.0 1.0 0.0 0.0 x / NumPy array 0.5 0.75 1.25 1.0
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
