#!/usr/bin/env bash
# h5py: an array assigned to a dataset of a narrower type is clamped to its range, and NaN becomes the least integer.
#
# Guess: the assignment follows NumPy's astype: 300 in uint8 is 44, as in an array in memory and in zarr; or it is
# refused.
# Seen: h5py 3.16.0, zarr 3.1.6, numpy 2.4.6. HDF5 converts, and clamps: 300 is 255, -1 is 0, and 1e10 in int32 is the
# largest integer. NaN in int32 is -2147483648. Reading through `astype("int8")` or read_direct clamps as well. HDF5
# documents the clamping; neither library warns.
# Why it matters: labels, token ids and pixels are stored in the narrowest type. A pipeline that is moved from NumPy or
# zarr to HDF5 gets other values from the same faulty input, and a clamped label (255) is a class that may well exist.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check h5py==3.16.0 zarr==3.1.6 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import h5py
import numpy as np
import zarr

wide = np.array([300, -1, 2, 256, 2**40])
with h5py.File(sys.argv[1] + "/x.h5", "w") as file:
    dataset = file.create_dataset("narrow", wide.shape, "uint8")
    array = zarr.create_array(store=sys.argv[1] + "/x.zarr", shape=wide.shape, dtype="uint8")
    dataset[:], array[:] = wide, wide
    print("uint8: HDF5", *dataset[:], "| zarr", *array[:], "| numpy", *wide.astype("uint8"))
    print("int8, read by astype: HDF5", *file.create_dataset("wide", data=wide).astype("int8")[:])
    integers = file.create_dataset("integers", (4,), "int32")
    integers[:] = np.array([np.nan, 1e10, -1e10, np.inf])
    print("int32 of nan, 1e10, -1e10, inf: HDF5", *integers[:])
PYTHON
cat >"$folder/expected" <<'EXPECTED'
uint8: HDF5 255 0 2 255 255 | zarr 44 255 2 0 0 | numpy 44 255 2 0 0
int8, read by astype: HDF5 127 -1 2 127 127
int32 of nan, 1e10, -1e10, inf: HDF5 -2147483648 2147483647 -2147483648 2147483647
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" "$folder" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
