#!/usr/bin/env bash
# netCDF4: the pixel 255 of an image in uint8 is read as missing.
#
# Guess: a variable without a _FillValue, all of whose elements were written, has no missing values.
# Seen: netCDF4 1.7.5.1.post1, numpy 2.4.6. Reading gives a masked array in which each 255 (uint8), 65535 (uint16) and
# -32767 (int16) that was written is masked, since these are the library's default fill values (as documented). The
# mean of the image leaves its white pixels out. np.asarray has the values again, so two paths through one program
# disagree.
# Why it matters: images and packed data of the weather and climate field are stored so; the mean and deviation that
# normalize a data set are computed without the brightest pixels, and the model trains on all of them.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check netCDF4==1.7.5.1.post1 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import netCDF4
import numpy as np

with netCDF4.Dataset(sys.argv[1], "w") as file:
    file.createDimension("x", 4)
    for kind, values in (("uint8", [0, 100, 200, 255]), ("uint16", [0, 1, 2, 65535]), ("int16", [0, 1, 2, -32767])):
        variable = file.createVariable(kind, kind, ("x",))
        variable[:] = np.array(values, kind)
with netCDF4.Dataset(sys.argv[1]) as file:
    for kind, variable in file.variables.items():
        read = variable[:]
        wrote = np.asarray(read)
        print(kind, "wrote", *wrote, "read", *read, "mean", read.mean(), "of np.asarray", wrote.mean())
PYTHON
cat >"$folder/expected" <<'EXPECTED'
uint8 wrote 0 100 200 255 read 0 100 200 -- mean 100.0 of np.asarray 138.75
uint16 wrote 0 1 2 65535 read 0 1 2 -- mean 1.0 of np.asarray 16384.5
int16 wrote 0 1 2 -32767 read 0 1 2 -- mean 1.0 of np.asarray -8191.0
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" "$folder/x.nc" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
