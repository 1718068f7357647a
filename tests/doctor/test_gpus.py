"""GPUs: what the driver tells, and what is wrong with it."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pynvml
import pytest
from readings import changed

from harness.cases import each
from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Nodes, Requirements, find_nodes
from hpcdist.tools.doctor.checks import gpus

NODES = Nodes(("n1", "n2"), (0, 0, 1, 1))


class Driver:
    """NVIDIA's library on a node with two GPUs, the second of which has no counter of memory errors."""

    NVMLError, NVMLError_LibraryNotFound = pynvml.NVMLError, pynvml.NVMLError_LibraryNotFound
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, i: int) -> int:
        return i

    def nvmlDeviceGetUUID(self, i: int) -> str:
        return ("GPU-aaaa", "GPU-bbbb")[i]

    def nvmlDeviceGetName(self, i: int) -> str:
        return ("NVIDIA H200", "NVIDIA A100-SXM4-80GB")[i]

    def nvmlDeviceGetMemoryInfo(self, i: int) -> SimpleNamespace:
        return SimpleNamespace(total=(143771, 81920)[i] << 20, free=(143156, 81037)[i] << 20)

    def nvmlDeviceGetTotalEccErrors(self, i: int, kind: int, since: int) -> int:
        if i:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, i: int) -> int:
        return (0x1, 0x40)[i]

    def nvmlDeviceGetComputeRunningProcesses(self, i: int) -> list[SimpleNamespace]:
        return [] if i else [SimpleNamespace(pid=17), SimpleNamespace(pid=18)]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid == 18:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return "python, x"


def fine() -> dict:
    row = {"name": "NVIDIA H200", "total_mb": 1000, "free_mb": 990, "ecc_errors": 0, "reasons": 1}
    told = {name: {"gpus": [{"uuid": f"{name}-{i}", **row} for i in (0, 1)], "processes": []} for name in NODES.names}
    seen = [{"count": 2, "uuid": f"{NODES.name(rank)}-{rank % 2}"} for rank in range(4)]
    return {"ranks": seen, "nodes": told}


def judge(measured: dict, wanted: bool = False):
    return list(gpus.judge(measured, NODES, Requirements(gpus=wanted)))


def test_what_the_driver_tells(monkeypatch):
    monkeypatch.setattr(gpus, "nvml", Driver())
    told = gpus.driver()
    first, second = told["gpus"]
    assert first == {
        "uuid": "GPU-aaaa", "name": "NVIDIA H200", "total_mb": 143771, "free_mb": 143156, "ecc_errors": 0, "reasons": 1
    }  # fmt: skip
    assert second["ecc_errors"] is None and second["reasons"] == 0x40
    assert told["processes"] == [["GPU-aaaa", "17", "python, x"], ["GPU-aaaa", "18", "unknown"]]


def test_ranks_tell_what_they_see(ranks):
    def body(comm):
        nodes = find_nodes(comm, "host")
        measured = gpus.measure(comm, nodes, Requirements())
        return measured, list(gpus.judge(measured, nodes, Requirements(gpus=True)))

    for measured, found in ranks(body):
        if measured["ranks"][0]["count"] == 0:
            assert found[0].status == ERROR and "every rank must see a GPU; got none." in found[0].text


def test_a_driver_that_fails_is_told(monkeypatch):
    def fail(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    for call, text in (
        ("nvmlInit", "the GPU driver must answer; got Driver Not Loaded"),
        ("nvmlDeviceGetHandleByIndex", "the GPU driver must report each GPU; got Driver Not Loaded"),
    ):
        monkeypatch.setattr(gpus, "nvml", found := Driver())
        monkeypatch.setattr(found, call, fail)
        with pytest.raises(OSError, match=text):
            gpus.driver()


def test_without_a_driver_there_is_nothing_to_tell(monkeypatch):
    def fail():
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(gpus, "nvml", found := Driver())
    monkeypatch.setattr(found, "nvmlInit", fail)
    assert gpus.driver() is None
    measured = fine()
    measured["nodes"] = {"n1": None, "n2": None}
    (found,) = judge(measured)
    assert found.text == "each rank sees 2 and has a separate one; no NVIDIA driver: health unknown"


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA driver")
def test_the_real_driver_answers():
    told = gpus.driver()
    assert told["gpus"] and all(gpu["uuid"].startswith("GPU-") and gpu["total_mb"] for gpu in told["gpus"])


# --- what is said -----------------------------------------------------------------------------------------------------
BLIND = [{"count": 0, "uuid": None}] * 4
NODES_FAULT = {"error": "the GPU driver's answer did not end within 8 s."}


@each(
    "case",
    [
        ({}, OK, (), "each rank sees 2 and has a separate one (NVIDIA H200), free and healthy"),
        ({"ranks": BLIND, "nodes": dict.fromkeys(NODES.names)}, OK, (), "none"),
        ({"ranks": BLIND}, OK, (), "none visible to torch, though the driver has some on n1, n2"),
        ({"ranks.2": {"count": 1, "uuid": "x"}, "ranks.3": {"count": 1, "uuid": "y"}}, ERROR, ("n2",),
         "all ranks must see the same number of GPUs; got 1 on ranks 2-3 (n2) and 2 on others."),
        ({"ranks.1.uuid": "n1-0"}, WARNING, (), "each rank must have a separate GPU; got ranks 0-1 on n1-0 (n1)"),
        ({"nodes.n2.gpus.1.ecc_errors": 3}, ERROR, ("n2",), "n2: NVIDIA H200 n2-1 has 3 uncorrected memory errors."),
        ({"nodes.n2.gpus.1.reasons": 0x48}, WARNING, ("n2",), "n2: NVIDIA H200 n2-1 is slowed down by hardware, heat."),
        ({"nodes.n2.gpus.1.free_mb": 500}, WARNING, ("n2",),
         "n2: NVIDIA H200 n2-1 is in use by somebody: 500 of 1000 MiB are free"),
        ({"nodes.n1.processes": [["n1-0", "4711", "python"]]}, WARNING, ("n1",),
         "n1: NVIDIA H200 n1-0 is in use by process 4711 (python): 990 of"),
        ({"nodes.n2": NODES_FAULT}, ERROR, ("n2",), "n2: the GPU driver's answer did not end"),
    ],
)  # fmt: skip
def test_what_is_said_of_gpus(case):
    change, status, nodes, text = case
    (found,) = judge(changed(fine(), change))
    assert (found.status, found.nodes) == (status, nodes) and found.text.startswith(text)


def test_none_is_an_error_where_some_are_wanted():
    (found,) = judge({"ranks": BLIND, "nodes": dict.fromkeys(NODES.names)}, wanted=True)
    assert found.status == ERROR and found.nodes == ()
