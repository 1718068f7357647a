"""The energy of a run, by the counters of processors and GPUs. Nothing is estimated where there is no counter.

References: Intel, "Software developer's manual", volume 3B, "Platform specific power management support" (RAPL), as
Linux shows it in /sys/class/powercap; NVIDIA, "NVML reference", nvmlDeviceGetTotalEnergyConsumption.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

SYSFS = Path("/sys")
EVERY_S = 20.0  # seconds between reads of processors' counters, which may wrap around in a minute under load
CPU, GPU = "cpu", "gpu"  # sources
Joules = Callable[[], float]  # a counter: returns the joules since some moment; never decreases


class Energy(BaseModel):
    """The energy of a run, from its start to its last evaluation."""

    model_config = ConfigDict(extra="allow")

    joules: float | None = Field(None, description="of all sources; none if no source was measured")
    sources: dict[str, float] = Field(
        default_factory=dict,
        description="joules of the processors' packages (cpu), of the GPUs that ranks compute on (gpu)",
    )
    not_measured: str | None = Field(None, description="sources that are missing in the joules, and why")


class EnergyMeter:
    """Measures the joules of this rank's share of the hardware, from its construction on.

    Args:
        counters: by source, a function that opens its counters; without sources that another rank measures.
    """

    def __init__(self, counters: Mapping[str, Callable[[], Sequence[Joules]]]):
        self.missing: dict[str, str] = {}  # by source: why it is not measured, from its first failure on
        self._counters: dict[str, Sequence[Joules]] = {}
        for source, open_counters in counters.items():
            try:
                self._counters[source] = open_counters()
            except OSError as error:
                self.missing[source] = str(error)
        self._start = self.read()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read_regularly, name="hpcdist-energy", daemon=True)
        if CPU in self._counters:
            self._thread.start()

    def joules(self) -> dict[str, float]:
        """Return the joules since the construction, by source."""
        return {source: now - self._start[source] for source, now in self.read().items()}

    def read(self) -> dict[str, float]:
        """Return the counters' joules by source, without sources that have failed."""
        joules_of = {}
        for source, counters in self._counters.items():
            try:
                joules_of[source] = sum(counter() for counter in counters)
            except OSError as error:
                self.missing.setdefault(source, str(error))
        return {source: joules for source, joules in joules_of.items() if source not in self.missing}

    def _read_regularly(self) -> None:
        """Read the counters now and then, so that none wraps around unnoticed."""
        while not self._ended.wait(EVERY_S):
            self.read()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()


Sums = tuple[dict[str, float], dict[str, str]]  # joules by source, and reasons by source


def add_up(parts: Iterable[tuple[Mapping[str, float], Mapping[str, str]]]) -> Sums:
    """Add up joules by source, and collect the reasons for missing sources."""
    joules: dict[str, float] = {}
    missing: dict[str, str] = {}
    for part, reasons in parts:
        for source, value in part.items():
            joules[source] = joules.get(source, 0.0) + value
        missing = {**reasons, **missing}
    return joules, missing


def energy_of(joules: Mapping[str, float], missing: Mapping[str, str]) -> Energy:
    """Return the energy of a run. A source that is missing on any rank is dropped, as its sum would be incomplete."""
    sources = {source: value for source, value in joules.items() if source not in missing}
    reasons = "; ".join(f"{source}: {reason}" for source, reason in sorted(missing.items()))
    return Energy(joules=sum(sources.values()) if sources else None, sources=sources, not_measured=reasons or None)


# --- processors -------------------------------------------------------------------------------------------------------
class Package:
    """The counter of one processor, which wraps around. Threads may share it. Raises OSError if it can't be read."""

    def __init__(self, folder: Path):
        self._file, self._lock = folder / "energy_uj", threading.Lock()
        self._range = _number(folder / "max_energy_range_uj") + 1
        self._last, self._total = _number(self._file), 0

    def __call__(self) -> float:
        """Return the joules since the construction."""
        with self._lock:
            now = _number(self._file)
            self._total += (now - self._last) % self._range  # right even if the counter has wrapped around once
            self._last = now
            return 1e-6 * self._total


def packages(root: Path = SYSFS) -> list[Package]:
    """Return the counters of this host's processors (whole packages); raise OSError if there are none to be read."""
    folder = root / "class" / "powercap"
    zones = [zone for zone in sorted(folder.glob("intel-rapl:*")) if zone.name.count(":") == 1]
    names = {zone: (zone / "name").read_text().strip() for zone in zones if (zone / "name").exists()}
    package_zones = [zone for zone, name in names.items() if name.startswith("package")]
    if not package_zones:
        raise OSError(f"no counter of processors (RAPL) in {folder}")
    return [Package(zone) for zone in package_zones]


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except PermissionError:
        raise OSError(f"{path} can't be read by this user; the site may let its users") from None
    except (OSError, ValueError) as error:
        raise OSError(f"{path} can't be read ({error})") from None


# --- GPUs -------------------------------------------------------------------------------------------------------------
class NvidiaGpu:
    """A GPU of NVIDIA's, by its UUID; raises OSError if there is no driver."""

    def __init__(self, uuid: str):
        try:
            import pynvml as nvml
        except ImportError:
            raise OSError("nvidia-ml-py is not installed: pip install 'hpcdist[tools]'") from None
        self.nvml: Any = nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise OSError(f"no driver of NVIDIA's answers ({error})") from None
        self.uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"

    def query(self, function: str) -> Any:
        """Return the result of NVML's function `function` for this GPU; raise NVMLError if there is no such value."""
        return getattr(self.nvml, function)(self.nvml.nvmlDeviceGetHandleByUUID(self.uuid))

    def used(self) -> tuple[float | None, int | None]:
        """Return the utilisation (0 to 1) and the bytes of memory in use; None for a value that NVML does not have."""
        values: list[Any] = []
        for function, field, unit in (("UtilizationRates", "gpu", 0.01), ("MemoryInfo", "used", 1)):
            try:
                values.append(getattr(self.query(f"nvmlDeviceGet{function}"), field) * unit)
            except self.nvml.NVMLError:
                values.append(None)
        return values[0], values[1]


class GpuCounter:
    """The joules of a GPU since its driver was loaded; raises OSError if there is no counter, as for parts (MIG)."""

    def __init__(self, uuid: str):
        self._gpu = NvidiaGpu(uuid)
        self()

    def __call__(self) -> float:
        try:
            return 1e-3 * self._gpu.query("nvmlDeviceGetTotalEnergyConsumption")
        except self._gpu.nvml.NVMLError as error:
            raise OSError(f"{self._gpu.uuid} does not count its energy ({error})") from None
