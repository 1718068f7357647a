#!/usr/bin/env bash
# Runs all tests: in one process, on 1 to 4 ranks with Open MPI, and on 4 with MPICH. Installs what is missing.
# Arguments are pytest's:  bash tests/run.sh -k ring
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../jobs/setup.sh"

ready
ready_mpich
cd "$ROOT"
trap 'exit 130' INT # else an interrupted run would be followed by the next one

COLOR=--color=no
[ ! -t 1 ] || COLOR=--color=yes # a rank can't tell: the launcher gives it a terminal of its own
ARGUMENTS=("$@")
VERDICTS=()
STATUS=0

# run LAUNCHER...: pytest under that launcher, or without one
run() {
    local start=$SECONDS status=0 verdict=passed name="${*+$* }pytest${ARGUMENTS[*]+ ${ARGUMENTS[*]}}"
    say "$name"
    "$@" python -m pytest "$COLOR" ${ARGUMENTS[@]+"${ARGUMENTS[@]}"} || status=$?
    if [ "$status" -eq 5 ] && [ ${#ARGUMENTS[@]} -gt 0 ]; then
        verdict="no tests"
    elif [ "$status" -ne 0 ]; then
        verdict="FAILED ($status)"
        STATUS=1
    fi
    VERDICTS+=("$(printf '%-12s %4d s   %s' "$verdict" $((SECONDS - start)) "$name")")
}

use_openmpi
say "$(python -V), $(ompi_info --version | head -n 1)"
run
for n in 1 2 3 4; do
    run mpirun -n "$n"
done
use_mpich
say "$(mpichversion --version | head -n 1)"
run mpiexec -n 4

say "verdicts"
printf '%s\n' "${VERDICTS[@]}"
exit "$STATUS"
