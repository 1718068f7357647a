"""A cluster under Slurm on this machine: a controller and nodes, each a host of its own, joined by real TCP.

Each host is a set of namespaces (`jobs/studies/kit/hosts.py`: network, name, processes, mounts, shared memory) with an
address, a /tmp and a /dev/shm of its own, and nodes have GPUs that are none; the files are common to all, as on a
cluster. Slurm is the real one. Needs root, Debian's packages (`packages`, and `packages-accounting` for
`made(accounting=True)`) and nothing else: no systemd, no control groups.

    def test_it(cluster, workdir):                        # fixtures of tests/cluster/conftest.py
        cluster.run("srun", "-N4", "hostname").stdout     # on the controller, in `workdir`
        cluster.run("ls", on="n2", check=False)           # on a node; `.returncode` is the command's
        job = cluster.submit("#!/bin/bash\\nsrun hostname\\n", "-N2", cwd=workdir)
        cluster.wait(job)["JobState"]                     # "COMPLETED"; a failure raises and shows the output
        cluster.shape("n2", mbit_s=50)                    # its cable; None: as fast as the machine is
        cluster.kill("n2"); cluster.start("n2")           # a power failure, and back

`cluster` is made once for all tests and is given back as it was found: who kills or shapes a node starts or unshapes
it again (`with cluster.shaped("n2", mbit_s=50): ...`).

What runs on a host sees this process's environment, with what MPI needs here (`SETTINGS`) and without what a launcher
left in it. `folder` is common to all hosts; what a test writes must be below it, as `workdir` is, for each host's /tmp
is its own. Everything ends with this process, however that ends; files that it leaves when it is killed, the next one
deletes.
"""

from cluster.kit.cluster import PACKAGES, SETTINGS, Cluster, delete_left_behind, made, mpich, why_not

__all__ = ["PACKAGES", "SETTINGS", "Cluster", "delete_left_behind", "made", "mpich", "why_not"]
