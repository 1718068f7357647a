"""Energy: counters that move and wrap around, those that can't be read, and what becomes of a run's sum."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hpcdist.comm.single_rank import SingleRankCommunicator
from hpcdist.comm.virtual import run_virtual
from hpcdist.records import energy, read_evaluations
from hpcdist.records.energy import EnergyMeter, GpuCounter, NvidiaGpu, Package, add_up, energy_of, packages
from hpcdist.train import log, loop
from hpcdist.train.energy import RunEnergy
from train import tiny

RANGE_UJ = 262_143_328_850


class Sysfs:
    """A tree as in /sys: two packages, parts of one of them, and the whole board."""

    def __init__(self, root):
        self.root, self.zones = root, root / "class" / "powercap"
        names = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:1": "package-1"}
        for zone, name in {**names, "intel-rapl:2": "psys"}.items():
            folder = self.zones / zone
            folder.mkdir(parents=True)
            (folder / "name").write_text(f"{name}\n")
            (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
            (folder / "energy_uj").write_text("1000000\n")

    def set(self, zone, uj):
        (self.zones / zone / "energy_uj").write_text(f"{uj}\n")


@pytest.fixture
def sysfs(tmp_path):
    return Sysfs(tmp_path)


def test_packages_are_counted_and_their_parts_are_not(sysfs):
    meter = EnergyMeter({"cpu": lambda: packages(sysfs.root)})
    sysfs.set("intel-rapl:0", 3_000_000)
    sysfs.set("intel-rapl:1", 1_500_000)
    for zone in ("intel-rapl:0:0", "intel-rapl:2"):
        sysfs.set(zone, 9_000_000)
    assert meter.joules() == {"cpu": pytest.approx(2.5)} and meter.missing == {}
    meter.close()


def test_a_counter_that_wraps_around(sysfs):
    sysfs.set("intel-rapl:0", RANGE_UJ - 999_999)
    package = Package(sysfs.zones / "intel-rapl:0")
    sysfs.set("intel-rapl:0", 2_000_000)
    assert package() == pytest.approx(3.0)
    sysfs.set("intel-rapl:0", 1_999_999)
    assert package() == pytest.approx(3.0 + RANGE_UJ * 1e-6), "once more, and all the way round"


def test_counters_are_looked_at_between_so_that_none_wraps_around_twice(sysfs, monkeypatch):
    monkeypatch.setattr(energy, "EVERY_S", 0.001)
    looked = []
    meter = EnergyMeter({"cpu": lambda: [lambda: float(looked.append(1) or len(looked))]})
    while len(looked) < 4:
        pass
    meter.close()


def test_what_cannot_be_read_is_missing_with_the_reason(sysfs, tmp_path, monkeypatch):
    meter = EnergyMeter({"cpu": lambda: packages(tmp_path / "other")})
    assert meter.joules() == {} and "no counter of processors (RAPL) in " in meter.missing["cpu"]
    (path := sysfs.zones / "intel-rapl:0" / "energy_uj").unlink()
    with pytest.raises(OSError, match="intel-rapl:0/energy_uj can't be read"):
        packages(sysfs.root)

    def refused(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_text", refused)
    with pytest.raises(OSError, match="energy_uj can't be read by this user; the site may let its users"):
        energy._number(path)


def test_a_counter_that_fails_later_is_missing_from_then_on(sysfs):
    meter = EnergyMeter({"cpu": lambda: packages(sysfs.root)})
    sysfs.set("intel-rapl:1", "x")
    assert meter.joules() == {} and "intel-rapl:1/energy_uj can't be read (invalid literal" in meter.missing["cpu"]
    sysfs.set("intel-rapl:1", 5_000_000)
    assert meter.joules() == {}
    meter.close()


# --- GPUs -------------------------------------------------------------------------------------------------------------
class Nvml(SimpleNamespace):
    """A driver of one GPU that counts 5 J with each look."""

    class NVMLError(Exception):
        pass

    def __init__(self, fails=None):
        super().__init__(mj=0)
        self.fails = fails

    def nvmlInit(self):
        self._fail("init")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1"
        return 1

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self._fail("count")
        self.mj += 5000
        return self.mj

    def _fail(self, where):
        if self.fails == where:
            raise self.NVMLError("Not Supported")


def test_a_gpu_counts_millijoules_or_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    meter = EnergyMeter({"gpu": lambda: [GpuCounter("1")]})
    assert meter.joules() == {"gpu": 5.0}
    meter.close()
    for fails, reason in (("init", "no driver of NVIDIA's answers (Not S"), ("count", "GPU-1 does not count its en")):
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(fails))
        meter = EnergyMeter({"gpu": lambda: [GpuCounter("GPU-1")]})
        assert meter.joules() == {} and reason in meter.missing["gpu"]


def test_a_gpu_tells_its_use_or_not(monkeypatch):
    class Busy(Nvml):
        def nvmlDeviceGetUtilizationRates(self, handle):
            return SimpleNamespace(gpu=75)

        def nvmlDeviceGetMemoryInfo(self, handle):
            self._fail("memory")
            return SimpleNamespace(used=4096)

    for fails, used in ((None, (0.75, 4096)), ("memory", (0.75, None))):
        monkeypatch.setitem(sys.modules, "pynvml", Busy(fails))
        assert NvidiaGpu("1").used() == used


# --- sums -------------------------------------------------------------------------------------------------------------
def test_a_source_that_one_rank_misses_is_not_the_runs():
    sums = add_up([({"cpu": 10.0, "gpu": 5.0}, {}), ({"gpu": 5.0}, {}), ({}, {"cpu": "not on n2"})])
    assert sums == ({"cpu": 10.0, "gpu": 10.0}, {"cpu": "not on n2"})
    found = energy_of(*sums)
    assert (found.joules, found.sources, found.not_measured) == (10.0, {"gpu": 10.0}, "cpu: not on n2")
    assert energy_of({}, {"cpu": "none"}).joules is None


@pytest.mark.sizes(1, 3)
def test_the_first_rank_of_a_host_measures_it(ranks, shared_tmp_path):
    root = shared_tmp_path

    def body(comm):
        comm.platform.virtual = None  # whatever the ranks are
        if comm.rank == 0:
            Sysfs(root)
        comm.barrier()
        run = RunEnergy(comm, torch.device("cpu"), root)
        run.start()
        comm.barrier()
        if comm.rank == 0:
            Sysfs.set(SimpleNamespace(zones=root / "class" / "powercap"), "intel-rapl:0", 8_000_000)
        comm.barrier()
        found = run.result()
        run.close()
        return found.joules, found.sources, found.not_measured

    assert ranks(body) == [(pytest.approx(7.0), {"cpu": pytest.approx(7.0)}, None)] * ranks.size


def test_a_run_that_goes_on_has_the_energy_of_its_starts(sysfs):
    def start(saved=None):
        run = RunEnergy(SingleRankCommunicator(), None, sysfs.root)
        if saved is not None:
            run.load_state(saved)
        run.start()
        return run

    first = start()
    sysfs.set("intel-rapl:0", 4_000_000)
    second = start(first.state())
    sysfs.set("intel-rapl:0", 5_000_000)
    assert second.result().joules == pytest.approx(4.0)
    third = start([])
    assert third.result().joules is None
    assert third.result().not_measured == "cpu: the checkpoint that the run was resumed from does not contain it"
    for run in (first, second, third):
        run.close()


def test_evaluations_have_the_joules_before_them(sysfs, tmp_path, monkeypatch):
    evaluate = loop.evaluate

    def costly(*given):
        sysfs.set("intel-rapl:0", int((sysfs.zones / "intel-rapl:0" / "energy_uj").read_text()) + 2_000_000)
        return evaluate(*given)

    monkeypatch.setattr(log, "RunEnergy", partial(RunEnergy, root=sysfs.root))
    monkeypatch.setattr(loop, "evaluate", costly)

    def whole(comm):
        comm.platform.virtual = None  # as if they were real
        return tiny.run(comm, tmp_path, "epochs=2")[0].energy.joules

    assert run_virtual(whole, 2)[0] == pytest.approx(8.0), "two evaluations of two ranks"
    found = read_evaluations(tmp_path / "run")
    assert len(found) == 2 and 0.0 <= found[0].joules <= 2.0 and 4.0 <= found[1].joules <= 6.0


def test_a_summary_has_the_energy_or_why_not(tmp_path):
    found = tiny.uninterrupted(1, tmp_path, "epochs=1")
    assert found.energy.not_measured == "the ranks are virtual" and found.joules_per_sample is None
    measured = found.model_copy(update={"energy": energy_of({"cpu": 2.0 * found.samples}, {})})
    assert measured.joules_per_sample == 2.0
    old = found.model_dump()
    del old["energy"]
    assert type(found).model_validate(old).energy.not_measured == "an older version of hpcdist made the run"
