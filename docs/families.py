"""Record who sends what to whom in each family of strategies, from runs on virtual ranks, for the figures of pages.

    python docs/families.py    # docs/data/family-NAME.csv; then python docs/plots.py draws docs/figures/family-NAME.svg

Four ranks train a vector of 400 kB over links of 100 MB/s, and one rank needs half as long again for each step. The
same seed gives the same run, so the files are the same at every call.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from hpcdist import strategies
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.traced import end_timeline, start_timeline
from hpcdist.comm.virtual import Constant, Network, Straggler, run_virtual
from hpcdist.model.flat import FlatModel

RANKS, STEPS, SHOWN_MS = 4, 12, 90.0
NETWORK = Network(latency_s=50e-6, bandwidth_bytes_s=100e6)
COMPUTE = Straggler(Constant(8e-3), rank=3, factor=1.5)
LEAST_BYTES = 1000  # messages below it arrange the exchange, such as counters and flags
FAMILIES = {  # one strategy of each, with its options
    "synchronous": ("allreduce", {}),
    "servers": ("parameter_server", {}),
    "gossip": ("gossip_push", {}),
    "local": ("local_sgd", {"period": 3}),
    "compressed": ("allreduce", {"compression": {"name": "topk", "ratio": 0.01}}),
}


class Row(NamedTuple):
    """A computation of a rank, or a message; times in milliseconds from the first step."""

    rank: int
    to: int | str  # "" for a computation
    start_ms: float
    end_ms: float
    n_bytes: int | str


def train(comm: Communicator, path: Path, name: str, options: dict) -> None:
    """Collective. Train a line by a strategy, and write what all ranks do to a timeline."""
    comm = start_timeline(comm, path)
    torch.manual_seed(0)
    model = torch.nn.Linear(100_000, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    algorithm = strategies.load(name)
    strategy = algorithm(algorithm.Config.model_validate(options), comm.split(0), FlatModel(model))
    if not strategy.is_worker:
        strategy.serve(optimizer.step)
    else:
        for _ in range(STEPS):
            comm.compute()
            optimizer.zero_grad()
            model(torch.randn(8, 100_000)).square().mean().backward()
            strategy.step(optimizer.step)
        strategy.pause()
    strategy.close()
    end_timeline(comm)


def rows_of(events: list[dict]) -> list[Row]:
    """Take the computations and the messages from a timeline, up to the moment at which the figure ends."""
    computed = [event for event in events if event.get("cat") == "compute"]
    zero_us = min(event["ts"] for event in computed)

    def ms(us: float) -> float:
        return round((us - zero_us) / 1e3, 2)

    found = [Row(e["pid"], "", ms(e["ts"]), ms(e["ts"] + e["dur"]), "") for e in computed]
    arrived = {e["args"]["received"]: e for e in events if "received" in e.get("args", ())}
    for event in events:
        details = event.get("args", {})
        n_bytes, last = details.get("bytes", 0), event.get("ts", 0.0) + event.get("dur", 0.0)
        if n_bytes < LEAST_BYTES or event.get("ts", 0.0) < zero_us:
            continue
        if "sent" in details:
            receive = arrived[details["sent"]]
            found.append(
                Row(event["pid"], receive["pid"], ms(event["ts"]), ms(receive["ts"] + receive["dur"]), n_bytes)
            )
        elif event["cat"] == "window" and "to" in details:
            to = details["to"] if isinstance(details["to"], list) else [details["to"]]
            found += [Row(event["pid"], rank, ms(event["ts"]), ms(last), n_bytes // len(to)) for rank in to]
        elif event["cat"] == "window" and "from" in details:
            found.append(Row(details["from"], event["pid"], ms(event["ts"]), ms(last), n_bytes))
    return sorted((row for row in found if row.start_ms < SHOWN_MS), key=lambda row: (row.start_ms, row.rank))


def record(family: str) -> list[Row]:
    """Run the strategy of a family on virtual ranks."""
    name, options = FAMILIES[family]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        run_virtual(lambda comm: train(comm, path, name, options), RANKS, network=NETWORK, compute=COMPUTE)
        return rows_of(json.loads(path.read_text())["traceEvents"])


def main() -> None:
    for family in FAMILIES:
        path = Path(__file__).parent / "data" / f"family-{family}.csv"
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([("rank", "to", "start_ms", "end_ms", "bytes"), *record(family)])


if __name__ == "__main__":
    main()
