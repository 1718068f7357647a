"""Parse the description of a virtual cluster: `50us,10Gbit/s` and `jitter:20ms,0.2`, as options or in a TOML file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

from hpcdist.comm.virtual import ComputeModel, Constant, Exponential, Jitter, Network, Replay, SlowSteps, Straggler
from hpcdist.config.merge import load
from hpcdist.config.settings import Field, Settings
from hpcdist.errors import ConfigError
from hpcdist.records import read_records

_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?)"
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_BYTES = {"bit": 1 / 8, "B": 1.0}
MEASURED = "measured"
MODELS = (
    "SECONDS, constant:SECONDS, jitter:SECONDS,CV, exponential:SECONDS, straggler:RANK,FACTOR,SECONDS, "
    "slow:PART,FACTOR,SECONDS, replay:RUN"
)

StepSeconds = Callable[[float | None], float]  # converts the given seconds of a step, None: to be measured


class ClusterConfig(Settings):
    """A virtual cluster: the links between its ranks, and the times of their steps."""

    network: str = Field("20us,10Gbit/s", "latency and bandwidth of each link")
    intra_network: str | None = Field(None, "the same for ranks of one node; none: as network")
    ranks_per_node: int | None = Field(None, "ranks on each node; none is one", ge=1)
    compute: str = Field(MEASURED, f"{MEASURED}, or {MODELS}; SECONDS may be `{MEASURED}`")

    def links(self) -> Network:
        """Return the network; raise ConfigError if a link can't be parsed."""
        intra_node = (None, None) if self.intra_network is None else _link(self.intra_network, "intra_network")
        return Network(*_link(self.network, "network"), self.ranks_per_node, *intra_node)

    def described(self) -> str:
        """Return the compute model as the user wrote it, with the parsed time in seconds."""
        times: list[float] = []
        # append returns None, so that the parser gets 1.0 for each time.
        self.steps(lambda given_s: times.append(given_s or 0.0) or 1.0)  # type: ignore[func-returns-value]
        return f"{self.compute} ({times[0]:g} s)" if len(set(times)) == 1 and times[0] else self.compute

    def steps(self, step_s: StepSeconds) -> ComputeModel:
        """Return the model of step times, in seconds from `step_s`; raise ConfigError if `compute` can't be parsed."""
        return _model(self.compute, step_s)


def read_cluster(path: Path | None, network: str | None, compute: str | None) -> ClusterConfig:
    """Read a cluster from a TOML file and options, which override it, and check all settings.

    Raises:
        ConfigError: there is no such file, or a setting is wrong.
    """
    options = {"network": network, "compute": compute}
    values = load({}, path) | {key: value for key, value in options.items() if value is not None}
    cluster = ClusterConfig.from_mapping(values, "cluster")
    cluster.links()  # raises ConfigError
    cluster.steps(lambda given_s: 1.0 if given_s is None else given_s)  # also; 1 s in place of a measured time
    return cluster


def _link(text: str, name: str) -> tuple[float, float]:
    """Parse `50us,10Gbit/s`: return seconds and bytes per second; `name` is the setting's, for messages."""
    latency, comma, bandwidth = text.partition(",")
    if not comma:
        raise ConfigError(f"{name} must be LATENCY,BANDWIDTH; got {text!r}. Write it as 50us,10Gbit/s.")
    return seconds(latency, f"latency of {name}"), bytes_per_second(bandwidth, f"bandwidth of {name}")


def _model(text: str, step_s: StepSeconds) -> ComputeModel:
    """Parse a compute model such as `jitter:20ms,0.2`, with times from `step_s`; some wrap another model."""
    name, colon, rest = text.strip().partition(":")
    if not colon:
        name, rest = "constant", name
    parts = [part.strip() for part in rest.split(",")]

    def parsed_s(part: str) -> float:
        return step_s(None if part == MEASURED else seconds(part, "compute"))

    if name == "constant" and len(parts) == 1:
        return Constant(parsed_s(parts[0]))
    if name == "jitter" and len(parts) == 2:
        return Jitter(parsed_s(parts[0]), number(parts[1], "the CV of compute"))
    if name == "exponential" and len(parts) == 1:
        return Exponential(parsed_s(parts[0]))
    if name == "straggler" and len(parts) >= 3 and parts[0].isdigit():
        rank, factor, base = rest.split(",", 2)
        return Straggler(_model(base, step_s), int(rank), number(factor, "the factor of compute"))
    if name == "slow" and len(parts) >= 3:
        part, factor, base = rest.split(",", 2)
        labels = "the part of slow steps", "the factor of compute"
        return SlowSteps(_model(base, step_s), number(part, labels[0]), number(factor, labels[1]))
    if name == "replay":
        if not Path(rest).is_dir():
            raise ConfigError(f"compute must be replay:RUN with a run's folder; got {text!r}, which does not exist.")
        records = read_records(rest)
        return Replay(rest, [[step_s(record.computing_s) for record in records[rank]] for rank in sorted(records)])
    raise ConfigError(f"compute must be {MEASURED}, {MODELS}; got {text!r}.")


# --- units ------------------------------------------------------------------------------------------------------------
def seconds(text: str, name: str) -> float:
    """Parse a time: `50us`, `20 ms`, `1.5s`, or a number of seconds; `name` is the setting's, for the message."""
    match = re.fullmatch(rf"{_NUMBER} ?(ns|us|µs|ms|s|)", text.strip())
    if match is None:
        raise ConfigError(f"{name} must be a time in ns, us, ms or s; got {text.strip()!r}. Write it as 50us or 20ms.")
    return float(match[1]) * _SECONDS[match[2]]


def bytes_per_second(text: str, name: str) -> float:
    """Parse a bandwidth: `10Gbit/s`, `1.25 GB/s`, `100MiB/s`, or `inf`; `name` as for `seconds`."""
    if text.strip() == "inf":
        return math.inf
    match = re.fullmatch(rf"{_NUMBER} ?(|k|M|G|T|Ki|Mi|Gi)(bit|B)/s", text.strip())
    if match is None:
        raise ConfigError(
            f"{name} must be a bandwidth in bit/s or B/s, with k, M or G before it; got {text.strip()!r}. Write it as "
            "10Gbit/s or 1.25GB/s; inf is no limit."
        )
    return float(match[1]) * _PREFIXES[match[2]] * _BYTES[match[3]]


def number(text: str, name: str) -> float:
    """Parse a plain number; `name` as for `seconds`."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} must be a number; got {text.strip()!r}.") from None
