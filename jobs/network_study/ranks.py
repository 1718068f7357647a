"""What runs on each host: `ranks.py FOLDER DATA RUNS WANTED`; rank 0 appends each run to RUNS as it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from network_study.hosts import Cable, Hosts
from network_study.training import measure_network, train

import hpcdist as hd

DEADLINE_S = 120


def main(folder: Path, data: Path, runs: Path, wanted: Path) -> None:
    comm, made = hd.init(deadline_s=DEADLINE_S, across="tcp:eth0"), Hosts(folder)
    for settings in json.loads(wanted.read_text()):
        cable = Cable(**settings["network"])
        comm.barrier()
        if comm.rank == 0:
            made.shape(cable)
        network = measure_network(comm, cable.mbit_s)

        if comm.rank == 0:
            # Not without the delay: TCP may take the shortest round trip of the last 10 s for the network's (BBR).
            made.shape(Cable(delay_ms=cable.delay_ms))
        comm.barrier()
        measured = {**train(comm, data, settings, lambda: made.shape(cable)), **network}
        if comm.rank == 0:
            with open(runs, "a") as file:
                file.write(json.dumps({"settings": settings, "measured": measured}) + "\n")
            said = f"{settings['setup']} at {cable}: {measured['steps']} steps, {measured['train_s']:.1f} s"
            print(said, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
