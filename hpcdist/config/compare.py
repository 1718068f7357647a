"""Compare configurations: tell whether two are the same, and in which settings they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

K = TypeVar("K")


def fingerprint(config: BaseModel | Mapping[str, Any]) -> str:
    """Return the sha256 of a configuration, in hexadecimal. The order of keys has no effect; 1 and 1.0 differ."""
    return hashlib.sha256(_canonical(_plain(config)).encode()).hexdigest()


def differences(a: BaseModel | Mapping[str, Any], b: BaseModel | Mapping[str, Any]) -> list[str]:
    """List the keys whose values differ, as lines `optimizer.lr: 0.1 against 0.2`."""
    left, right = _leaves(_plain(a)), _leaves(_plain(b))
    keys = [*left, *(key for key in right if key not in left)]
    return [
        f"{key}: {left.get(key, 'nothing')} against {right.get(key, 'nothing')}"
        for key in keys
        if left.get(key) != right.get(key)
    ]


# Paths, settings without effect on training, and the strategy, which has a column of its own.
NOT_COMPARED = ("checkpoint.folder", "data.path", "log", "output", "strategy.name")


def differing(settings: Mapping[K, Mapping[str, Any]]) -> dict[str, dict[K, str]]:
    """Find the settings in which runs differ: for each dotted key the values, as text, of the runs that have it.

    Options of an algorithm are compared only among runs with the same algorithm.
    """
    leaves = {run: _leaves(of_run) for run, of_run in settings.items()}
    keys = dict.fromkeys(key for of_run in leaves.values() for key in of_run)
    different = {}
    for key in keys:
        values: dict[str, set[str]] = {}  # by algorithm
        for run, of_run in leaves.items():
            table: Any = settings[run].get(key.partition(".")[0])
            choice = key.endswith(".name")  # such as a compression's, which may be absent
            if choice or key in of_run:
                whole = (choice and key.count(".") == 1) or not isinstance(table, Mapping)  # not an algorithm's option
                algorithm = "" if whole else str(table.get("name"))
                values.setdefault(algorithm, set()).add(of_run.get(key, ""))
        if key not in NOT_COMPARED and any(len(texts) > 1 for texts in values.values()):
            different[key] = {run: of_run[key].strip('"') for run, of_run in leaves.items() if key in of_run}
    return different


def _plain(config: BaseModel | Mapping[str, Any]) -> Any:
    return config.model_dump() if isinstance(config, BaseModel) else config


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _leaves(value: Any, key: str = "") -> dict[str, str]:
    """Return all values, as JSON, by dotted key. An empty table is a value."""
    if not isinstance(value, Mapping) or not value:
        return {key: _canonical(value)}
    leaves: dict[str, str] = {}
    for name, item in value.items():
        leaves |= _leaves(item, f"{key}.{name}" if key else str(name))
    return leaves
