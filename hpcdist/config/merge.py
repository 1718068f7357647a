"""Merge and compare tables of settings; a TOML file overrides the defaults of a job, and flags override both."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcdist.errors import ConfigError
from hpcdist.records import read_bounded

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_OPENERS = ("[", "{", '"', "'")


def load(
    defaults: Mapping[str, Any], toml_path: str | Path | None = None, overrides: Iterable[str] = ()
) -> dict[str, Any]:
    """Override the defaults by a TOML file, and both by flags `key=value`, the last of which wins.

    Tables are merged key by key. If the `name` in a table changes (strategy, optimizer...), the new table replaces the
    old one, because the options of one algorithm mean nothing to another. `strategy = "hardsync"` is short for
    `strategy = {name = "hardsync"}`. The value of a flag is written as in TOML; a bare word is a string.

    Raises:
        ConfigError: the file is missing or not TOML, or a flag is malformed; the message names the line or the flag.
    """
    merged = copy.deepcopy(dict(defaults))
    if toml_path is not None:
        merged = _merge(merged, _read(Path(toml_path)))
    flags: dict[str, Any] = {}
    for override in overrides:
        _set(flags, override)
    return _merge(merged, flags)


def as_flags(values: Mapping[str, Any], where: str = "") -> list[str]:
    """Write a table as flags `key=value`, which `load` reads."""
    flags = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flags += as_flags(value, f"{where}{key}.")
        else:
            flags.append(f"{where}{key}={_toml(value)}")
    return flags


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_toml(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _merge(lower: dict[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return `lower`, overridden by `upper`, by the rules of `load`."""
    merged = dict(lower)
    for key, value in upper.items():
        old: Any = merged.get(key)
        if isinstance(old, str) and isinstance(value, dict):
            old = {"name": old}
        elif isinstance(value, str) and isinstance(old, dict) and "name" in old:
            value = {"name": value}
        tables = isinstance(old, dict) and isinstance(value, dict)
        same_algorithm = tables and value.get("name", old.get("name")) == old.get("name")
        merged[key] = _merge(old, value) if same_algorithm else value
    return merged


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bounded(path).decode())
    except FileNotFoundError:
        raise ConfigError(f"configuration file must exist; got {path}. Check the path.") from None
    except OSError as error:
        raise ConfigError(f"configuration file must be readable; got {path} ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be TOML in UTF-8; got other bytes at offset {error.start}.") from None
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        where = f"{path}:{line[1]}" if line else str(path)
        raise ConfigError(f"{where} must be TOML; got an error: {error}. Strings need quotes there.") from None
    except (ValueError, RecursionError) as error:  # too many digits, or nested too deep for Python
        raise ConfigError(f"{path} must be TOML; got an error: {error}. Write simpler values.") from None


def _set(table: dict[str, Any], override: str) -> None:
    """Store the value of a flag `key.subkey=value` in nested tables."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not _KEY.fullmatch(key):
        raise ConfigError(f"--set must be key=value, such as strategy.period=4; got {override!r}.")
    *parents, name = key.split(".")
    value = _parse(text.strip(), override)
    for parent in parents:
        below = table.setdefault(parent, {})
        if isinstance(below, str):  # --set strategy=hardsync --set strategy.splits=2
            below = table[parent] = {"name": below}
        if not isinstance(below, dict):
            raise ConfigError(f"--set {override}: {parent} must be a table; got {below!r} by an earlier --set.")
        table = below
    table[name] = value


def _parse(text: str, override: str) -> Any:
    """Return the value of a flag; the text itself if it is a bare word."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text.startswith(_OPENERS):
            raise ConfigError(f"--set {override}: the value must be TOML or a bare word; got {error}.") from None
        return text
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--set {override:.60}: the value must be TOML or a bare word; got {error}.") from None
    # A text of several lines may parse as several keys, and a date as a date; both must be strings here.
    value = parsed["value"]
    return value if len(parsed) == 1 and isinstance(value, (bool, int, float, str, list, dict)) else text


# --- comparison -------------------------------------------------------------------------------------------------------
def fingerprint(config: Mapping[str, Any]) -> str:
    """Return the sha256 of a configuration, in hexadecimal. The order of keys has no effect; 1 and 1.0 differ."""
    return hashlib.sha256(_canonical(config).encode()).hexdigest()


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """List the keys whose values differ, as lines `optimizer.lr: 0.1 against 0.2`."""
    left, right = _leaves(a), _leaves(b)
    keys = [*left, *(key for key in right if key not in left)]
    return [
        f"{key}: {left.get(key, 'nothing')} against {right.get(key, 'nothing')}"
        for key in keys
        if left.get(key) != right.get(key)
    ]


Changes = dict[str, tuple[Any, Any]]


def changes(before: Any, now: Any, where: str = "") -> Changes:
    """Return the settings whose values differ: by dotted key, the values (before, now).

    A setting that only one of the tables has is skipped, as versions of hpcdist have different settings. If an
    algorithm's name differs, its options mean something else, and only the name is listed.
    """
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return {} if _canonical(before) == _canonical(now) else {where: (before, now)}
    same_algorithm = before.get("name") == now.get("name")
    changed: Changes = {}
    for key in (key for key in now if key in before and (same_algorithm or key == "name")):
        changed |= changes(before[key], now[key], f"{where}.{key}" if where else key)
    return changed


def describe_changes(changed: Mapping[str, Iterable[Any]]) -> str:
    """Write changes as `optimizer.lr 0.1 → 0.01, batch_size 16 → 32`."""
    return ", ".join(f"{key} {' → '.join(map(_readable, values))}" for key, values in changed.items())


def _readable(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else _toml(value)


# Paths, settings without effect on training, and the strategy, which has a separate column.
NOT_COMPARED = ("checkpoint.folder", "data.path", "log", "output", "strategy.name")


def differing(settings: Mapping[Any, Mapping[str, Any]]) -> dict[str, dict[Any, str]]:
    """Return the settings in which runs differ: by dotted key, for each run that has the key, its value as text.

    Options of an algorithm are compared only among runs with the same algorithm.
    """
    leaves = {run: _leaves(of_run) for run, of_run in settings.items()}
    keys = dict.fromkeys(key for of_run in leaves.values() for key in of_run)
    different = {}
    for key in keys:
        values: dict[str, set[str]] = {}  # by algorithm
        for run, of_run in leaves.items():
            table: Any = settings[run].get(key.partition(".")[0])
            is_name = key.endswith(".name")  # such as a compression's, which may be absent
            if is_name or key in of_run:
                # Top-level settings and names are no options of an algorithm.
                is_top_level = (is_name and key.count(".") == 1) or not isinstance(table, Mapping)
                algorithm = "" if is_top_level else str(table.get("name"))
                values.setdefault(algorithm, set()).add(of_run.get(key, ""))
        if key not in NOT_COMPARED and any(len(texts) > 1 for texts in values.values()):
            different[key] = {run: of_run[key].strip('"') for run, of_run in leaves.items() if key in of_run}
    return different


def _canonical(value: Any) -> str:
    return json.dumps(by_value(value), sort_keys=True)


def by_value(value: Any) -> Any:
    """Return settings in types that JSON has, equal in all processes with equal settings.

    So addresses in a repr, the order of a set, and the device of a tensor are dropped.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(by_value(key)): by_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [by_value(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(by_value(item)) for item in value)
    if hasattr(value, "tolist"):  # a tensor or an array
        values = by_value(value.tolist())
        return values if len(str(values)) < 1000 else fingerprint({"values": values})
    if hasattr(value, "__qualname__"):  # a function or a class
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", str(value))


def _leaves(value: Any, key: str = "") -> dict[str, str]:
    """Return all values, as JSON, by dotted key. An empty table is a value."""
    if not isinstance(value, Mapping) or not value:
        return {key: _canonical(value)}
    leaves: dict[str, str] = {}
    for name, item in value.items():
        leaves |= _leaves(item, f"{key}.{name}" if key else str(name))
    return leaves
