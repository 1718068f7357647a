"""The peak of the memory that a call takes: resident set, or the device's own count."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Call, and return by how much this process's memory rose at most; None where the system does not tell.

    On a GPU it is what torch has allocated there, else the resident set, whose peak Linux lets a process begin anew.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else the call would be given memory that others freed, at no cost
        CLEAR.write_text("5")  # the peak begins anew: proc(5)
    except (AttributeError, OSError):
        call()
        return None
    before = _resident("VmRSS")
    call()
    return max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    (kib,) = re.findall(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return 1024 * int(kib)
