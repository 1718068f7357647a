"""The energy of a run on all of its ranks, earlier starts included."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hpcdist.comm.communicator import Communicator
from hpcdist.records import energy

BOOT = Path("/proc/sys/kernel/random/boot_id")  # one for all containers of a host


class RunEnergy:
    """Measures the energy of the hosts' processors and of the ranks' GPUs, each once; `root` is sysfs's folder."""

    def __init__(self, comm: Communicator, device: torch.device | None, root: Path = energy.SYSFS):
        self._comm, self._device, self._root = comm, device, root
        self._meter: energy.EnergyMeter | None = None
        self._before: energy.Sums = {}, {}  # in earlier starts of this run
        self._resumed = False

    def start(self) -> None:
        """Collective. Start the measurement."""
        if self._comm.platform.virtual is not None:
            return
        gpu = gpu_uuid(self._device)
        devices = [device or ["", None] for device in self._comm.gather([_host(), gpu])]
        of_lower_ranks = devices[: self._comm.rank]
        makers: dict[str, Callable[[], Sequence[energy.Joules]]] = {}  # of what no lower rank measures
        if _host() not in [host for host, _ in of_lower_ranks]:
            makers[energy.CPU] = lambda: energy.packages(self._root)
        if gpu is not None and gpu not in [other for _, other in of_lower_ranks]:
            makers[energy.GPU] = lambda: [energy.GpuCounter(gpu)]
        self._meter = energy.EnergyMeter(makers)
        if self._resumed and not any(self._before):
            self._before = {}, dict.fromkeys(makers, "the checkpoint that the run was resumed from does not contain it")

    def _sums(self) -> energy.Sums:
        """Collective. Return the joules of all ranks and starts, and reasons for missing ones, by source."""
        local = ({}, {}) if self._meter is None else (self._meter.joules(), self._meter.missing)
        gathered = [part for part in self._comm.gather(local) if part is not None]
        joules, missing = energy.add_up([*gathered, self._before])
        if self._comm.failures.lost:
            missing |= dict.fromkeys(joules, f"rank {self._comm.failures.lost[0]} has failed, with its readings")
        return joules, missing

    def result(self) -> energy.Energy:
        """Collective. Return the energy of the run so far."""
        if self._comm.platform.virtual is not None:
            return energy.Energy(joules=None, not_measured="the ranks are virtual")
        return energy.energy_of(*self._sums())

    def close(self) -> None:
        if self._meter is not None:
            self._meter.close()

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state(self) -> list[dict[str, Any]]:
        """Collective. Return the joules of all ranks so far."""
        return [] if self._comm.platform.virtual is not None else list(self._sums())

    def load_state(self, saved: Sequence[Mapping[str, Any]] | None) -> None:
        """Continue from the joules of all ranks at a checkpoint; None if the checkpoint has none."""
        self._resumed = True
        self._before = (dict(saved[0]), dict(saved[1])) if saved else ({}, {})


def _host() -> str:
    return BOOT.read_text().strip() if BOOT.exists() else platform.node()


def gpu_uuid(device: torch.device | None) -> str | None:
    """Return the UUID of a GPU; None for another device."""
    if device is None or device.type != "cuda":
        return None
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", "unknown"))
