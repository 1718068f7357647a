#!/usr/bin/env bash
# Runs the tests: those in one process, with those on a Slurm cluster and the linters beside them, then those for real
# ranks on 4 of Open MPI's. With --all also what these leave out: tests marked `extended` or `alone`, Horovod's own build,
# tests for 1 and 3 ranks and those marked `computes` on real ranks, MPICH, Debian's MPI libraries and Intel's.
# Installs what is missing. Keeps how long each test took in .venv/durations.
#
#   bash tests/run.sh [--all] [pytest's arguments, such as -k ring]
#
# HPCDIST_HOROVOD_TESTS=FOLDER: run Horovod's own tests, test_torch.py and test_adasum_pytorch.py of 0.28.1, too.
# HPCDIST_TEST_MINUTES=60: of what --all adds at the end, only parts begin that should end by then.
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

# --- what runs beside the tests in one process ------------------------------------------------------------------------
declare -A BESIDE
begin() { # NAME COMMAND...
    say "$1, meanwhile; its messages come after the others'"
    timed "$@" >"$LOGS/$1.log" 2>&1 &
    BESIDE[$1]=$!
}

timed() {
    local start=$SECONDS status=0
    "${@:2}" || status=$?
    echo $((SECONDS - start)) >"$LOGS/$1.seconds"
    return "$status"
}

end() { # NAME
    local status=0
    wait "${BESIDE[$1]}" || status=$?
    unset "BESIDE[$1]"
    say "$1"
    cat "$LOGS/$1.log"
    judge "$status" "$(cat "$LOGS/$1.seconds")" "$1 (beside the tests in one process)"
}

# Rules of the source: what ruff finds, its format, types of the public API, layers of imports.
lint() { ruff check --quiet && ruff format --check --quiet && mypy && lint-imports --no-logo; }

test_cluster() { tested cluster python -m pytest "$COLOR" -m cluster $ALL ${ARGUMENTS[@]+"${ARGUMENTS[@]}"}; }

# Takes minutes the first time; then Horovod is in the user's cache. Tests that need it wait for the lock on .venv/.horovod.
build_horovod() {
    export PIP_CONSTRAINT=$CONSTRAINTS
    { command -v cmake >/dev/null || python -m pip install cmake; } && flock 8 && python -m hpcdist horovod build
} 8>"$VENV/.horovod"

# --- what --all adds --------------------------------------------------------------------------------------------------
# fits SECONDS NAME: true where a part that takes so long on a quiet machine of 2 cores should end in time; else the
# verdicts name it.
fits() {
    [ $(($1 + SECONDS)) -gt $((${HPCDIST_TEST_MINUTES:-1000000} * 60)) ] || return 0
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
    run "$1" "${LAUNCHER[@]}" -n 2 -- "${OTHER_TESTS[@]}" -k "not leave_nothing_behind"
    VERDICTS[-1]+=" ($1)"
}

run_rest() {
    local kind
    if fits 180 "tests marked alone"; then run alone -- --all -m alone; fi
    use_mpich
    say "$(mpichversion --version | head -n 1)"
    if fits 220 "MPICH on 4 ranks"; then run mpich mpiexec -n 4; fi
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
    if [ "$argument" = --all ]; then ALL=--all; else ARGUMENTS+=("$argument"); fi
done
VERDICTS=()
STATUS=0
DURATIONS=$VENV/durations # of each test, as JUnit's XML
rm -rf "$DURATIONS" && mkdir -p "$DURATIONS"

# run NAME [LAUNCHER...] [-- OPTION...]: pytest with these options and the script's, under that launcher or without one
run() {
    local start=$SECONDS status=0 launcher=() given name file=$1
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        launcher+=("$1") && shift
    done
    given=("${@:2}" ${ARGUMENTS[@]+"${ARGUMENTS[@]}"})
    name="${launcher[*]+${launcher[*]} }pytest${given[*]+ ${given[*]}}"
    say "$name"
    tested "$file" ${launcher[@]+"${launcher[@]}"} python -m pytest "$COLOR" ${given[@]+"${given[@]}"} || status=$?
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

# Prints the slowest tests of all runs: the duration, the test's name and the run's.
show_slowest() {
    python - "$DURATIONS" <<'EOF'
import sys
from pathlib import Path
from xml.etree import ElementTree

found = [
    (float(case.get("time")), f"{case.get('classname')}::{case.get('name')}  {file.stem}")
    for file in Path(sys.argv[1]).glob("*.xml")
    for case in ElementTree.parse(file).iter("testcase")
]
for duration_s, name in sorted(found, reverse=True)[:100]:
    print(f"{duration_s:7.1f} s   {name}")
EOF
}

use_openmpi
PRTE_MCA_prte_tmpdir_base=$(mktemp -d) # what a killed mpirun leaves stops a later one that has its process id
export PRTE_MCA_prte_tmpdir_base
LATER=$(mktemp) # the names of tests that passed only when they were run again
LOGS=$(mktemp -d)
trap 'rm -rf "$PRTE_MCA_prte_tmpdir_base" "$LATER" "$LOGS"; for pid in "${BESIDE[@]}"; do pkill -P "$pid" || true; done' EXIT
say "$(python -V), $(ompi_info --version | head -n 1)"
[ -z "$ALL" ] || begin horovod build_horovod
begin linters lint
begin cluster test_cluster
# More processes than cores, as many tests wait for jobs. The cluster's tests, which have bounds of time, come first.
run plain nice -n 5 -- --numprocesses 3 --dist loadfile --no-loadscope-reorder $ALL -m "not cluster and not alone"
end linters
end cluster
[ -z "$ALL" ] || end horovod
run openmpi mpirun -n 4 -- $ALL
[ -z "$ALL" ] || run_rest

if [ -n "$NO_CLUSTER" ]; then
    VERDICTS+=("$(printf '%-12s          %s' SKIPPED "tests/cluster: $NO_CLUSTER")")
elif [ -n "$NO_ACCOUNTING" ]; then
    VERDICTS+=("$(printf '%-12s          %s' SKIPPED "tests/cluster/test_accounting.py: $NO_ACCOUNTING")")
fi
say "the slowest tests"
show_slowest
say "verdicts, after $SECONDS s"
printf '%s\n' "${VERDICTS[@]}"
[ ! -s "$LATER" ] || sed 's/^/passed only when run again: /' "$LATER"
exit "$STATUS"
