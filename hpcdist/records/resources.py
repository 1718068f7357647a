"""`resources-rank*.jsonl`: the processor, memory, network and GPU of each rank over time."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError

from hpcdist.records.energy import SYSFS, NvidiaGpu
from hpcdist.records.files import Count, append, open_regular, writing

EVERY_S = 2.0  # seconds between samples
MOST_BYTES = 1 << 23  # that are read at a time
SPARING = 1000  # after each 1000 samples the interval doubles: a week has some 7,000 samples
_FILE_NAME = re.compile(r"resources-rank(\d{4,})\.jsonl")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one rank has used since its last sample."""

    time: float  # in seconds since 1970
    cores: float  # busy with this process, in the mean
    memory_bytes: Count  # of this process
    received_bytes_s: float  # by the rank's host, over its network interfaces
    sent_bytes_s: float
    gpu: float | None = None  # share of the last moment in which this rank's GPU was busy
    gpu_memory_bytes: Count | None = None  # of this rank's GPU, whoever uses it


_USAGE: TypeAdapter[Usage] = TypeAdapter(Usage)


def resources_path(folder: str | Path, rank: int) -> Path:
    """Return the file that a rank's samples go to."""
    return Path(folder) / f"resources-rank{rank:04d}.jsonl"


class Sampler:
    """Appends a sample of this process to a file every few seconds, on a separate thread, and one at the end.

    Training continues without samples if the file can't be written.

    Args:
        path: see `resources_path`.
        gpu: UUID of the GPU that this rank computes on.
    """

    def __init__(self, path: Path, gpu: str | None = None):
        self._path, self._process = path, psutil.Process()
        self._gpu: Callable[[], tuple[float | None, int | None]] = lambda: (None, None)
        if gpu is not None:
            with suppress(OSError):  # no driver of NVIDIA's; RunEnergy says so in the summary
                self._gpu = NvidiaGpu(gpu).used
        self._before = self._totals()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcdist-resources", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Append samples to the file until `close`, and a last one then."""
        every_s, count = EVERY_S, 0
        try:
            with writing(self._path), open(self._path, "ab", buffering=0) as file:
                ended = False
                while not ended:
                    ended = self._ended.wait(every_s)
                    append(file, self._path, _USAGE.dump_json(self._sample()) + b"\n")
                    count += 1
                    if count % SPARING == 0:
                        every_s *= 2
        except OSError as error:
            _logger.warning(f"processor, memory, network and GPU are recorded no longer: {error}")

    def _totals(self) -> tuple[float, float, int, int]:
        """Return the present time, and what has been used so far: seconds of processors, bytes received and sent."""
        used = self._process.cpu_times()
        return (time.monotonic(), used.user + used.system, *network_bytes())

    def _sample(self) -> Usage:
        """Return what was used since the last sample: the counters' differences per second."""
        before, self._before = self._before, self._totals()
        elapsed_s, *amounts = (now - then for now, then in zip(self._before, before))
        cores, received, sent = (round(amount / max(elapsed_s, 1e-3), 3) for amount in amounts)
        memory = self._process.memory_info().rss
        return Usage(round(time.time(), 2), cores, memory, received, sent, *self._gpu())

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def network_bytes(root: Path = SYSFS) -> tuple[int, int]:
    """Return the bytes that this host has received and sent, over network hardware (if it has any) and InfiniBand.

    MPI's traffic over InfiniBand bypasses the kernel, whose counters of interfaces do not include it.
    """
    interfaces = {name: counts for name, counts in psutil.net_io_counters(pernic=True).items() if name != "lo"}
    hardware = [name for name in interfaces if (root / "class" / "net" / name / "device").exists()]
    counted = [interfaces[name] for name in hardware or interfaces]  # else a bond would count once more
    received, sent = (sum(each.bytes_recv for each in counted), sum(each.bytes_sent for each in counted))
    for counters in root.glob("class/infiniband/*/ports/*/counters"):
        with suppress(OSError, ValueError):  # a port that does not count
            received += 4 * int((counters / "port_rcv_data").read_text())  # in units of four bytes
            sent += 4 * int((counters / "port_xmit_data").read_text())
    return received, sent


class Resources:
    """The samples of a run's ranks (`samples`, by rank, the oldest first), read while they are written."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes of each rank's file
        self.samples: dict[int, list[Usage]] = {}

    def read(self) -> None:
        """Read the samples that are new. Lines that are no samples, as a killed writer leaves them, are skipped."""
        for path in sorted(self._folder.glob("resources-rank*.jsonl")):
            if match := _FILE_NAME.fullmatch(path.name):
                with suppress(OSError):  # it is none that can be read; a run shows without it
                    while whole := self._new_lines(path):
                        samples = self.samples.setdefault(int(match[1]), [])
                        for line in whole.splitlines():
                            with suppress(ValidationError):
                                samples.append(_USAGE.validate_json(line))

    def _new_lines(self, path: Path) -> bytes:
        """Read the next whole lines of a file."""
        with open_regular(path) as file:
            file.seek(self._read.get(path, 0))
            data = file.read(MOST_BYTES)
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return whole
