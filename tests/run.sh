#!/usr/bin/env bash
# Runs all tests: in one process (those on a Slurm cluster, too), on 1 to 4 ranks with Open MPI, and on 4 with MPICH.
# Installs what is missing.
# Arguments are pytest's:  bash tests/run.sh -k ring
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../jobs/setup.sh"

# Why tests/cluster can't run here; nothing if they can.
why_no_cluster() {
    PYTHONPATH=$ROOT/tests "$VENV/bin/python" -c 'from cluster.kit import why_not; print(why_not() or "")'
}

# Installs Debian's Slurm for tests/cluster, as root. They are skipped where that is not possible; with
# HPCDIST_CLUSTER=require that is an error.
ready_cluster() {
    local packages log=$VENV/cluster.log
    mapfile -t packages <"$ROOT/tests/cluster/kit/packages"
    NO_CLUSTER=$(why_no_cluster)
    if [ -n "$NO_CLUSTER" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        say "installing Slurm for tests/cluster: ${packages[*]}"
        apt "${packages[@]}" >"$log" 2>&1 || { apt-get update && apt "${packages[@]}"; } >>"$log" 2>&1 ||
            tail -n 5 "$log" >&2
        NO_CLUSTER=$(why_no_cluster)
    fi
    [ -z "$NO_CLUSTER" ] || [ "${HPCDIST_CLUSTER-}" != require ] || fail "tests/cluster must run; got: $NO_CLUSTER"
}

apt() { RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; } # starts no daemons

# Builds Horovod beside what runs meanwhile: minutes the first time, then it is taken from the user's cache. Tests that
# need it wait for the lock on .venv/.horovod.
begin_horovod() {
    HOROVOD_LOG=$VENV/horovod.log
    exec 8>"$VENV/.horovod"
    flock --nonblock 8 || { say "waiting for another build of Horovod" && flock 8; }
    say "building Horovod meanwhile; its messages are in $HOROVOD_LOG"
    build_horovod >"$HOROVOD_LOG" 2>&1 &
    HOROVOD=$!
    exec 8>&-
}

build_horovod() {
    export PIP_CONSTRAINT=$CONSTRAINTS
    command -v cmake >/dev/null || python -m pip install cmake
    python -m hpcdist horovod build
}

end_horovod() {
    local start=$SECONDS verdict=passed
    wait "$HOROVOD" || { verdict="FAILED ($?)" && STATUS=1 && cat "$HOROVOD_LOG"; }
    VERDICTS+=("$(printf '%-12s %4d s   %s' "$verdict" $((SECONDS - start)) "hpcdist horovod build (its last seconds)")")
}

ready
ready_mpich
ready_cluster
cd "$ROOT"
trap 'exit 130' INT # else an interrupted run would be followed by the next one

COLOR=--color=no
[ ! -t 1 ] || COLOR=--color=yes # a rank can't tell: the launcher gives it a terminal of its own
ARGUMENTS=("$@")
VERDICTS=()
STATUS=0
OPTIONS=()

# run LAUNCHER...: pytest with OPTIONS under that launcher, or without one
run() {
    local start=$SECONDS status=0 verdict=passed given=(${OPTIONS[@]+"${OPTIONS[@]}"} ${ARGUMENTS[@]+"${ARGUMENTS[@]}"})
    local name="${*+$* }pytest${given[*]+ ${given[*]}}"
    say "$name"
    "$@" python -m pytest "$COLOR" ${given[@]+"${given[@]}"} || status=$?
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
begin_horovod
OPTIONS=(--numprocesses 2 --dist loadfile -m "not cluster and not alone") # many tests wait for jobs that they start
run
OPTIONS=(-m "cluster or alone")
run
OPTIONS=()
end_horovod
for n in 1 2 3 4; do
    run mpirun -n "$n"
done
use_mpich
say "$(mpichversion --version | head -n 1)"
run mpiexec -n 4

[ -z "$NO_CLUSTER" ] || VERDICTS+=("$(printf '%-12s          %s' SKIPPED "tests/cluster: $NO_CLUSTER")")
say "verdicts"
printf '%s\n' "${VERDICTS[@]}"
exit "$STATUS"
