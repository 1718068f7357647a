"""Which strategy trains soonest on a slow network, measured on one, and whether virtual ranks foretell it.

    python jobs/studies/network.py          # a quarter of an hour on 2 free cores, as root; --quick: a minute
    python jobs/studies/network.py --slowest --seeds 5      # README's figure: 100 Mbit/s alone
    pip install -e '.[tools,plots]'               # what it needs beside the library; and iproute2 (ip, tc)

Real ranks on hosts of their own, which this job makes on this machine: namespaces with an address each, joined by TCP
over cables of 1 Gbit/s or 100 Mbit/s, with and without 10 ms from one host to another (`kit.hosts`).
What was chosen, and why:

- A multi-layer perceptron of 9.8 million parameters, 39 MB, on scikit-learn's 1,797 digits: large for its task, so that
  it is there after a few steps, and a step's gradient is 39 MB all the same. SGD with momentum 0.9 on every rank,
  batches of 64, at a rate at which 4 ranks learn about as fast as they can.
- Time to the target: the seconds of training, by the wall clock, until the ranks classify 85 % of the test set rightly,
  each by its own parameters, on average. They look every few steps; what that takes, and setting up, for which the
  cables are fast, is not counted. The figure is that of the first look at or above the target, so the target itself was
  reached up to `- s` seconds before. Over several seeds it is the geometric mean with its 95 % interval.
- The virtual cluster's prediction: the same training for as many steps on virtual ranks, on a network of the latency
  and the bandwidth that messages of known length have had there just before; each step computes as long as it did on
  the real rank. What a transfer costs the processor is not in it.

The folder holds the runs on real ranks as `hpcdist compare` leaves them, which are made in random order, and in
`virtual` those on virtual ranks as `hpcdist simulate` does. A run that is there is not made again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure

from hpcdist.tools.compare.plan import ComparedGroup
from hpcdist.tools.statistics import MIN_SEEDS, Interval, geometric
from kit import plots
from kit.groups import EndedRun, GroupRuns, declare_group
from kit.hosted import HostedLauncher
from kit.hosts import Cable, why_not
from kit.output import Claim, Study, start, verdict, wrap

JOB = Path(__file__).with_name("network_job.py")
LOOP = f"{JOB}:train"
DENSE = "allreduce"  # what the others are held against

# A dense all-reduce is a ring, whose messages the virtual network has too; MPI's own takes longer over such cables.
SETUPS: dict[str, dict[str, Any]] = {
    DENSE: {"name": "allreduce", "algorithm": "ring", "overlap": "off"},
    "allreduce + powersgd": {
        "name": "allreduce",
        "algorithm": "ring",
        "overlap": "off",
        "compression": {"name": "powersgd", "rank": 8},
    },
    "local_sgd": {"name": "local_sgd", "algorithm": "ring", "period": 8},
    "gossip_pull": {"name": "gossip_pull"},
    "gossip_push": {"name": "gossip_push"},
    "sgp": {"name": "sgp"},
    "strom": {"name": "strom"},
}


# --- what is run ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Scale:
    """How much is trained, where. `hidden`: units of both hidden layers; `every`: steps between two looks."""

    networks: tuple[Cable, ...] = (Cable(100), Cable(100, 10), Cable(1000), Cable(1000, 10), Cable())
    hidden: int = 3100  # 9.8 million parameters
    batch: int = 64
    rate: float = 0.1
    momentum: float = 0.9
    target: float = 0.85
    every: int = 2
    limit: int = 40

    def settings(self, setup: str) -> dict[str, Any]:
        """List all that a run depends on, but for the network and how long it goes on."""
        optimizer = {"name": "SGD", "lr": self.rate, "momentum": self.momentum}
        shape = {"model": {"hidden": self.hidden}, "batch_size": self.batch, "every": self.every}
        return {"strategy": SETUPS[setup], "optimizer": optimizer, **shape}

    def groups(self, hosts: int) -> dict[tuple[Cable, str], ComparedGroup]:
        """Declare the runs on real ranks, which end at the target."""
        end, found = {"target": self.target, "limit": self.limit}, {}
        for network in self.networks:
            cable = {name: value for name, value in vars(network).items() if value}
            for setup in SETUPS:
                settings = {**self.settings(setup), **end}
                found[network, setup] = declare_group(f"{setup}, {network}", hosts, settings, cable, LOOP)
        return found

    def predicted(self, network: Cable, setup: str, run: EndedRun) -> ComparedGroup:
        """Declare the same steps on virtual ranks, on the network and with the step times that a run has measured."""
        measured, settings = run.summary.model_extra, {**self.settings(setup), "steps": run.curve[-1].step}
        links = f"{measured['latency_s']!r}s,{measured['bandwidth_bytes_s']!r}B/s"
        cluster = {"network": links, "compute": f"replay:{run.folder}"}
        return declare_group(f"{setup}, {network}", run.summary.ranks, settings, cluster, LOOP)


QUICK = Scale(networks=(Cable(100),), hidden=1000, target=0.8)  # 1.1 million parameters


# --- the runs and their results ---------------------------------------------------------------------------------------
SOONER = 5.0  # times as soon as dense all-reduce is what one strategy should be at 100 Mbit/s
SLOW_MBIT_S = 100
NEAR = 0.25  # relative deviation of the predicted step time that counts as agreement


@dataclass
class Outcome:
    """One setup on one network: its runs, one for each seed, and the first one's steps on virtual ranks."""

    network: Cable
    setup: str
    runs: Sequence[EndedRun]
    predicted: EndedRun

    @property
    def run(self) -> EndedRun:
        return self.runs[0]

    @property
    def target(self) -> float:
        return self.run.settings["target"]

    @property
    def target_s(self) -> Interval | None:
        """Average the seconds of training until the first look at or above the target; None if a seed had none."""
        if any(run.curve[-1].metrics["accuracy"] < self.target for run in self.runs):
            return None
        return geometric([run.summary.wall_s for run in self.runs])

    @property
    def resolution_s(self) -> float:
        """Compute the seconds between the last two looks."""
        *_, before_s, last_s = [0.0, *(look.seconds for look in self.run.curve)]
        return last_s - before_s

    @property
    def steps(self) -> int:
        return self.run.curve[-1].step

    @property
    def step_s(self) -> float:
        """Compute the mean seconds of a step."""
        return self.run.summary.wall_s / self.steps

    @property
    def predicted_s(self) -> float:
        """Compute the mean seconds of a step on virtual ranks."""
        return self.predicted.summary.wall_s / self.steps

    @property
    def ratio(self) -> float:
        """Divide the predicted step time by the measured one."""
        return self.predicted_s / self.step_s


class Results:
    """All outcomes."""

    def __init__(self, outcomes: list[Outcome]):
        self.outcomes = outcomes

    def on(self, network: Cable) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.network == network]

    @property
    def networks(self) -> list[Cable]:
        return list(dict.fromkeys(outcome.network for outcome in self.outcomes))

    def sooner(self, outcome: Outcome) -> float | None:
        """Compute how many times sooner than dense all-reduce it reaches the target on the same network."""
        dense = next(o for o in self.on(outcome.network) if o.setup == DENSE)
        ours, theirs = outcome.target_s, dense.target_s
        return None if ours is None or theirs is None else theirs.mean / ours.mean

    def rows(self) -> Iterator[dict[str, Any]]:
        """Make the table: one row per setup and network."""
        for outcome in self.outcomes:
            target_s, sooner = outcome.target_s, self.sooner(outcome)
            known = target_s is not None and len(outcome.runs) >= MIN_SEEDS
            yield {
                "network": str(outcome.network),
                "setup": outcome.setup,
                "target [s]": "not reached" if target_s is None else f"{target_s.mean:.2f}",
                "95 %": f"{target_s.low:.2f} to {target_s.high:.2f}" if known else "",
                "- s": f"{outcome.resolution_s:.2f}",
                "sooner": "" if sooner is None else f"{sooner:.1f} x",
                "steps": outcome.steps,
                "MB/step": f"{outcome.run.summary.bytes_per_step / 1e6:.3g}",
                "step [s]": f"{outcome.step_s:.3f}",
                "predicted": f"{outcome.predicted_s:.3f}",
                "ratio": f"{outcome.ratio:.2f}",
            }

    def network_rows(self) -> Iterator[dict[str, Any]]:
        """Make the table of what messages had on each network, beside what the cables were made for."""
        for network in self.networks:
            found = [outcome.run.summary.model_extra for outcome in self.on(network)]
            latencies, bandwidths = (sorted(m[name] for m in found) for name in ("latency_s", "bandwidth_bytes_s"))
            middle = len(found) // 2
            yield {
                "network": str(network),
                "latency [ms]": f"{1e3 * latencies[middle]:.2f}",
                "bandwidth [Mbit/s]": f"{8e-6 * bandwidths[middle]:.1f}",
            }

    def paragraphs(self) -> list[str]:
        """Tell who is how much sooner on slow networks, and how well virtual ranks foretell steps."""
        races = [self._race(network) for network in self.networks if network.mbit_s == SLOW_MBIT_S]
        return [wrap(text) for text in (*races, self._agreement())]

    def _race(self, network: Cable) -> str:
        found = [(sooner, o.setup) for o in self.on(network) if (sooner := self.sooner(o)) and o.setup != DENSE]
        listed = ", ".join(f"{setup} {sooner:.1f}" for sooner, setup in sorted(found, reverse=True))
        claim = Claim(
            f"At {network} one strategy reaches the target {SOONER:g} times sooner than dense all-reduce:",
            [max(found, default=(0.0, ""))[0] >= SOONER],
            f"Times sooner: {listed or 'none, as they or all-reduce did not reach it'}.",
        )
        return str(claim)

    def _agreement(self) -> str:
        off = "; ".join(f"{o.setup} at {o.network} {o.ratio:.2f}" for o in self.outcomes if abs(o.ratio - 1) > NEAR)
        near = [abs(outcome.ratio - 1) <= NEAR for outcome in self.outcomes]
        agreed = f"{verdict(near)}, for {sum(near)} of {len(near)}."
        text = f"The virtual cluster's step time is within {NEAR:.0%} of the measured one: {agreed}"
        return f"{text} Predicted over measured where not: {off}." if off else text

    def figure(self) -> Figure:
        """Draw accuracy against seconds of training: a panel per network, a line per setup."""
        figure, panels = plots.panels(len(self.networks), (3.4, 3.6), sharey=True)
        for axes, network in zip(panels, self.networks, strict=True):
            for outcome in self.on(network):
                for run in outcome.runs:
                    looks = [(look.seconds, look.metrics["accuracy"]) for look in run.curve]
                    style = {"label": outcome.setup} if run is outcome.run else {"color": axes.lines[-1].get_color()}
                    axes.plot(*zip(*looks), marker=".", **style)
            axes.axhline(outcome.target, **plots.RULE)
            axes.set(xscale="log", xlabel="seconds of training", title=str(network))
        panels[0].set_ylabel("accuracy on the test set")
        panels[0].legend(fontsize="x-small")
        return figure


# --- the study --------------------------------------------------------------------------------------------------------
def main(
    output: Annotated[Path, typer.Option(help="Folder for runs, table and figure.")] = Path("runs/network"),
    quick: Annotated[bool, typer.Option(help="A small model on one network: shows how it works.")] = False,
    slowest: Annotated[bool, typer.Option("--slowest", help="The network of 100 Mbit/s alone.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each strategy on each network, with other seeds.")] = 1,
    size: Annotated[int, typer.Option("--hosts", min=2, max=4, help="Hosts, with one rank each.")] = 4,
    workers: Annotated[int, typer.Option(min=1, help="Processes for virtual ranks.")] = os.cpu_count() or 1,
) -> None:
    scale = QUICK if quick else Scale()
    if slowest:
        scale = replace(scale, networks=scale.networks[:1])
    for cable in scale.networks:
        if reason := why_not(cable):
            sys.exit(f"error: this job must be able to make hosts on this machine; {reason}.")
    output = output.resolve()  # hosts share files, and the ranks' folder may be another
    wanted = scale.groups(size)
    with GroupRuns(JOB, output, target=scale.target, launcher=HostedLauncher()) as groups:
        runs = groups.make(wanted, range(seeds))
    with GroupRuns(JOB, output / "virtual", workers) as groups:
        again = {key: scale.predicted(*key, of_seeds[0]) for key, of_seeds in runs.items()}
        ahead = groups.make(again, [0], "virtual ranks")
    results, study = Results([Outcome(*key, runs[key], *ahead[key]) for key in runs]), Study(output)

    study.table("what messages had", results.network_rows())
    title = f"{size} hosts, target {scale.target:.0%}, looked at every {scale.every} steps"
    study.write_csv("table.csv", study.table(title, results.rows()))
    study.claims(results.paragraphs())
    study.draw({"network": results.figure()})
    study.end([run for found in (runs, ahead) for of_group in found.values() for run in of_group])


if __name__ == "__main__":
    start(main)
