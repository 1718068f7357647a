"""Tables of the page on benchmarks, from the rows that `hpcdist bench COMMAND --json FILE` has written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Table = list[list[str]]  # the first row is the head
SIZES = {
    "4 KiB": 2**12,
    "64 KiB": 2**16,
    "1 MiB": 2**20,
    "4 MiB": 2**22,
    "16 MiB": 2**24,
    "64 MiB": 2**26,
    "256 MiB": 2**28,
}
SUMS = {"auto": "auto", "mpi": "MPI's own", "gloo": "gloo", "copy": "a copy"}
MODELS = {"mlp_100k": "100 k parameters", "mlp_10M": "10 M parameters"}
LENGTHS = {"10 k parameters": 40_000, "100 k": 400_000, "1 M": 4_000_000, "10 M": 40_000_000, "50 M": 200_000_000}
STEPS = {
    "alone": "one rank alone", "allreduce": "`allreduce`", "local_sgd_16": "`local_sgd` (period 16)",
    "diloco_16": "`diloco` (period 16)", "gossip_pull": "`gossip_pull`", "gossip_push": "`gossip_push`",
    "gossip_sync": "`gossip_sync`", "dpsgd": "`dpsgd`", "sgp": "`sgp`", "adpsgd": "`adpsgd`",
    "strom": "`strom` (0.1 % of the elements)",
}  # fmt: skip
ALONE = {"alone": "one rank alone, SGD", "alone_adamw": "one rank alone, AdamW"}
WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp2": "FSDP2"}
CODERS = {
    "threshold_0.1%": "`threshold`, 0.1 %", "threshold_1%": "`threshold`, 1 %", "topk_0.1%": "`topk`, 0.1 %",
    "topk_1%": "`topk`, 1 %", "chunk_topk_0.1%": "`chunk_topk`, 0.1 %", "chunk_topk_1%": "`chunk_topk`, 1 %",
    "dgc_0.1%": "`dgc`, 0.1 %", "dgc_1%": "`dgc`, 1 %", "onebit": "`onebit`", "signsgd": "`signsgd`",
    "ef_signsgd": "`ef_signsgd`", "terngrad": "`terngrad`", "bins": "`bins`, 2 bits", "e3m0": "`e3m0`",
    "qsgd": "`qsgd`, 15 levels in all", "powersgd_1": "`powersgd`, rank 1", "powersgd_4": "`powersgd`, rank 4",
    "fp16": "`fp16`", "bf16": "`bf16`",
}  # fmt: skip


def allreduce(folder: Path) -> Table:
    """Set times of an all-reduce beside each other, by length."""
    rows = [["all-reduce in place, float32", *SUMS.values()]]
    for ranks in (2, 4):
        found = {(row["name"], row["bytes"]): row["median_s"] for row in _read(folder / f"allreduce-{ranks}.json")}
        for shown, size in SIZES.items():
            rows.append([f"{ranks} ranks, {shown}", *(_time(found[name, size]) for name in SUMS)])
    return rows


def collectives(folder: Path) -> Table:
    """Set times of collective calls beside each other, by call and length."""
    names = {"hpcdist": "hpcdist", **{name: SUMS[name] for name in ("mpi", "gloo", "copy")}}
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in _read(folder / "collectives.json"):
        found.setdefault((row["call"], row["bytes"]), {})[row["name"]] = row["median_s"]
    lengths = {size: shown for shown, size in SIZES.items()}
    rows = [[f"`{call}`, {lengths[size]}", *(_time(of[name]) for name in names)] for (call, size), of in found.items()]
    return [["collective calls on float32", *names.values()], *rows]


def torch(folder: Path) -> Table:
    """Set times of torch.distributed's calls and steps beside each other, by call and length."""
    rows = [row for row in _read(folder / "torch.json") if row["call"] not in WRAPPERS]
    sides = {"hpcdist": "hpcdist", "gloo": "gloo", "communicator": "hpcdist's own call"}
    return [["torch.distributed on float32", *sides.values()], *_by_call(rows, sides)]


def steps_of_torch(folder: Path) -> Table:
    """Set times of DistributedDataParallel's and FSDP2's steps beside each other."""
    rows = [{**row, "call": WRAPPERS[row["call"]]} for row in _read(folder / "torch.json") if row["call"] in WRAPPERS]
    sides = {"hpcdist": "hpcdist", "gloo": "gloo", "alone": "one rank alone"}
    return [["training step on 2 ranks, 6 M parameters", *sides.values()], *_by_call(rows, sides)]


def horovod_calls(folder: Path) -> Table:
    """Set times of what scripts written for Horovod do beside each other."""
    sides = {"hpcdist": "hpcdist.hvd", "horovod": "Horovod", "alone": "one rank alone"}
    rows = []
    for row in _read(folder / "horovod-calls.json"):
        shown = f"step, {_bytes(row['bytes'] / 4)} parameters" if row["call"] == "step" else row["call"]
        rows.append({**row, "call": shown, "bytes": row["bytes"] if row["call"] == "allreduce" else None})
    return [["calls of Horovod's interface", *sides.values()], *_by_call(rows, sides)]


def _by_call(rows: Iterable[Row], sides: dict[str, str]) -> Table:
    """Set the times of these sides beside each other, by call and length."""
    found: dict[tuple[str, int | None], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row["call"], row["bytes"]), {})[row["name"]] = row["median_s"]
    lengths = {size: shown for shown, size in {**SIZES, "16 KiB": 2**14, "256 KiB": 2**18}.items()}
    table = []
    for (call, size), times in found.items():
        shown = f"`{call}`, {lengths[size]}" if size in lengths else call
        table.append([shown, *(_time(times[name]) if name in times else "" for name in sides)])
    return table


def step(folder: Path) -> Table:
    """Set times of a training step beside each other."""
    found = {row["name"]: row["median_s"] for row in _read(folder / "train.json")}
    head = ["training step on 2 ranks", "one rank alone", "`allreduce`", "DDP on gloo"]
    names = ("alone", "allreduce", "ddp_gloo")
    return [head, *([shown, *(_time(found[f"{model}/{n}"]) for n in names)] for model, shown in MODELS.items())]


def server(folder: Path) -> Table:
    """Set updates per second through servers beside those through gloo's send and recv."""
    found = {
        (r["name"], r["servers"], r["workers"], r["bytes"]): r["updates_per_s"] for r in _read(folder / "server.json")
    }
    rows = [["updates per second, ours / gloo send and recv", *LENGTHS]]
    for servers, workers in sorted({key[1:3] for key in found}):
        pairs = [[found.get((name, servers, workers, size)) for name in ("ours", "gloo")] for size in LENGTHS.values()]
        cells = [" / ".join(map(short, pair)) if None not in pair else "" for pair in pairs]
        rows.append([f"{_counted(workers, 'worker')}, {_counted(servers, 'server')}", *cells])
    return rows


def steps(folder: Path) -> Table:
    """Set times and bytes of a training step of 10 M parameters beside each other, by strategy."""
    found = {row["name"]: row for row in _read(folder / "gossip.json")}
    head = ["training step on 2 ranks, 10 M parameters", "time", "bytes sent or fetched per rank"]
    rows = [[*head, "over alone, in copies of the parameters"]]
    for name, shown in STEPS.items():
        row = found[f"mlp_10M/{name}"]
        moved = _bytes(row["bytes_sent"] + row["bytes_fetched"])
        copies = f"{row['overhead_copies']:.1f}" if name != "alone" else ""
        rows.append([shown, f"{1e3 * row['median_s']:.1f} ms", moved, copies])
    return rows


def strategies(folder: Path) -> Table:
    """Set times of a training step beside each other, by strategy, with their multiples of a step of one rank alone."""
    found = {row["name"]: row["median_s"] for row in _read(folder / "gossip.json")}
    of_model = [{name.removeprefix(f"{model}/"): s for name, s in found.items() if model in name} for model in MODELS]
    rows = [["training step on 2 ranks", *(cell for shown in MODELS.values() for cell in (shown, "times alone"))]]
    for name in (name for name in of_model[0] if name != "copy"):
        shown = ALONE.get(name, f"`{name.removesuffix('_16')}`" + " (period 16)" * name.endswith("_16"))
        times = ((_time(of[name]), f"{of[name] / of['alone']:.2f}") for of in of_model)
        rows.append([shown, *(cell for pair in times for cell in pair)])
    return rows


def compress(folder: Path) -> Table:
    """Set bytes and times of coding beside each other."""
    found = {row["name"]: row for row in _read(folder / "coding.json")}
    head = ["coding 10 M float32 with error feedback, one core", "bytes fewer", "encode", "decode"]
    rows = [[*head, "dense bytes through both"]]
    for name, shown in CODERS.items():
        row = found[name]
        fewer = f"{row['ratio']:.0f}" if row["ratio"] > 10 else f"{row['ratio']:.2g}"
        times = (f"{1e3 * row[key]:.1f} ms" for key in ("encode_s", "decode_s"))
        rows.append([shown, f"{fewer} times", *times, f"{row['bytes_per_s'] / 1e9:.1f} GB/s"])
    return rows


TABLES: dict[str, Callable[[Path], Table]] = {
    "allreduce": allreduce,
    "collectives": collectives,
    "torch": torch,
    "torch-steps": steps_of_torch,
    "horovod-calls": horovod_calls,
    "step": step,
    "server": server,
    "steps": steps,
    "strategies": strategies,
    "compress": compress,
}


# --- how they are written ---------------------------------------------------------------------------------------------
def _read(path: Path) -> Iterable[Row]:
    return json.loads(path.read_text())


def _time(seconds: float) -> str:
    """Write a time with two digits, or three before the point."""
    value, unit = (1e6 * seconds, "µs") if seconds < 1e-4 else (1e3 * seconds, "ms")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:#.2g} {unit}"


def short(value: float) -> str:
    """Write a number with three digits, or all of them before the point."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"


def _bytes(count: float) -> str:
    if count < 1:
        return "0"
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"
