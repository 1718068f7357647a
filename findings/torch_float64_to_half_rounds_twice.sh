#!/usr/bin/env bash
# torch's cast of float64 or int64 to float16 and bfloat16: two roundings.
#
# Guess: a cast gives the nearest number of the type, as NumPy's cast of float64 to float16 does.
# Seen: torch 2.13.0 (CPU), numpy 2.4.6. The cast goes through float32. A number that is just above the middle of two
# neighbours is first rounded to the middle, and then to the even neighbour: the farther one. The same holds for int64.
# Why it matters: averages that are kept in float64 or int64 for the sake of exactness, and are then cast to the type
# of the weights, differ in the last bit from those of NumPy or of a correctly rounding device; so ranks or libraries
# that must agree to the bit do not.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
import torch

above = 1 + 2**-11 + 2**-40  # between 1 and 1 + 2**-10, nearer to the latter
print("float16: torch", torch.tensor(above, dtype=torch.float64).half().item(), "numpy", float(np.float16(above)))
above = 1 + 2**-8 + 2**-40  # between 1 and 1 + 2**-7, nearer to the latter
print("bfloat16: torch", torch.tensor(above, dtype=torch.float64).bfloat16().item(), "nearest", 1 + 2**-7)
above = 2**32 + 2**24 + 1  # between 2**32 and 2**32 + 2**25, nearer to the latter
print("int64: torch", int(torch.tensor(above).bfloat16().item()), "nearest", 2**32 + 2**25)
PYTHON
cat >"$folder/expected" <<'EXPECTED'
float16: torch 1.0 numpy 1.0009765625
bfloat16: torch 1.0 nearest 1.0078125
int64: torch 4294967296 nearest 4328521728
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
