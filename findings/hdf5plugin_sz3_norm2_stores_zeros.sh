#!/usr/bin/env bash
# hdf5plugin's SZ3(norm2=...): arrays are read back as zeros.
#
# Guess: norm2 is a bound of the L2 norm of the error, so that a small bound gives a close copy.
# Seen: hdf5plugin 7.1.0, h5py 3.16.0, numpy 2.4.6. With bounds from 10 to 1e-6 a chunk of 10000 random numbers takes
# less than 200 bytes and is read as zeros, in float32 and float64: the error is the data themselves. Neither writing
# nor reading complains. absolute=0.001 keeps its bound. For relative (right, too) hdf5plugin logs "Only absolute and
# norm2 modes properly tested". Its issue 317 (2024) asks what norm2 means, as it "had no effect".
# Why it matters: activations, gradients or fields of a simulation are compressed for an archive, by the norm that their
# analysis uses, and the originals are deleted. The file has the right shape and type, and a splendid ratio.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check hdf5plugin==7.1.0 h5py==3.16.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import h5py
import hdf5plugin
import numpy as np

numbers = np.random.default_rng(0).standard_normal((100, 100))
for kind in ("float32", "float64"):
    x = numbers.astype(kind)
    for bound in ({"norm2": 10.0}, {"norm2": 0.001}, {"norm2": 1e-6}, {"absolute": 0.001}, {"relative": 0.001}):
        with h5py.File(sys.argv[1], "w") as file:
            file.create_dataset("x", data=x, chunks=x.shape, compression=hdf5plugin.SZ3(**bound))
        with h5py.File(sys.argv[1]) as file:
            seen, size = file["x"][:], file["x"].id.get_storage_size()
        print(kind, *bound.items(), f"| data {np.linalg.norm(x):.3g}, error {np.linalg.norm(seen - x):.3g}", end=", ")
        print(f"zeros {100 * np.mean(seen == 0):.0f} %,", "under 200 bytes" if size < 200 else "over 10000 bytes")
PYTHON
cat >"$folder/expected" <<'EXPECTED'
float32 ('norm2', 10.0) | data 99.8, error 99.8, zeros 100 %, under 200 bytes
float32 ('norm2', 0.001) | data 99.8, error 99.8, zeros 100 %, under 200 bytes
float32 ('norm2', 1e-06) | data 99.8, error 99.8, zeros 100 %, under 200 bytes
float32 ('absolute', 0.001) | data 99.8, error 0.0564, zeros 0 %, over 10000 bytes
float32 ('relative', 0.001) | data 99.8, error 0.416, zeros 0 %, over 10000 bytes
float64 ('norm2', 10.0) | data 99.8, error 99.8, zeros 100 %, under 200 bytes
float64 ('norm2', 0.001) | data 99.8, error 99.8, zeros 100 %, under 200 bytes
float64 ('norm2', 1e-06) | data 99.8, error 99.8, zeros 100 %, under 200 bytes
float64 ('absolute', 0.001) | data 99.8, error 0.0564, zeros 0 %, over 10000 bytes
float64 ('relative', 0.001) | data 99.8, error 0.416, zeros 0 %, over 10000 bytes
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" "$folder/x.h5" 2>"$folder/log" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
