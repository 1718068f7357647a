"""Test Horovod: each of several ranks runs this module as a program, which compares sums with the expected ones."""

from __future__ import annotations

import json
import sys

DEADLINE_S = 60.0
COUNTS = (1, 1000, 100_003)


def main() -> None:
    """Collective. Sum by Horovod; rank 0 prints the ranks, their devices and the build's features as JSON."""
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
                reduce.all_reduce(tensor)
                if not torch.equal(tensor, ramp * (comm.size * (comm.size + 1) // 2)):
                    print(f"rank {comm.rank}: a wrong sum of {count} {dtype} on {device}", file=sys.stderr, flush=True)
                    comm.abort(1)
    reduce.close()
    if comm.rank == 0:
        print(json.dumps({"ranks": comm.size, "devices": [d[:4].strip(":") for d in devices], "built": built_with()}))


if __name__ == "__main__":
    main()
