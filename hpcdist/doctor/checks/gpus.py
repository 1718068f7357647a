"""The GPUs: how many each rank sees, whether each has its own, whether they are free and in good health."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcdist.doctor.base import ERROR, OK, WARNING, Asked, Finding, Nodes, counted, gather, listed, within
from hpcdist.errors import DeadlineError

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator

CALL_S = 8.0  # the driver needs seconds for the first call where nobody keeps it awake (nvidia-persistenced)
FREE = 0.9  # of the memory: the driver itself keeps a few percent
FIELDS = ("uuid", "name", "memory.total", "memory.free", "ecc.errors.uncorrected.volatile.total")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # the second up to driver 535
SLOWED = {0x08: "hardware", 0x20: "heat, by the driver", 0x40: "heat", 0x80: "the power supply"}  # of nvml.h


# --- measuring --------------------------------------------------------------------------------------------------------
def measure(comm: Communicator, nodes: Nodes, asked: Asked) -> dict:
    """Collective. What torch shows each rank, and what the driver says on each node (None where there is no driver)."""
    number = nodes.ranks(nodes.of[comm.rank]).index(comm.rank)
    seen = gather(comm, _try(lambda: visible(number)))
    told = gather(comm, _try(driver) if comm.rank in nodes.leaders else None)
    return {"ranks": seen, "nodes": {nodes.name(rank): told[rank] for rank in nodes.leaders}}


def _try(call) -> dict | None:
    try:
        return within(CALL_S, "the GPU driver's answer", call)
    except (OSError, RuntimeError, ValueError) as error:  # DeadlineError is one of them
        return {"error": str(error).partition("\n")[0]}


def visible(number: int) -> dict:
    """How many GPUs this rank sees, and the UUID of the one that it uses as the rank of that number on its node."""
    import torch

    count = torch.cuda.device_count()
    own = str(getattr(torch.cuda.get_device_properties(number % count), "uuid", "")) if count else None
    return {"count": count, "uuid": own}


def driver() -> dict | None:
    """What nvidia-smi tells; None where it is not installed."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        table = _ask(f"--query-gpu={','.join((*FIELDS, REASONS[0]))}")
    except OSError:
        table = _ask(f"--query-gpu={','.join((*FIELDS, REASONS[1]))}")
    return {"gpus": parse(table), "processes": parse_processes(_ask("--query-compute-apps=gpu_uuid,pid,process_name"))}


def _ask(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S)
    if done.returncode:
        raise OSError(f"nvidia-smi has failed: {(done.stdout or done.stderr).strip()}")
    return done.stdout


def parse(table: str) -> list[dict]:
    """nvidia-smi's rows of FIELDS and REASONS; None for what a GPU does not tell."""
    found = []
    for line in filter(None, table.splitlines()):
        uuid, name, total, free, errors, reasons = (cell.strip() for cell in line.rsplit(",", 5))
        row = {"uuid": uuid, "name": name, "total_mb": _number(total), "free_mb": _number(free)}
        found.append(row | {"ecc_errors": _number(errors), "reasons": _number(reasons) or 0})
    return found


def parse_processes(table: str) -> list[list]:
    """nvidia-smi's rows of GPU, process number, program."""
    return [[cell.strip() for cell in line.split(",", 2)] for line in filter(None, table.splitlines())]


def _number(cell: str) -> int | None:
    try:
        return int(cell, 0)  # decimal, or 0x...
    except ValueError:
        return None  # [N/A], [Not Supported], [Unknown Error]


# --- judging ----------------------------------------------------------------------------------------------------------
def judge(measured: dict, nodes: Nodes, asked: Asked) -> Iterator[Finding]:
    """A line for each thing that is wrong with a node's GPUs; or one for all."""
    found = [*_broken(measured, nodes), *_counts(measured, nodes, asked.gpus), *_sharing(measured, nodes)]
    found += [f for name, told in measured["nodes"].items() if told and "gpus" in told for f in _health(name, told)]
    yield from found
    if not found:
        yield Finding(OK, _summary(measured, nodes))


def _broken(measured: dict, nodes: Nodes) -> Iterator[Finding]:
    for name, told in measured["nodes"].items():
        errors = [told["error"]] if told and "error" in told else []
        rows = [measured["ranks"][rank] for rank in nodes.ranks(nodes.names.index(name))]
        errors += [row["error"] for row in rows if "error" in row]
        if errors:
            yield Finding(ERROR, f"{name}: {errors[0]}. Leave it out, and tell the site", (name,))


def _counts(measured: dict, nodes: Nodes, wanted: bool) -> Iterator[Finding]:
    """Ranks that see fewer GPUs than others; all, if they see none and there must be some."""
    counts = {rank: row["count"] for rank, row in enumerate(measured["ranks"]) if "count" in row}
    if not counts:
        return
    most = max(counts.values())
    if most == 0 and wanted:
        text = "every rank must see a GPU; got none on any. Ask for them (--gpus-per-node), and use a torch with CUDA"
        yield Finding(ERROR, text)
    for node, name in enumerate(nodes.names):
        fewer = [rank for rank in nodes.ranks(node) if counts.get(rank, most) < most]
        if fewer:
            seen = ", ".join(sorted({str(counts[rank]) for rank in fewer}))
            text = f"all ranks must see the same number of GPUs; got {seen} on rank{'s' * (len(fewer) > 1)} "
            text += f"{counted(fewer)} ({name}) and {most} elsewhere. Leave that node out, or ask for the same on all"
            yield Finding(ERROR, text, (name,))


def _sharing(measured: dict, nodes: Nodes) -> Iterator[Finding]:
    """Ranks of one node that would use the same GPU."""
    for node, name in enumerate(nodes.names):
        users: dict[str, list[int]] = {}
        for rank in nodes.ranks(node):
            if uuid := measured["ranks"][rank].get("uuid"):
                users.setdefault(uuid, []).append(rank)
        for uuid, ranks in users.items():
            if len(ranks) > 1:
                text = f"each rank must have a GPU of its own; got ranks {counted(ranks)} on {uuid} ({name}). "
                yield Finding(WARNING, f"{text}Start as many ranks on a node as it has GPUs, and look at --gpu-bind")


def _health(name: str, told: dict) -> Iterator[Finding]:
    for gpu in told["gpus"]:
        at = f"{name}: {gpu['name']} {gpu['uuid']}"
        if gpu["ecc_errors"]:
            text = f"{at} has {gpu['ecc_errors']} uncorrected memory errors. Leave the node out, and tell the site"
            yield Finding(ERROR, text, (name,))
        slowed = [why for bit, why in SLOWED.items() if gpu["reasons"] & bit]
        if slowed:
            text = f"{at} is slowed down by {listed(slowed)}. Leave the node out, and tell the site"
            yield Finding(WARNING, text, (name,))
        others = [f"{pid} ({program})" for uuid, pid, program in told["processes"] if uuid == gpu["uuid"]]
        low = None not in (gpu["free_mb"], gpu["total_mb"]) and gpu["free_mb"] < FREE * gpu["total_mb"]
        if others or low:
            whose = f"process {listed(others)}" if others else "somebody"
            text = f"{at} is in use by {whose}: {gpu['free_mb']} of {gpu['total_mb']} MiB are free"
            yield Finding(WARNING, text, (name,))


def _summary(measured: dict, nodes: Nodes) -> str:
    counts = {row["count"] for row in measured["ranks"]}
    if counts == {0}:
        driven = [name for name, told in measured["nodes"].items() if told and told["gpus"]]
        return "none" + f" visible to torch, though the driver has some on {listed(driven)}" * bool(driven)
    kinds = {gpu["name"] for told in measured["nodes"].values() if told for gpu in told["gpus"]}
    text = f"each rank sees {counts.pop()} and has its own" + f" ({listed(sorted(kinds))})" * bool(kinds)
    return text + (", free and in good health" if kinds else "; no nvidia-smi: health unknown")
