#!/usr/bin/env bash
# adios2: a transposed or strided NumPy array is written as its memory lies, not as it is indexed.
#
# Guess: write() copies an array that is not C-contiguous, or refuses it, as its message for unknown types says ("not
# memory contiguous").
# Seen: adios2 2.12.1.1001, numpy 2.4.6. Stream.write takes the address and the shape alone. x.T comes back as x in the
# shape of x.T, a Fortran-ordered copy of x comes back scrambled, and of x[::2] the first half of x comes back. Nothing
# warns. np.ascontiguousarray before the write is the way out.
# Why it matters: weights are often transposed views (a Linear layer's weight.T, channels_last images, columns of a
# table); a file in this HPC format then has the right names, shapes and types, and wrong contents.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check adios2==2.12.1.1001 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import numpy as np
from adios2 import FileReader, Stream

x = np.arange(6).reshape(2, 3)
views = {"transposed": x.T, "fortran": np.asfortranarray(x), "strided": np.arange(6)[::2]}
with Stream(sys.argv[1], "w") as stream:
    for name, view in views.items():
        stream.write(name, view, view.shape, [0] * view.ndim, view.shape)
with FileReader(sys.argv[1]) as file:
    for name, view in views.items():
        print(name, "wrote", view.tolist(), "read", file.read(name).tolist())
PYTHON
cat >"$folder/expected" <<'EXPECTED'
transposed wrote [[0, 3], [1, 4], [2, 5]] read [[0, 1], [2, 3], [4, 5]]
fortran wrote [[0, 1, 2], [3, 4, 5]] read [[0, 3, 1], [4, 2, 5]]
strided wrote [0, 2, 4] read [0, 1, 2]
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" "$folder/x.bp" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
