"""The GPUs: how many each rank sees, whether each rank has a different one, whether they are free and healthy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pynvml as nvml
import torch

from hpcdist.comm.communicator import Communicator
from hpcdist.tools.doctor import base
from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Finding, Nodes, Requirements

CALL_S = 8.0  # the driver's first call takes seconds without nvidia-persistenced
FREE = 0.9  # of the memory; the driver uses a few percent
SLOWED = {0x08: "hardware", 0x20: "heat, by the driver", 0x40: "heat", 0x80: "the power supply"}  # bits of nvml.h


# --- measuring --------------------------------------------------------------------------------------------------------
def measure(comm: Communicator, nodes: Nodes, required: Requirements) -> dict:
    """Collective. Query torch on each rank, and the driver on each node (None without a driver)."""
    local_rank = nodes.ranks(nodes.of[comm.rank]).index(comm.rank)
    query = partial(base.attempt, CALL_S, "the GPU driver's answer")
    seen = base.gather(comm, query(lambda: visible(local_rank)))
    return {"ranks": seen, "nodes": base.gather_by_node(comm, nodes, lambda: query(driver))}


def visible(number: int) -> dict:
    """Return the number of GPUs that this rank sees, and the UUID of its GPU. `number`: rank on the node."""
    count = torch.cuda.device_count()
    uuid = str(getattr(torch.cuda.get_device_properties(number % count), "uuid", "")) if count else None
    return {"count": count, "uuid": uuid}


def driver() -> dict | None:
    """Query this node's GPUs and their processes; None without a driver. Raises OSError if the driver does not work."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return None
    except nvml.NVMLError as error:
        raise OSError(f"the GPU driver must answer; got {error}") from None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = [describe(handle) for handle in handles]
        return {"gpus": gpus, "processes": [[gpu["uuid"], *user] for gpu, h in zip(gpus, handles) for user in users(h)]}
    except nvml.NVMLError as error:
        raise OSError(f"the GPU driver must report each GPU; got {error}") from None
    finally:
        nvml.nvmlShutdown()


def describe(handle: Any) -> dict:
    """Return a GPU's properties from the driver's library; None for values that it does not provide."""
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return {
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "name": nvml.nvmlDeviceGetName(handle),
        "total_mb": memory and memory.total >> 20,
        "free_mb": memory and memory.free >> 20,
        "ecc_errors": _ask(nvml.nvmlDeviceGetTotalEccErrors, handle, *kind),
        "reasons": _ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0,  # bits, see SLOWED
    }


def users(handle: Any) -> list[list[str]]:
    """Return the process id and the program of each process on a GPU."""
    pids = [process.pid for process in _ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()]
    return [[str(pid), _ask(nvml.nvmlSystemGetProcessName, pid) or "unknown"] for pid in pids]


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None  # not supported, no permission, or process ended


# --- judging ----------------------------------------------------------------------------------------------------------
def judge(measured: dict, nodes: Nodes, required: Requirements) -> Iterator[Finding]:
    """Report each problem of the nodes' GPUs, or one line if there is none."""
    findings = [*_broken(measured, nodes), *_counts(measured, nodes, required.gpus), *_sharing(measured, nodes)]
    findings += [f for name, node in measured["nodes"].items() if node and "gpus" in node for f in _health(name, node)]
    yield from findings
    if not findings:
        yield Finding(OK, _summary(measured, nodes))


def _broken(measured: dict, nodes: Nodes) -> Iterator[Finding]:
    """Report nodes where torch or the driver fails."""
    for name, node in measured["nodes"].items():
        errors = [node["error"]] if node and "error" in node else []
        rows = [measured["ranks"][rank] for rank in nodes.ranks(nodes.names.index(name))]
        errors += [row["error"] for row in rows if "error" in row]
        if errors:
            yield Finding(ERROR, f"{name}: {errors[0]}. Exclude it, and tell the site", (name,))


def _counts(measured: dict, nodes: Nodes, required: bool) -> Iterator[Finding]:
    """Report ranks that see fewer GPUs than others, and no GPUs at all if they are required."""
    counts = {rank: row["count"] for rank, row in enumerate(measured["ranks"]) if "count" in row}
    if not counts:
        return
    max_count = max(counts.values())
    if max_count == 0 and required:
        text = "every rank must see a GPU; got none. Request them (--gpus-per-node), and use a torch with CUDA"
        yield Finding(ERROR, text)
    for node, name in enumerate(nodes.names):
        fewer = [rank for rank in nodes.ranks(node) if counts.get(rank, max_count) < max_count]
        if fewer:
            seen = ", ".join(sorted({str(counts[rank]) for rank in fewer}))
            text = f"all ranks must see the same number of GPUs; got {seen} on rank{'s' * (len(fewer) > 1)} "
            text += f"{base.counted(fewer)} ({name}) and {max_count} on others. "
            text += "Exclude that node, or request the same on all"
            yield Finding(ERROR, text, (name,))


def _sharing(measured: dict, nodes: Nodes) -> Iterator[Finding]:
    """Report ranks of one node that would use the same GPU."""
    for node, name in enumerate(nodes.names):
        ranks_by_gpu: dict[str, list[int]] = {}
        for rank in nodes.ranks(node):
            if uuid := measured["ranks"][rank].get("uuid"):
                ranks_by_gpu.setdefault(uuid, []).append(rank)
        for uuid, ranks in ranks_by_gpu.items():
            if len(ranks) > 1:
                text = f"each rank must have a separate GPU; got ranks {base.counted(ranks)} on {uuid} ({name}). "
                yield Finding(WARNING, f"{text}Start one rank per GPU on each node, and check --gpu-bind")


def _health(name: str, node: dict) -> Iterator[Finding]:
    """Report GPUs of a node with memory errors, throttled clocks, or other users."""
    for gpu in node["gpus"]:
        at = f"{name}: {gpu['name']} {gpu['uuid']}"
        if gpu["ecc_errors"]:
            text = f"{at} has {gpu['ecc_errors']} uncorrected memory errors. Exclude the node, and tell the site"
            yield Finding(ERROR, text, (name,))
        slowed = [why for bit, why in SLOWED.items() if gpu["reasons"] & bit]
        if slowed:
            text = f"{at} is slowed down by {base.listed(slowed)}. Exclude the node, and tell the site"
            yield Finding(WARNING, text, (name,))
        others = [f"{pid} ({program})" for uuid, pid, program in node["processes"] if uuid == gpu["uuid"]]
        low = None not in (gpu["free_mb"], gpu["total_mb"]) and gpu["free_mb"] < FREE * gpu["total_mb"]
        if others or low:
            user = f"process {base.listed(others)}" if others else "somebody"
            text = f"{at} is in use by {user}: {gpu['free_mb']} of {gpu['total_mb']} MiB are free"
            yield Finding(WARNING, text, (name,))


def _summary(measured: dict, nodes: Nodes) -> str:
    """Describe GPUs without problems, or that there are none, in one line."""
    counts = {row["count"] for row in measured["ranks"]}
    if counts == {0}:
        with_driver = [name for name, node in measured["nodes"].items() if node and node["gpus"]]
        others = f" visible to torch, though the driver has some on {base.listed(with_driver)}"
        return "none" + others * bool(with_driver)
    kinds = {gpu["name"] for node in measured["nodes"].values() if node for gpu in node["gpus"]}
    text = f"each rank sees {counts.pop()} and has a separate one" + f" ({base.listed(sorted(kinds))})" * bool(kinds)
    return text + (", free and healthy" if kinds else "; no NVIDIA driver: health unknown")
