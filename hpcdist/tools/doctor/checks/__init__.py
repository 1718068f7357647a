"""The doctor's checks: one file each, found by the file's name. `world` comes first, the others in alphabetical order.

A check is a module with two functions::

    measure(comm, nodes, required) -> dict   Collective. Return plain values, complete on rank 0; bounded in time.
    judge(measured, nodes, required) -> Iterable[Finding]   Report what these values mean; a pure function.
"""
