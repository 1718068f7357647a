#!/usr/bin/env bash
# Trains a small convolutional network on handwritten digits on 4 ranks, with three strategies one after the other, and
# compares them in a table. Installs what is missing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

ready
cd "$ROOT"
use_openmpi

say "training on 4 ranks with allreduce, parameter_server and gossip_pull"
mpirun -n 4 python jobs/demo.py "$@"
