"""The doctor's checks, one file each, found by file name: `world` first, the others in alphabetical order.

A check is a module with two functions::

    measure(comm, nodes, required) -> dict   Collective. Return plain values, complete on rank 0; bounded in time.
    judge(measured, nodes, required) -> Iterable[Finding]   Interpret the values; a pure function.
"""
