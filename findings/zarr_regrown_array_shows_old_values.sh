#!/usr/bin/env bash
# zarr: an array that is cut and grown again has its old values back.
#
# Guess: what resize cuts off is gone, and what it adds reads as the fill value, as with HDF5.
# Seen: zarr 3.1.6, h5py 3.16.0, numpy 2.4.6. resize removes whole chunks, and leaves the rest of the chunk at the edge
# as it is. Here chunks hold 8 elements; of 10 elements cut to 5 and grown to 10, elements 5 to 7 have their old
# values, and 8 and 9 the fill value. HDF5 gives the fill value for all five.
# Why it matters: a log of metrics, a replay buffer or a list of samples that is truncated to the last checkpoint, and
# grown for the steps to come, shows values of the discarded steps as if they had been written, up to a chunk's end.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check zarr==3.1.6 h5py==3.16.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import h5py
import numpy as np
import zarr

array = zarr.create_array(store=sys.argv[1] + "/x.zarr", shape=(10,), chunks=(8,), dtype="int32", fill_value=-1)
with h5py.File(sys.argv[1] + "/x.h5", "w") as file:
    dataset = file.create_dataset("x", (10,), "int32", chunks=(8,), maxshape=(None,), fillvalue=-1)
    for name, stored in (("zarr", array), ("HDF5", dataset)):
        stored[:] = np.arange(10)
        stored.resize((5,))
        stored.resize((10,))
        print(name, *stored[:])
PYTHON
cat >"$folder/expected" <<'EXPECTED'
zarr 0 1 2 3 4 5 6 7 -1 -1
HDF5 0 1 2 3 4 -1 -1 -1 -1 -1
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" "$folder" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
