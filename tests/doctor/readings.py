"""Measured values with something changed in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def changed(measured: dict, changes: Mapping[str, Any]) -> dict:
    """`measured` with each value at a path, such as nodes.n2.gpus.1.free_mb, replaced."""
    for key, value in changes.items():
        *path, last = (int(name) if name.isdigit() else name for name in key.split("."))
        place: Any = measured
        for name in path:
            place = place[name]
        place[last] = value
    return measured
