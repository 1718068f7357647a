"""Tools as a build finds them."""

from hpcdist.tools.horovod.tools import Tools

FOUND = Tools(
    cxx="/usr/bin/g++",
    cxx_version="x86_64-linux-gnu 12",
    cmake="/usr/bin/cmake",
    mpicxx="/env/bin/mpicxx",
    mpi_version="Open MPI v5.0.11",
    mpi_folder="/env/lib",
    torch="2.13.0",
    cxx11_abi=True,
    python="3.11.7",
)
