#!/usr/bin/env bash
# Runs all tests: in one process (those on a Slurm cluster, too), on 1 to 4 ranks with Open MPI, and on 4 with MPICH.
# Installs what is missing.
# Arguments are pytest's:  bash tests/run.sh -k ring
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../jobs/setup.sh"

# Installs Debian's Slurm for tests/cluster, as root, and then what its accounting needs. Tests whose packages can't be
# had are skipped; with HPCDIST_CLUSTER=require that is an error.
ready_cluster() {
    NO_CLUSTER=$(ready_for "" packages)
    NO_ACCOUNTING=$NO_CLUSTER
    [ -n "$NO_CLUSTER" ] || NO_ACCOUNTING=$(ready_for accounting=True packages-accounting)
    [ -z "$NO_ACCOUNTING" ] || [ "${HPCDIST_CLUSTER-}" != require ] ||
        fail "tests/cluster must run; got: $NO_ACCOUNTING"
}

# ready_for KIND PACKAGES: installs the packages if there can't be such a cluster yet; prints why there still can't.
ready_for() {
    local packages log=$VENV/cluster.log
    mapfile -t packages <"$ROOT/tests/cluster/kit/$2"
    if [ -n "$(why_no_cluster "$1")" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        say "installing Slurm for tests/cluster: ${packages[*]}" >&2
        apt "${packages[@]}" >"$log" 2>&1 || { apt-get update && apt "${packages[@]}"; } >>"$log" 2>&1 ||
            tail -n 5 "$log" >&2
    fi
    why_no_cluster "$1"
}

why_no_cluster() {
    PYTHONPATH=$ROOT/tests "$VENV/bin/python" -c "from cluster.kit import why_not; print(why_not($1) or '')"
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
PRTE_MCA_prte_tmpdir_base=$(mktemp -d) # what a killed mpirun leaves stops a later one that has its process id
export PRTE_MCA_prte_tmpdir_base
trap 'rm -rf "$PRTE_MCA_prte_tmpdir_base"' EXIT
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

if [ -n "$NO_CLUSTER" ]; then
    VERDICTS+=("$(printf '%-12s          %s' SKIPPED "tests/cluster: $NO_CLUSTER")")
elif [ -n "$NO_ACCOUNTING" ]; then
    VERDICTS+=("$(printf '%-12s          %s' SKIPPED "tests/cluster/test_accounting.py: $NO_ACCOUNTING")")
fi
say "verdicts"
printf '%s\n' "${VERDICTS[@]}"
exit "$STATUS"
