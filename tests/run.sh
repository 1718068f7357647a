#!/usr/bin/env bash
# Runs the tests: those in one process, with those on a Slurm cluster beside them, and on 2 and 4 ranks with Open MPI those
# for real ranks. With --all also what these leave out: tests marked `extended` or `alone`, Horovod's own build, MPICH,
# Debian's MPI libraries and Intel's, 1 and 3 ranks, and tests marked `computes` on real ranks. Installs what is missing.
#
#   bash tests/run.sh [--all] [pytest's arguments, such as -k ring]
#
# HPCDIST_HOROVOD_TESTS=FOLDER: run Horovod's own tests, test_torch.py and test_adasum_pytorch.py of 0.28.1, too.
# HPCDIST_TEST_MINUTES=60: of what --all adds, only parts begin that should end by then; the verdicts name the others.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../jobs/setup.sh"
source "$ROOT/tests/other_mpi.sh"
source "$ROOT/tests/tested.sh"

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
    local why packages log=$VENV/cluster.log
    mapfile -t packages <"$ROOT/tests/cluster/kit/$2"
    why=$(why_no_cluster "$1")
    if [ -n "$why" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        say "installing Slurm for tests/cluster: ${packages[*]}" >&2
        apt "${packages[@]}" >"$log" 2>&1 || { apt-get update && apt "${packages[@]}"; } >>"$log" 2>&1 ||
            tail -n 5 "$log" >&2
        why=$(why_no_cluster "$1")
    fi
    echo "$why"
}

# Installs Debian's Chromium for tests of pages, as root; without it they are skipped.
ready_browser() {
    local log=$VENV/browser.log
    if command -v chromium >/dev/null || [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then return; fi
    say "installing Chromium for tests of pages"
    apt chromium fonts-dejavu-core >"$log" 2>&1 || { apt-get update && apt chromium fonts-dejavu-core; } >>"$log" 2>&1 ||
        tail -n 5 "$log" >&2
}

why_no_cluster() {
    PYTHONPATH=$ROOT/tests:$ROOT/jobs/studies "$VENV/bin/python" -c "from cluster.kit import why_not; print(why_not($1) or '')"
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

# Runs the tests on a Slurm cluster, most of whose time is waiting, beside those in one process.
begin_cluster() {
    CLUSTER_LOG=$VENV/cluster-tests.log CLUSTER_CACHE=$(mktemp -d)
    CLUSTER_TESTS=(python -m pytest "$COLOR" -m cluster ${ALL:+--all} ${ARGUMENTS[@]+"${ARGUMENTS[@]}"})
    say "${CLUSTER_TESTS[*]}, meanwhile; its messages come after the others'"
    "${CLUSTER_TESTS[@]}" -o cache_dir="$CLUSTER_CACHE" >"$CLUSTER_LOG" 2>&1 &
    CLUSTER=$! CLUSTER_START=$SECONDS
}

end_cluster() {
    local status=0
    wait "$CLUSTER" || status=$?
    CLUSTER=
    say "pytest -m cluster"
    cat "$CLUSTER_LOG"
    again "$status" "$CLUSTER_CACHE" "${CLUSTER_TESTS[@]}" && status=0 || status=$?
    judge "$status" $((SECONDS - CLUSTER_START)) "pytest -m cluster (beside the tests in one process)"
}

end_horovod() {
    local start=$SECONDS verdict=passed
    wait "$HOROVOD" || { verdict="FAILED ($?)" && STATUS=1 && cat "$HOROVOD_LOG"; }
    VERDICTS+=("$(printf '%-12s %4d s   %s' "$verdict" $((SECONDS - start)) "hpcdist horovod build (its last seconds)")")
}

# --- what --all adds --------------------------------------------------------------------------------------------------
# fits SECONDS NAME: true where a part that takes so long on a quiet machine of 2 cores still ends in time on this one;
# else the verdicts name it. How slow this machine is shows in the tests in one process.
fits() {
    local left=$((${HPCDIST_TEST_MINUTES:-1000000} * 60 - SECONDS))
    [ $(($1 * (PLAIN_S > PLAIN_QUIET_S ? PLAIN_S : PLAIN_QUIET_S) / PLAIN_QUIET_S)) -gt "$left" ] || return 0
    VERDICTS+=("$(printf '%-12s          %s' "LEFT OUT" "$2: takes about $1 s, of which too few are left")")
    return 1
}

# Other MPI libraries, which differ from ours in how windows work inside a node, run the tests of that.
OTHERS=(debian-mpich debian-openmpi intel)
OTHER_TESTS=(
    tests/comm/test_window.py tests/comm/test_locked_memory.py tests/collectives/test_traffic.py
    tests/strategies/test_real_equals_virtual.py
)

run_other() {
    local why
    why=$(ready_other "$1")
    if [ -n "$why" ]; then
        VERDICTS+=("$(printf '%-12s          %s' SKIPPED "MPI of $1: $why")")
        return
    fi
    use_other "$1"
    say "MPI of $1"
    run "${LAUNCHER[@]}" -n 2 -- "${OTHER_TESTS[@]}" -k "not leave_nothing_behind"
    VERDICTS[-1]+=" ($1)"
}

run_rest() {
    local kind
    if fits 330 "tests marked extended"; then
        run -- "${PLAIN[@]}" --all -m "extended and not cluster and not alone"
    fi
    if fits 180 "tests marked alone"; then run -- --all -m alone; fi
    use_mpich
    say "$(mpichversion --version | head -n 1)"
    if fits 220 "MPICH on 4 ranks"; then run mpiexec -n 4; fi
    use_openmpi
    if fits 90 "Open MPI on 3 ranks"; then run mpirun -n 3; fi
    if fits 20 "Open MPI on 1 rank"; then run mpirun -n 1; fi
    if fits 200 "tests marked computes, on 4 real ranks"; then run mpirun -n 4 -- --all -m computes; fi
    for kind in "${OTHERS[@]}"; do # the last ones: what they set stays
        if fits 30 "MPI of $kind"; then run_other "$kind"; fi
    done
}

ready
ready_mpich
ready_cluster
ready_browser
cd "$ROOT"
trap 'exit 130' INT # else an interrupted run would be followed by the next one

COLOR=--color=no
[ ! -t 1 ] || COLOR=--color=yes # a rank can't tell: the launcher gives it a terminal of its own
ALL=
ARGUMENTS=()
for argument in "$@"; do
    if [ "$argument" = --all ]; then ALL=yes; else ARGUMENTS+=("$argument"); fi
done
VERDICTS=()
STATUS=0
PLAIN=(--numprocesses 3 --dist loadfile --no-loadscope-reorder) # more processes than cores: many tests wait for jobs
PLAIN_QUIET_S=800                                               # what they take on 2 quiet cores

# run [LAUNCHER...] [-- OPTION...]: pytest with these options and the script's, under that launcher or without one
run() {
    local start=$SECONDS status=0 launcher=() given name
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        launcher+=("$1") && shift
    done
    given=("${@:2}" ${ARGUMENTS[@]+"${ARGUMENTS[@]}"})
    name="${launcher[*]+${launcher[*]} }pytest${given[*]+ ${given[*]}}"
    say "$name"
    tested ${launcher[@]+"${launcher[@]}"} python -m pytest "$COLOR" ${given[@]+"${given[@]}"} || status=$?
    judge "$status" $((SECONDS - start)) "$name"
}

# judge STATUS SECONDS NAME: what came of a run of pytest
judge() {
    local verdict=passed
    if [ "$1" -eq 5 ] && [ ${#ARGUMENTS[@]} -gt 0 ]; then
        verdict="no tests"
    elif [ "$1" -ne 0 ]; then
        verdict="FAILED ($1)"
        STATUS=1
    fi
    VERDICTS+=("$(printf '%-12s %4d s   %s' "$verdict" "$2" "$3")")
}

# Rules of the source: what ruff finds, its format, types of the public API, layers of imports.
lint() {
    local start=$SECONDS verdict=passed
    say "ruff, mypy, lint-imports"
    { ruff check --quiet && ruff format --check --quiet && mypy && lint-imports --no-logo; } ||
        { verdict="FAILED ($?)" && STATUS=1; }
    VERDICTS+=("$(printf '%-12s %4d s   %s' "$verdict" $((SECONDS - start)) "ruff, mypy, lint-imports")")
}

use_openmpi
PRTE_MCA_prte_tmpdir_base=$(mktemp -d) # what a killed mpirun leaves stops a later one that has its process id
export PRTE_MCA_prte_tmpdir_base
LATER=$(mktemp) # the names of tests that passed only when they were run again
trap 'rm -rf "$PRTE_MCA_prte_tmpdir_base" "$LATER"; [ -z "${CLUSTER-}" ] || pkill -P "$CLUSTER"' EXIT
say "$(python -V), $(ompi_info --version | head -n 1)"
[ -z "$ALL" ] || begin_horovod
lint
begin_cluster
PLAIN_S=$SECONDS
run -- "${PLAIN[@]}" -m "not cluster and not alone"
PLAIN_S=$((SECONDS - PLAIN_S))
end_cluster
[ -z "$ALL" ] || end_horovod
for n in 2 4; do
    run mpirun -n "$n"
done
[ -z "$ALL" ] || run_rest

if [ -n "$NO_CLUSTER" ]; then
    VERDICTS+=("$(printf '%-12s          %s' SKIPPED "tests/cluster: $NO_CLUSTER")")
elif [ -n "$NO_ACCOUNTING" ]; then
    VERDICTS+=("$(printf '%-12s          %s' SKIPPED "tests/cluster/test_accounting.py: $NO_ACCOUNTING")")
fi
say "verdicts"
printf '%s\n' "${VERDICTS[@]}"
[ ! -s "$LATER" ] || sed 's/^/passed only when run again: /' "$LATER"
exit "$STATUS"
