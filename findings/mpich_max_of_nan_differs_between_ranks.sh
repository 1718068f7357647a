#!/usr/bin/env bash
# MPICH's MPI_MAX with a NaN: Allreduce leaves different values on different ranks.
#
# Guess: a NaN is kept or ignored, but all ranks get the same result of an Allreduce.
# Seen: mpich 5.0.2 (PyPI), mpi4py 4.1.2, 2 ranks with one double each. If rank 0 has NaN and rank 1 has 1, one rank's
# maximum is NaN, and the other rank's is 1. MPI_MIN does the same, and MPI_SUM gives NaN everywhere. A comparison with
# NaN is false, so the result depends on which operand is first, and that is not the same one on both ranks.
# Why it matters: the largest gradient (for clipping, loss scales, or a test for overflow) decides what all ranks do
# next. Here one rank skips a step and the other takes it, and the ranks no longer make the same calls.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mpich==5.0.2 mpi4py==4.1.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
for name in ("MAX", "MIN", "SUM"):
    for kind in ("float32", "float64"):
        own, total = np.array([np.nan if comm.rank == 0 else 1.0], kind), np.zeros(1, kind)
        comm.Allreduce(own, total, getattr(MPI, name))
        results = comm.gather(total.item())
        if comm.rank == 0:
            print(name, kind, "of nan and 1: rank 0 has", results[0], "and rank 1 has", results[1])
PYTHON
cat >"$folder/expected" <<'EXPECTED'
MAX float32 of nan and 1: rank 0 has 1.0 and rank 1 has nan
MAX float64 of nan and 1: rank 0 has 1.0 and rank 1 has nan
MIN float32 of nan and 1: rank 0 has 1.0 and rank 1 has nan
MIN float64 of nan and 1: rank 0 has 1.0 and rank 1 has nan
SUM float32 of nan and 1: rank 0 has nan and rank 1 has nan
SUM float64 of nan and 1: rank 0 has nan and rank 1 has nan
EXPECTED
export PATH=$folder/venv/bin:$PATH MPI4PY_LIBMPI=$folder/venv/lib/libmpi.so.12
unset MPI4PY_MPIABI
mpiexec -n 2 python "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
