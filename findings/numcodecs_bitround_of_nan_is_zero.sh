#!/usr/bin/env bash
# numcodecs' BitRound: a NaN with all its bits set becomes -0.0, and the largest finite numbers become infinity.
#
# Guess: rounding of the mantissa leaves NaN a NaN, whatever its payload.
# Seen: numcodecs 0.16.6, numpy 2.4.6. Rounding adds to the bits as to an integer, and the carry runs through the
# exponent into the sign. 0x7fffffff becomes -0.0 and 0xffffffff becomes 0.0; 0x7fc00000, which x86 makes, stays NaN.
# float32's maximum becomes infinity.
# Why it matters: 0x7fffffff is the NaN that NVIDIA's GPUs return. A checkpoint or gradient with such NaNs, compressed
# with BitRound for zarr, reads back as zeros: the trace of a diverged run is gone. NaNs made on a CPU, as in tests,
# pass.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numcodecs==0.16.6 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
from numcodecs import BitRound

bits = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F7FFFFF, 0x3F800000], "uint32")
rounded = np.asarray(BitRound(keepbits=10).encode(bits.view("float32"))).view("float32")
for before, after in zip(bits, rounded, strict=True):
    print(f"{before:#010x} {before.view('float32'):.6g} -> {after:.6g}")
PYTHON
cat >"$folder/expected" <<'EXPECTED'
0x7fc00000 nan -> nan
0x7fffffff nan -> -0
0xffffffff nan -> 0
0x7f7fffff 3.40282e+38 -> inf
0x3f800000 1 -> 1
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
