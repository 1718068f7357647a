"""Test a build of Horovod: import it, and sum by it on two ranks, each of which runs this module as a program."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcdist.comm.launch import unlaunched
from hpcdist.errors import BuildError

LIMIT_S = 180.0
DEADLINE_S = 60.0  # of the sum itself
COUNTS = (1, 1000, 100_003)
RANKS = 2

# Let two ranks run on any machine, also for root in a container; the user's settings win.
ANYWHERE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def environment(environ: Mapping[str, str], unpacked: Path | None) -> dict[str, str]:
    """Return the environment of a new job, without the variables of this one's launcher.

    Its ranks import this package, and Horovod from `unpacked`, or from the environment if that is None.
    """
    environ = unlaunched(environ)
    here = str(Path(__file__).parents[3])
    path = [str(unpacked)] if unpacked is not None else []
    path += [here, *filter(None, [environ.get("PYTHONPATH")])]
    return {**ANYWHERE, **environ, "PYTHONPATH": os.pathsep.join(path)}


def prove(launcher: Sequence[str], environ: Mapping[str, str], log: Path, unpacked: Path | None = None) -> dict:
    """Sum by Horovod on two ranks, and return their report: ranks, devices, and the features of the build.

    Args:
        launcher: the command that starts ranks, up to their number.
        log: a file to which the ranks' output is appended.
        unpacked: a folder with an unpacked wheel; by default the one that is installed.

    Raises:
        BuildError: Horovod does not import, or does not sum.
    """
    environ = environment(environ, unpacked)
    done = _run([sys.executable, "-c", "import torch, horovod.torch as hvd; hvd.init"], environ, log)
    if done.returncode:
        raise BuildError(f"import: `import horovod.torch` must work; got: {_last(done)} Log: {log}")
    command = [*launcher, str(RANKS), sys.executable, "-m", "hpcdist.tools.horovod.check"]
    done = _run(command, environ, log)
    try:
        report = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        report = {}
    if done.returncode or report.get("ranks") != RANKS:
        got = f"worlds of {report['ranks']}" if not done.returncode and "ranks" in report else _last(done)
        raise BuildError(
            f"two-rank check: `{shlex.join(command)}` must sum on {RANKS} ranks; got {got} Name the launcher of that "
            f"MPI, --launcher 'srun --mpi=pmix -n', or see what its ranks say. Log: {log}"
        )
    return report


def _run(command: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.CompletedProcess[str]:
    with log.open("a") as out:
        out.write(f"$ {shlex.join(command)}\n")
        out.flush()
        with subprocess.Popen(
            command, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as job:
            try:
                stdout, stderr = job.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                job.terminate()  # so that the launcher ends its ranks, which would outlive a kill
                stdout, stderr = job.communicate()
                stderr += f"\nnothing within {LIMIT_S:g} s"
        out.write(stdout + stderr)
    return subprocess.CompletedProcess(command, job.returncode, stdout, stderr)


def _last(done: subprocess.CompletedProcess[str]) -> str:
    """Return the exit status and the last line of the output, as the end of a sentence."""
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip(" -*\n")]
    return f"exit status {done.returncode}, {lines[-1] if lines else 'no message'!r}."


def main() -> None:
    """Collective. Compare sums by Horovod with the expected ones; rank 0 prints a report as JSON."""
    import torch

    from hpcdist.comm.external.horovod import Horovod, built_with
    from hpcdist.comm.mpi.world import world

    comm = world(deadline_s=DEADLINE_S)
    reduce = Horovod(comm)
    devices = ["cpu"]
    if "NCCL" in built_with() and torch.cuda.device_count() >= comm.size:
        devices.append(f"cuda:{comm.rank}")
    for device in devices:
        for dtype in (torch.float32, torch.float64):
            for count in COUNTS:
                ramp = torch.arange(count, dtype=dtype, device=device)
                tensor = ramp * (comm.rank + 1)
                reduce(tensor)
                if not torch.equal(tensor, ramp * (comm.size * (comm.size + 1) // 2)):
                    print(f"rank {comm.rank}: a wrong sum of {count} {dtype} on {device}", file=sys.stderr, flush=True)
                    comm.abort(1)
    reduce.close()
    if comm.rank == 0:
        print(json.dumps({"ranks": comm.size, "devices": [d[:4].strip(":") for d in devices], "built": built_with()}))


if __name__ == "__main__":
    main()
