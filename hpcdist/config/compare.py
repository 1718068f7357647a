"""Whether two configurations are the same, and where they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def fingerprint(config: BaseModel | Mapping[str, Any]) -> str:
    """sha256 (hexadecimal) of the configuration; the order of keys does not matter, 1 and 1.0 are different."""
    return hashlib.sha256(_canonical(_plain(config)).encode()).hexdigest()


def differences(a: BaseModel | Mapping[str, Any], b: BaseModel | Mapping[str, Any]) -> list[str]:
    """A line `optimizer.lr: 0.1 against 0.2` for each dotted key whose values differ; none if fingerprints agree."""
    left, right = _leaves(_plain(a)), _leaves(_plain(b))
    keys = [*left, *(key for key in right if key not in left)]
    return [
        f"{key}: {left.get(key, 'nothing')} against {right.get(key, 'nothing')}"
        for key in keys
        if left.get(key) != right.get(key)
    ]


def _plain(config: BaseModel | Mapping[str, Any]) -> Any:
    return config.model_dump() if isinstance(config, BaseModel) else config


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _leaves(value: Any, key: str = "") -> dict[str, str]:
    """Every value that is no table, as JSON, by its dotted key. An empty table is a value."""
    if not isinstance(value, Mapping) or not value:
        return {key: _canonical(value)}
    leaves: dict[str, str] = {}
    for name, item in value.items():
        leaves |= _leaves(item, f"{key}.{name}" if key else str(name))
    return leaves
