#!/usr/bin/env bash
# HDF5: a virtual dataset whose source file is missing reads as zeros.
#
# Guess: reading a part whose file is not there raises an error, as an external link to it does.
# Seen: h5py 3.16.0, numpy 2.4.6. The part reads as the fill value, 0 by default, and nothing tells it from data. HDF5
# documents it. With a fill value of NaN the gap can be seen.
# Why it matters: one virtual dataset over the shards that each rank wrote is the usual way to read them as one. A
# shard that was not copied, was renamed, or lies on a file system that a node has not mounted becomes samples of zeros
# with label 0, on that node alone.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check h5py==3.16.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os

import h5py
import numpy as np

layout = h5py.VirtualLayout((2, 3), "int64")
for rank in range(2):
    with h5py.File(f"rank{rank}.h5", "w") as file:
        file["labels"] = np.full(3, rank + 7)
    layout[rank] = h5py.VirtualSource(f"rank{rank}.h5", "labels", (3,))
with h5py.File("all.h5", "w") as file:
    file.create_virtual_dataset("labels", layout)
    file["link"] = h5py.ExternalLink("rank1.h5", "labels")
os.remove("rank1.h5")
with h5py.File("all.h5") as file:
    print("virtual", file["labels"][:].tolist())
    try:
        print("link", file["link"][:].tolist())
    except KeyError:
        print("link refused")
PYTHON
cat >"$folder/expected" <<'EXPECTED'
virtual [[7, 7, 7], [0, 0, 0]]
link refused
EXPECTED
cd "$folder"
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
