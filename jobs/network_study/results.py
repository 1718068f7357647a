"""What was measured and foretold, run by run: the table, what it says, the figure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hpcdist.study import Run
from network_study.hosts import Cable
from network_study.setups import DENSE

SOONER = 5.0  # times as soon as dense all-reduce is what one strategy should be at 100 Mbit/s
SLOW_MBIT_S = 100
NEAR = 0.25  # relative deviation of the predicted step time that counts as agreement
COLUMNS = 120


@dataclass
class Outcome:
    """One setup on one network: its run, and its steps on virtual ranks."""

    run: Run
    predicted: Run

    @property
    def network(self) -> Cable:
        return Cable(**self.run.settings["network"])

    @property
    def setup(self) -> str:
        return self.run.settings["setup"]

    @property
    def target_s(self) -> float | None:
        """Seconds of training until the first look at or above the target; None if there was none."""
        return self.run.measured["train_s"] if self.run.measured["reached"] else None

    @property
    def resolution_s(self) -> float:
        """Seconds between the last two looks."""
        *_, before, last = [[0, 0.0, 0.0], *self.run.measured["curve"]]
        return last[1] - before[1]

    @property
    def ratio(self) -> float:
        """Predicted step time over the measured one."""
        return self.predicted.measured["step_s"] / self.run.measured["step_s"]


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
        """How many times sooner than dense all-reduce it reaches the target on the same network."""
        dense = next(o for o in self.on(outcome.network) if o.setup == DENSE)
        return None if outcome.target_s is None or dense.target_s is None else dense.target_s / outcome.target_s

    def rows(self) -> Iterator[dict[str, Any]]:
        for outcome in self.outcomes:
            measured, target_s, sooner = outcome.run.measured, outcome.target_s, self.sooner(outcome)
            yield {
                "network": str(outcome.network),
                "setup": outcome.setup,
                "target [s]": "not reached" if target_s is None else f"{target_s:.2f}",
                "- s": f"{outcome.resolution_s:.2f}",
                "sooner": "" if sooner is None else f"{sooner:.1f} x",
                "steps": measured["steps"],
                "MB/step": f"{measured['bytes_per_step'] / 1e6:.3g}",
                "step [s]": f"{measured['step_s']:.3f}",
                "predicted": f"{outcome.predicted.measured['step_s']:.3f}",
                "ratio": f"{outcome.ratio:.2f}",
            }

    def network_rows(self) -> Iterator[dict[str, Any]]:
        """What messages had on each network, beside what the cables were made for."""
        for network in self.networks:
            found = [outcome.run.measured for outcome in self.on(network)]
            latencies, bandwidths = (sorted(m[name] for m in found) for name in ("latency_s", "bandwidth_bytes_s"))
            middle = len(found) // 2
            yield {
                "network": str(network),
                "latency [ms]": f"{1e3 * latencies[middle]:.2f}",
                "bandwidth [Mbit/s]": f"{8e-6 * bandwidths[middle]:.1f}",
            }

    def text(self) -> str:
        paragraphs = (*self._races(), self._agreement())
        return "\n\n".join(textwrap.fill(text, COLUMNS, break_on_hyphens=False) for text in paragraphs)

    def _races(self) -> Iterator[str]:
        for network in self.networks:
            if network.mbit_s == SLOW_MBIT_S:
                found = [(sooner, o.setup) for o in self.on(network) if (sooner := self.sooner(o)) and o.setup != DENSE]
                best = max(found, default=(0.0, "no other"))
                verdict = "SHOWN" if best[0] >= SOONER else "NOT SHOWN"
                listed = ", ".join(f"{setup} {sooner:.1f}" for sooner, setup in sorted(found, reverse=True))
                yield (
                    f"At {network} one strategy reaches the target {SOONER:g} times sooner than dense all-reduce: "
                    f"{verdict}. Times sooner: {listed or 'none, as they or all-reduce did not reach it'}."
                )

    def _agreement(self) -> str:
        off = [o for o in self.outcomes if abs(o.ratio - 1) > NEAR]
        listed = "; ".join(f"{o.setup} at {o.network} {o.ratio:.2f}" for o in off)
        agreed = len(self.outcomes) - len(off)
        verdict = "NOT SHOWN" if agreed == 0 else "SHOWN IN PART" if off else "SHOWN"
        return (
            f"The virtual cluster's step time is within {NEAR:.0%} of the measured one: {verdict}, for {agreed} of "
            f"{len(self.outcomes)}. {f'Predicted over measured where not: {listed}.' if off else ''}"
        ).strip()

    def draw(self, path: Path) -> None:
        """Accuracy against seconds of training: a panel per network, a line per setup."""
        figure = Figure(figsize=(3.4 * len(self.networks), 3.6), layout="constrained")
        panels = figure.subplots(1, len(self.networks), sharey=True, squeeze=False)[0]
        for axes, network in zip(panels, self.networks, strict=True):
            for outcome in self.on(network):
                _, seconds, accuracies = zip(*outcome.run.measured["curve"], strict=True)
                axes.plot(seconds, accuracies, marker=".", label=outcome.setup)
            axes.axhline(outcome.run.settings["target"], color="grey", linewidth=0.8, linestyle=":")
            axes.set(xscale="log", xlabel="seconds of training", title=str(network))
        panels[0].set_ylabel("accuracy on the test set")
        panels[0].legend(fontsize="x-small")
        figure.savefig(path, dpi=150)
