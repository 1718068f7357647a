# Other MPI libraries, as many clusters' users meet them, in folders of their own beside .venv, so that nothing else on
# the machine sees them: those of a Debian or Ubuntu, and Intel's from PyPI. Sourced after jobs/setup.sh.
#
#   ready_other KIND   gets debian-mpich, debian-openmpi or intel; prints why it can't be had, or nothing
#   use_other KIND     what runs next uses it, with .venv's Python

INTEL_VERSION=2021.16.2 # 85 MB; from 2021.17 on more than 100 MB, which is much for each run of a fresh checkout

declare -A DEBIAN_PACKAGES=([debian-mpich]="mpich" [debian-openmpi]="openmpi-bin")
declare -A DEBIAN_LIBRARIES=([debian-mpich]="libmpich.so.12" [debian-openmpi]="libmpi.so.40")

other_folder() { echo "$ROOT/.venv-$1"; }

ready_other() {
    local folder log why
    folder=$(other_folder "$1")
    log=$folder/log
    [ ! -e "$folder/.installed" ] || return 0
    rm -rf "$folder" && mkdir -p "$folder"
    why=$("get_${1%%-*}" "$1" "$log")
    [ -z "$why" ] || { echo "$why" && return; }
    (use_other "$1" && check_ranks "${LAUNCHER[0]}") >>"$log" 2>&1 ||
        { echo "two ranks don't find each other: $(tail -n 1 "$log")" && return; }
    touch "$folder/.installed"
}

use_other() {
    run_anywhere
    export OMP_NUM_THREADS=1
    unset MPI4PY_MPIABI OPAL_PREFIX PMIX_PREFIX PRTE_PREFIX
    "use_${1%%-*}" "$1" "$(other_folder "$1")"
}

# --- Intel's ----------------------------------------------------------------------------------------------------------
get_intel() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --ignore-installed \
        --prefix "$(other_folder "$1")" "impi-rt==$INTEL_VERSION" >"$2" 2>&1 || echo "pip: $(tail -n 1 "$2")"
}

use_intel() {
    export PATH=$2/bin:$VENV/bin:$PATH MPI4PY_LIBMPI=$2/lib/libmpi.so.12 LD_LIBRARY_PATH=$2/lib
    export I_MPI_ROOT=$2 FI_PROVIDER_PATH=$2/lib
    LAUNCHER=(mpiexec.hydra)
}

# --- Debian's ---------------------------------------------------------------------------------------------------------
get_debian() {
    local folder package
    folder=$(other_folder "$1")
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || { echo "there is no apt-get" && return; }
    [ "$(id -u)" -eq 0 ] || { echo "apt-get needs root" && return; }
    mkdir -p "$folder/archives/partial"
    fetch_debian "$1" >"$2" 2>&1 || { apt-get update && fetch_debian "$1"; } >>"$2" 2>&1 ||
        { echo "apt-get: $(tail -n 1 "$2")" && return; }
    for package in "$folder"/archives/*.deb; do
        dpkg -x "$package" "$folder" >>"$2" 2>&1 || { echo "dpkg: $(tail -n 1 "$2")" && return; }
    done
    rm -r "$folder/archives"
    complete_debian "$1" >>"$2" 2>&1 || echo "links: $(tail -n 1 "$2")"
}

fetch_debian() {
    apt-get install -y --no-install-recommends --download-only \
        -o "Dir::Cache::archives=$(other_folder "$1")/archives" ${DEBIAN_PACKAGES[$1]}
}

debian_libraries() { dirname "$(find "$(other_folder "$1")/usr/lib" -name "${DEBIAN_LIBRARIES[$1]}" | head -n 1)"; }

# What the packages' own scripts and a system's linker would do.
complete_debian() {
    local libraries
    libraries=$(debian_libraries "$1")
    if [ "$1" = debian-mpich ]; then
        ln -s libmpich.so.12 "$libraries/libmpi.so.12" # the name that mpi4py wants
    else
        mkdir -p "$libraries/openmpi/share"
        ln -sfn "$(other_folder "$1")/usr/share/openmpi" "$libraries/openmpi/share/openmpi"
    fi
}

use_debian() {
    local libraries
    libraries=$(debian_libraries "$1")
    export PATH=$2/usr/bin:$VENV/bin:$PATH MPI4PY_LIBMPI=$libraries/${DEBIAN_LIBRARIES[$1]}
    export LD_LIBRARY_PATH=$libraries:$2/lib/$(basename "$libraries")
    if [ "$1" = debian-openmpi ]; then
        export OPAL_PREFIX=$libraries/openmpi OMPI_MCA_mca_base_component_path=$libraries/openmpi/lib/openmpi3
        export OMPI_MCA_mca_base_component_show_load_errors=0 # of networks whose libraries are not there
        LAUNCHER=(mpirun.openmpi)
    else
        LAUNCHER=(mpiexec.hydra)
    fi
}
